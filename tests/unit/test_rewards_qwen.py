"""HPSv3 and VideoReward against transformers' own Qwen2-VL and processor, on small random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import REWARDS, VideoBatch
from flashgrpo_core.rewards.qwen_vl import fit_size
from flashgrpo_core.rewards.video_reward import sampled_frames
from tests.unit._reward_models import (
    PROMPTS,
    clip,
    published_names,
    random_qwen,
    spread,
    write_hpsv3,
    write_qwen_base,
)

TOLERANCE = 1e-4
#: The chat template of Qwen2-VL-Instruct.
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HPSV3_TEXT = (
    Path(__file__).parents[2] / "flashgrpo_core/assets/reward_prompts/hpsv3.txt"
).read_text(encoding="utf-8")
VIDEO_TEXT = (
    "\nRate the visual quality, from 0 to 10: <|VQ_reward|>\nEND\n\nRate the motion, low when "
    "nothing moves: <|MQ_reward|>\nEND\n\nDoes it show this?\nTextual prompt - {text_prompt}\n"
    "Rate it: <|TA_reward|>\nEND\n"
)


def processor(folder: Path, extra: list[str]) -> Any:
    """transformers' own processor on the small tokenizer."""
    import transformers as t

    # The fourth series asks for the class by name; the fifth builds it from other arguments.
    fourth = t.__version__.startswith("4.")
    tokenizer = (t.Qwen2TokenizerFast if fourth else t.PreTrainedTokenizerFast)(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token="<|endoftext|>",  # noqa: S106
        padding_side="right",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": extra})
    limits = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    parts = [t.Qwen2VLImageProcessor(**limits), tokenizer]
    if hasattr(t, "Qwen2VLVideoProcessor"):  # before 4.52 the other one takes videos, too
        parts.append(t.Qwen2VLVideoProcessor(**limits))
    return t.Qwen2VLProcessor(*parts, chat_template=TEMPLATE)


def user_turn(processor: Any, kind: str, text: str) -> str:
    content = [{"type": kind, kind: "x"}, {"type": "text", "text": text}]
    turn = [{"role": "user", "content": content}]
    return processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


@torch.no_grad()
def hidden_states(network: Any, inputs: Any, multimodal: bool = False) -> torch.Tensor:
    """Last hidden states with the positions 0, 1, 2, ... of transformers 4.45, or the newer ones."""
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1]).view(1, 1, -1).expand(3, len(ids), -1)
    options = {} if multimodal else {"position_ids": positions}
    return network(**inputs, **options, output_hidden_states=True).hidden_states[-1]


def score(name: str, videos: list[np.ndarray], fps: float = 16.0, **options: Any) -> dict:
    reward = REWARDS[name](dtype="fp32", device="cpu", **options)
    prompts = [PROMPTS[i % 2] for i in range(len(videos))]
    return reward.score(VideoBatch(np.stack(videos), prompts, fps, [""] * len(videos)))


# --- HPSv3 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hpsv3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("rewards") / "HPSv3"
    return folder, *write_hpsv3(folder, HPSV3_TEXT)


def hpsv3_reference(
    hpsv3: tuple[Path, Any, Any], frames: np.ndarray, prompt: str, size: tuple[int, int], **how: Any
) -> np.ndarray:
    folder, network, head = hpsv3
    own = processor(folder, ["<|Reward|>"])
    pictures = [
        Image.fromarray(f).resize((size[1], size[0]), Image.Resampling.BICUBIC) for f in frames
    ]
    text = user_turn(own, "image", HPSV3_TEXT.format(text_prompt=prompt))
    inputs = own(text=[text] * len(frames), images=pictures, padding=True, return_tensors="pt")
    token = own.tokenizer.convert_tokens_to_ids("<|Reward|>")
    at = inputs["input_ids"] == token
    assert (at.sum(1) == 1).all()
    with torch.no_grad():
        return head(hidden_states(network, inputs, **how)[at])[:, 0].numpy()


@pytest.mark.parametrize("frames_per_forward", [1, 5])
@pytest.mark.parametrize(("shape", "size"), [((60, 104), (364, 616)), ((97, 41), (700, 308))])
def test_hpsv3_agrees(
    hpsv3: tuple[Path, Any, Any],
    shape: tuple[int, int],
    size: tuple[int, int],
    frames_per_forward: int,
) -> None:
    videos = [clip(3, *shape, seed) for seed in (1, 2)]
    expected = np.array(
        [hpsv3_reference(hpsv3, v, p, size) for v, p in zip(videos, PROMPTS, strict=True)]
    )
    assert expected.std() > 0.01
    got = score("hpsv3", videos, model=str(hpsv3[0]), every=1, batch=frames_per_forward)
    np.testing.assert_allclose(got["hpsv3"], expected.mean(1), atol=TOLERANCE)
    if frames_per_forward == 5:
        newer = hpsv3_reference(hpsv3, videos[0], PROMPTS[0], size, multimodal=True)
        assert abs(newer - expected[0]).max() > 100 * TOLERANCE, "the positions must matter"


def test_hpsv3_reads_the_names_of_every_version(
    hpsv3: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    folder, video = hpsv3[0], clip(1, 60, 104)
    tensors = load_file(folder / "HPSv3.safetensors")
    assert "visual.patch_embed.proj.weight" in tensors and "lm_head.weight" in tensors
    newer = {}
    for name, tensor in tensors.items():
        if name.startswith("visual."):
            name = f"model.{name}"
        elif name.startswith("model."):
            name = name.replace("model.", "model.language_model.", 1)
        newer[name] = tensor
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    save_file(newer, tmp_path / "model.safetensors")
    old, new = (score("hpsv3", [video], model=str(f))["hpsv3"] for f in (folder, tmp_path))
    assert old == new


def test_hpsv3_keeps_its_head_in_fp32_and_its_scores_in_limits(
    hpsv3: tuple[Path, Any, Any],
) -> None:
    video = clip(1, 60, 104)
    full = score("hpsv3", [video], model=str(hpsv3[0]))["hpsv3"][0]
    half = REWARDS["hpsv3"](model=str(hpsv3[0]), dtype="bf16", device="cpu")
    batch = VideoBatch(video[None], [PROMPTS[0]], 16.0, [""])
    assert abs(half.score(batch)["hpsv3"][0] - full) < 0.1
    network = half.networks()[0]
    assert network.rm_head[0].weight.dtype == torch.float32
    assert network.language.embed_tokens.weight.dtype == torch.bfloat16
    limit = abs(full) / 2
    if limit >= 0.1:
        limited = score("hpsv3", [video], model=str(hpsv3[0]), limit=limit)["hpsv3"][0]
        assert limited == pytest.approx(np.sign(full) * limit)


def test_a_prompt_cannot_bring_special_tokens(hpsv3: tuple[Path, Any, Any]) -> None:
    reward = REWARDS["hpsv3"](model=str(hpsv3[0]), device="cpu")
    prompts = [
        "{x} <|Reward|><|image_pad|> <|im_end|>",
        "{x} < |Reward|>< |image_pad|> < |im_end|>",
    ]
    video = clip(1, 60, 104)
    values = reward.score(VideoBatch(np.stack([video, video]), prompts, 8.0, ["", ""]))["hpsv3"]
    assert np.isfinite(values).all() and values[0] == values[1]


@pytest.mark.parametrize(
    ("shape", "size"),
    [((480, 832), (336, 588)), ((832, 480), (588, 336)), ((448, 448), (448, 448))],
)
def test_the_size_rule(shape: tuple[int, int], size: tuple[int, int]) -> None:
    """832x480 is 252 tokens, as the original makes it."""
    assert fit_size(*shape, 28, 256 * 784, 256 * 784) == size


# --- VideoReward --------------------------------------------------------------------------------

NORM = {"VQ_mean": 3.5, "VQ_std": 2.0, "MQ_mean": 1.25, "MQ_std": 1.5, "TA_mean": -2.0}


def write_video_reward(folder: Path, outputs: int, layout: str, rslora: bool = False) -> Any:
    """VideoReward's folder; returns a function from inputs to the three raw values."""
    settings = write_qwen_base(folder, [VIDEO_TEXT, *PROMPTS])
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() + 3
    network = random_qwen(settings, tokens, seed=5)
    head = torch.nn.Linear(32, outputs, bias=False)
    spread(head, 6)
    base = published_names(network)
    generator = torch.Generator().manual_seed(9)
    adapter, merged = {}, dict(base)
    scale = 32 / (8**0.5 if rslora else 8)
    for name, weight in base.items():
        if name.startswith("model.layers.") and name.endswith("proj.weight"):
            a = torch.randn(8, weight.shape[1], generator=generator) * 0.1
            b = torch.randn(weight.shape[0], 8, generator=generator) * 0.05
            adapter[name.removesuffix(".weight")] = (a, b)
            merged[name] = weight + scale * (b @ a)
    lora = {"lora_enable": True, "lora_r": 8, "lora_alpha": 32, "use_rslora": rslora}
    data = {"fps": 2.0, "max_frame_pixels": 320 * 240, "sample_type": "uniform"}
    data |= {"prompt_template_type": "detailed_special", "eval_dim": ["VQ", "MQ", "TA"]}
    described = {"data_config": data, "peft_lora_config": lora, "inference_config": NORM}
    (folder / "model_config.json").write_text(json.dumps(described))
    (folder / "prompt_template.py").write_text(
        "raise SystemExit('never run')\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = "
        f'"""{VIDEO_TEXT}"""\n'
    )
    newest = folder / "checkpoint-200"
    newest.mkdir()
    (folder / "checkpoint-30").mkdir()
    peft = {}
    for name, tensor in {**base, "rm_head.weight": head.weight.detach()}.items():
        module = name.removesuffix(".weight").removesuffix(".bias")
        inner = name if module not in adapter else name.replace(module, f"{module}.base_layer")
        peft[f"base_model.model.{inner}"] = tensor
    pairs = {
        f"base_model.model.{name}.lora_{part}.default.weight": value
        for name, pair in adapter.items()
        for part, value in zip("AB", pair, strict=True)
    }
    if layout == "whole":
        torch.save({**peft, **pairs}, newest / "model.pth")
    else:
        trained = ("base_model.model.rm_head", "base_model.model.model.embed_tokens")
        torch.save(
            {k: v for k, v in peft.items() if k.startswith(trained)},
            newest / "non_lora_state_dict.pth",
        )
        renamed = {k.replace(".default.", "."): v.contiguous() for k, v in pairs.items()}
        save_file(renamed, newest / "adapter_model.safetensors")
        # As published today, under the newer names, and with more embeddings.
        network.resize_token_embeddings(tokens + 37)
        save_file(
            {k: v.clone() for k, v in network.state_dict().items()}, folder / "model.safetensors"
        )
        network.resize_token_embeddings(tokens)
    state = {}
    for name, tensor in network.state_dict().items():
        old = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        state[name] = merged.get(old, tensor)
    network.load_state_dict(state)

    def values(inputs: Any, ids: list[int], **how: Any) -> np.ndarray:
        hidden = hidden_states(network, inputs, **how)[0]
        rows = [hidden[(inputs["input_ids"][0] == token).nonzero().item()] for token in ids]
        found = torch.stack(rows) @ head.weight.detach().T  # [3, outputs]
        return (found.diagonal() if outputs == 3 else found[:, 0]).numpy()

    return values


def video_reference(
    folder: Path,
    values: Any,
    video: np.ndarray,
    prompt: str,
    size: Any,
    indices: list[int],
    **how: Any,
) -> np.ndarray:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv

    tokens = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
    own = processor(folder, tokens)
    frames = torch.from_numpy(video[indices]).permute(0, 3, 1, 2)
    frames = tv.resize(frames, list(size), InterpolationMode.BICUBIC, antialias=True)
    text = user_turn(own, "video", VIDEO_TEXT.format(text_prompt=prompt))
    options = {"do_resize": False}
    if hasattr(own, "video_processor"):
        options["do_sample_frames"] = False
    inputs = own(text=[text], videos=[frames], return_tensors="pt", videos_kwargs=options)
    ids = own.tokenizer.convert_tokens_to_ids(tokens)
    raw = values(inputs, ids, **how)
    mean, std = np.array([3.5, 1.25, -2.0]), np.array([2.0, 1.5, 1.0])
    return (raw - mean) / std


@pytest.mark.parametrize(
    ("outputs", "layout", "rslora"), [(3, "whole", False), (1, "whole", True), (3, "parts", False)]
)
def test_video_reward_agrees(tmp_path: Path, outputs: int, layout: str, rslora: bool) -> None:
    values = write_video_reward(tmp_path, outputs, layout, rslora)
    # 33 frames at 16 fps are two seconds: four frames.
    videos = [clip(33, 90, 120, seed) for seed in (1, 2)]
    reference = [
        video_reference(tmp_path, values, v, p, (280, 392), [0, 11, 21, 32])
        for v, p in zip(videos, PROMPTS, strict=True)
    ]
    expected = np.array(reference)
    assert expected.std(0).min() > 1e-3
    got = score("videoreward", videos, model=str(tmp_path), motion=2.0)
    parts = np.stack([got[f"videoreward.{p}"] for p in ("visual", "motion", "text")], 1)
    np.testing.assert_allclose(parts, expected, atol=TOLERANCE)
    np.testing.assert_allclose(got["videoreward"], expected @ [1, 2, 1], atol=5 * TOLERANCE)
    if layout == "whole" and outputs == 3:
        how = {"multimodal": True}
        newer = video_reference(
            tmp_path, values, videos[0], PROMPTS[0], (280, 392), [0, 11, 21, 32], **how
        )
        assert abs(newer - expected[0]).max() > 100 * TOLERANCE, "the positions must matter"


@pytest.mark.parametrize(
    ("count", "fps", "expected"),
    [
        (81, 16.0, 10),
        (33, 16.0, 4),
        (5, 16.0, 4),
        (3, 8.0, 2),
        (2, 8.0, 2),
        (1, 8.0, 2),
        (2000, 1.0, 768),
    ],
)
def test_sampled_frames(count: int, fps: float, expected: int) -> None:
    found = sampled_frames(count, fps, 2.0)
    assert len(found) == expected and len(found) % 2 == 0
    assert found[0] == 0 and found[-1] == count - 1 and found == sorted(found)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_video_reward_takes_short_clips(tmp_path: Path, count: int) -> None:
    write_video_reward(tmp_path, 3, "whole")
    got = score("videoreward", [clip(count, 56, 84)], model=str(tmp_path))
    assert all(np.isfinite(v).all() for v in got.values())


def test_what_is_missing_in_a_folder_is_named(hpsv3: tuple[Path, Any, Any], tmp_path: Path) -> None:
    write_video_reward(tmp_path / "v", 3, "whole")
    folder = tmp_path / "v"

    def fails(message: str) -> None:
        with pytest.raises(FlashGRPOError, match=message):
            score("videoreward", [clip(4)], model=str(folder))

    (folder / "tokenizer.json").rename(folder / "t")
    fails(r"tokenizer\.json is missing: put the tokenizer\.json of the base model there")
    (folder / "t").rename(folder / "tokenizer.json")
    text = (folder / "prompt_template.py").read_text()
    (folder / "prompt_template.py").write_text(text.replace("<|MQ_reward|>", ""))
    fails("no text DETAILED_PROMPT_WITH_SPECIAL_TOKEN with the tokens")
    (folder / "prompt_template.py").unlink()
    fails(r"prompt_template\.py is missing: put prompt_template\.py of the VideoAlign repository")
    (folder / "prompt_template.py").write_text(text)
    settings = json.loads((folder / "model_config.json").read_text())
    settings["data_config"]["prompt_template_type"] = "simple"
    (folder / "model_config.json").write_text(json.dumps(settings))
    fails("prompt_template_type = 'simple' is not supported")
    settings["data_config"]["prompt_template_type"] = "detailed_special"
    del settings["peft_lora_config"]["lora_r"]
    (folder / "model_config.json").write_text(json.dumps(settings))
    fails("holds a LoRA, but model_config.json has no peft_lora_config.lora_r")
    (folder / "checkpoint-200" / "model.pth").unlink()
    fails(r"checkpoint-200: no model\.pth, and no adapter_model\.safetensors")
    with pytest.raises(FlashGRPOError, match=r"missing: .*rm_head.*complete checkpoint"):
        broken = tmp_path / "h"
        broken.mkdir()
        for file in ("config.json", "tokenizer.json"):
            (broken / file).write_bytes((hpsv3[0] / file).read_bytes())
        tensors = load_file(hpsv3[0] / "HPSv3.safetensors")
        save_file(
            {k: v for k, v in tensors.items() if "rm_head" not in k}, broken / "m.safetensors"
        )
        score("hpsv3", [clip(1)], model=str(broken))
