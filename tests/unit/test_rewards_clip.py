"""CLIPScore, PickScore, HPSv2.1 and the LAION aesthetic against references that are not ours.

The weights are random and small, written to disk in the layouts of the real ones and loaded by the
same code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from flashgrpo_core.control import Control
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import REWARDS, RewardMix, VideoBatch
from tests.unit._reward_models import (
    PROMPTS,
    clip,
    clip_settings,
    spread,
    write_clip,
    write_clip_tokenizer,
)

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("modèle clip") / "a clip")


def batch(videos: list[np.ndarray], prompts: list[str] | None = None) -> VideoBatch:
    prompts = prompts or [PROMPTS[i % 2] for i in range(len(videos))]
    return VideoBatch(np.stack(videos), prompts, 16.0, [f"g{i}" for i in range(len(videos))])


def score(name: str, videos: list[np.ndarray], **options: Any) -> np.ndarray:
    reward = REWARDS[name](dtype="fp32", device="cpu", **options)
    return reward.score(batch(videos))[name]


def pil_processor(size: int) -> Any:
    """transformers' own preprocessing with PIL, under the name of either major version."""
    try:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as P
    except ImportError:
        from transformers import CLIPImageProcessor as P
    return P(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def reference_cosines(folder: Path, pixels: torch.Tensor, prompt: str) -> torch.Tensor:
    """Cosines `[n]` by transformers itself."""
    from transformers import CLIPModel, CLIPTokenizer

    network = CLIPModel.from_pretrained(folder).eval()
    ids = CLIPTokenizer.from_pretrained(folder)([prompt], return_tensors="pt")
    with torch.no_grad():
        found = network(pixel_values=pixels, **ids)
    return (found.image_embeds * found.text_embeds).sum(-1)


# Landscape, portrait, square; sizes that leave an odd margin; smaller and larger than the input.
SIZES = [(48, 64), (65, 40), (28, 28), (21, 33), (96, 55)]


@pytest.mark.parametrize("frames_per_forward", [1, 5])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_clipscore_and_pickscore_agree_with_transformers(
    folder: Path, height: int, width: int, frames_per_forward: int
) -> None:
    videos = [clip(7, height, width, seed) for seed in (1, 2)]
    expected = []
    for video, prompt in zip(videos, PROMPTS, strict=True):
        images = [Image.fromarray(frame) for frame in video]
        pixels = pil_processor(28)(images, return_tensors="pt")["pixel_values"]
        expected.append(reference_cosines(folder, pixels, prompt).numpy())
    assert np.std(expected) > 0.01, "a reference that is always the same proves nothing"
    options = {"model": str(folder), "batch": frames_per_forward}
    got = score("clipscore", videos, **options)
    np.testing.assert_allclose(got, np.mean(expected, axis=1), atol=TOLERANCE)
    got = score("pickscore", videos, **options)
    np.testing.assert_allclose(got, np.exp(3.1) * np.mean(expected, axis=1) / 26, atol=TOLERANCE)
    got = score("clipscore", videos, frames="min", every=3, **options)
    np.testing.assert_allclose(got, np.min(np.array(expected)[:, ::3], axis=1), atol=TOLERANCE)


@pytest.mark.parametrize("frames_per_forward", [1, 5])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_hpsv2_pads_to_a_square_as_torchvision_does(
    folder: Path, height: int, width: int, frames_per_forward: int
) -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv

    video = clip(5, height, width, 4)
    planes = []
    for frame in video:
        image = tv.to_tensor(Image.fromarray(frame))
        scale = 28 / max(height, width)
        new = [round(height * scale), round(width * scale)]
        image = tv.resize(image, new, InterpolationMode.BICUBIC, antialias=True)
        down, right = 28 - new[0], 28 - new[1]
        image = tv.pad(image, [right // 2, down // 2, right - right // 2, down - down // 2])
        mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        planes.append(tv.normalize(image, mean, std))
    expected = reference_cosines(folder, torch.stack(planes), PROMPTS[0]).mean()
    got = score("hpsv2", [video], model=str(folder), batch=frames_per_forward)
    np.testing.assert_allclose(got, [expected], atol=TOLERANCE)


# --- OpenCLIP's layout --------------------------------------------------------------------------


def open_clip_weights(vocabulary: int, width: int, layers: int) -> dict[str, torch.Tensor]:
    """Random weights under OpenCLIP's names."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.9 / shape[-1] ** 0.5)

    found = {
        "visual.class_embedding": draw(width),
        "visual.positional_embedding": draw(17, width),
        "visual.conv1.weight": draw(width, 3, 7, 7),
        "visual.proj": draw(width, 24),
        "positional_embedding": draw(77, width),
        "token_embedding.weight": draw(vocabulary, width),
        "text_projection": draw(width, 24),
        "logit_scale": torch.tensor(4.0),
    }
    norms = ["visual.ln_pre", "visual.ln_post", "ln_final"]
    for side in ("visual.transformer", "transformer"):
        for i in range(layers):
            block = f"{side}.resblocks.{i}"
            norms += [f"{block}.ln_1", f"{block}.ln_2"]
            found |= {
                f"{block}.attn.in_proj_weight": draw(3 * width, width),
                f"{block}.attn.in_proj_bias": draw(3 * width),
                f"{block}.attn.out_proj.weight": draw(width, width),
                f"{block}.attn.out_proj.bias": draw(width),
                f"{block}.mlp.c_fc.weight": draw(48, width),
                f"{block}.mlp.c_fc.bias": draw(48),
                f"{block}.mlp.c_proj.weight": draw(width, 48),
                f"{block}.mlp.c_proj.bias": draw(width),
            }
    for norm in norms:
        found |= {f"{norm}.weight": 1 + draw(width), f"{norm}.bias": draw(width)}
    return found


class PlainClip:
    """OpenCLIP's forward in plain torch."""

    def __init__(self, weights: dict[str, torch.Tensor], heads: int) -> None:
        self.w = weights
        self.heads = heads

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def blocks(self, side: str, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        i = 0
        while (block := f"{side}.resblocks.{i}") + ".ln_1.weight" in self.w:
            attention = nn.MultiheadAttention(x.shape[-1], self.heads, batch_first=True)
            state = {
                name: self.w[f"{block}.attn.{name}"]
                for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
            }
            attention.load_state_dict(state)
            y = self.norm(f"{block}.ln_1", x)
            x = x + attention(y, y, y, attn_mask=mask, need_weights=False)[0]
            y = self.linear(f"{block}.mlp.c_fc", self.norm(f"{block}.ln_2", x))
            x = x + self.linear(f"{block}.mlp.c_proj", F.gelu(y))
            i += 1
        return x

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    @torch.no_grad()
    def image(self, pixels: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(pixels, self.w["visual.conv1.weight"], stride=7).flatten(2).transpose(1, 2)
        start = self.w["visual.class_embedding"].expand(len(x), 1, -1)
        x = torch.cat([start, x], 1) + self.w["visual.positional_embedding"]
        x = self.blocks("visual.transformer", self.norm("visual.ln_pre", x), None)
        return F.normalize(self.norm("visual.ln_post", x[:, 0]) @ self.w["visual.proj"], dim=-1)

    @torch.no_grad()
    def text(self, ids: list[int]) -> torch.Tensor:
        # Padded with zeros and read at the largest id, the end token.
        row = torch.tensor([ids + [0] * (77 - len(ids))])
        x = self.w["token_embedding.weight"][row] + self.w["positional_embedding"]
        mask = torch.full((77, 77), -torch.inf).triu(1)
        x = self.norm("ln_final", self.blocks("transformer", x, mask))
        return F.normalize(x[0, row.argmax()] @ self.w["text_projection"], dim=-1)


@pytest.mark.parametrize("form", ["pickle", "safetensors"])
def test_hpsv2_reads_the_published_file(tmp_path: Path, form: str) -> None:
    """HPS_v2.1_compressed.pt is a training checkpoint under OpenCLIP's names."""
    vocabulary = write_clip_tokenizer(tmp_path)
    weights = open_clip_weights(vocabulary, 32, 2)
    (tmp_path / "config.json").write_text(json.dumps(clip_settings(vocabulary, "gelu")))
    if form == "pickle":
        checkpoint = {"epoch": 5, "name": "train", "state_dict": weights}
        torch.save(checkpoint, tmp_path / "HPS_v2.1_compressed.pt")
    else:
        save_file({k: v.contiguous() for k, v in weights.items()}, tmp_path / "hps.safetensors")
    from transformers import CLIPTokenizer

    ids = CLIPTokenizer.from_pretrained(tmp_path)([PROMPTS[0]])["input_ids"][0]
    plain = PlainClip(weights, heads=4)
    video = clip(3, 28, 28, 6)
    pixels = torch.from_numpy(video).permute(0, 3, 1, 2) / 255
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    expected = (plain.image((pixels - mean) / std) @ plain.text(ids)).numpy()
    assert np.ptp(expected) > 0.01
    got = score("hpsv2", [video], model=str(tmp_path), frames="max")
    np.testing.assert_allclose(got, [expected.max()], atol=TOLERANCE)


# --- aesthetic ----------------------------------------------------------------------------------


def write_head(path: Path, width: int, places: tuple[int, ...] = (0, 2, 4, 6, 7)) -> nn.Sequential:
    sizes = [width, 1024, 128, 64, 16, 1]
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
    head = nn.Sequential(*layers)
    spread(head, 8)
    state = {}
    for place, layer in zip(places, layers, strict=True):
        state |= {f"layers.{place}.{k}": v.clone() for k, v in layer.state_dict().items()}
    torch.save(state, path)
    return head


@pytest.mark.parametrize("frames_per_forward", [1, 5])
def test_aesthetic_agrees(folder: Path, tmp_path: Path, frames_per_forward: int) -> None:
    from transformers import CLIPModel

    head = write_head(tmp_path / "sac+logos+ava1-l14-linearMSE.pth", 24)
    video = clip(5, 50, 37, 9)
    images = [Image.fromarray(frame) for frame in video]
    pixels = pil_processor(28)(images, return_tensors="pt")["pixel_values"]
    network = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        pooled = network.vision_model(pixels).pooler_output
        vectors = F.normalize(network.visual_projection(pooled), dim=-1)
        expected = head(vectors)[:, 0].numpy()
    assert np.ptp(expected) > 0.01
    options = {"model": str(folder), "head": str(tmp_path / "sac+logos+ava1-l14-linearMSE.pth")}
    got = score("aesthetic", [video], batch=frames_per_forward, **options)
    np.testing.assert_allclose(got, [expected.mean()], atol=TOLERANCE)


def test_aesthetic_reads_a_clip_vision_file(tmp_path: Path) -> None:
    """A file of ComfyUI's clip_vision folder: no config.json, the vision side only."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    settings = {"hidden_size": 768, "intermediate_size": 64, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 12, "image_size": 64, "patch_size": 32}
    config = CLIPVisionConfig(**settings, projection_dim=16, hidden_act="quick_gelu")
    network = CLIPVisionModelWithProjection(config).eval()
    spread(network, 5)
    path = tmp_path / "clip_vision.safetensors"
    tensors = {k: v.contiguous() for k, v in network.state_dict().items()}
    tensors["vision_model.embeddings.position_ids"] = torch.arange(5)[None]
    save_file(tensors, path)
    head = write_head(tmp_path / "head.pth", 16)
    video = clip(2, 64, 64, 3)
    pixels = pil_processor(64)([Image.fromarray(f) for f in video], return_tensors="pt")
    with torch.no_grad():
        vectors = F.normalize(network(**pixels).image_embeds, dim=-1)
        expected = head(vectors).mean().item()
    got = score("aesthetic", [video], model=str(path), head=str(tmp_path / "head.pth"))
    np.testing.assert_allclose(got, [expected], atol=TOLERANCE)


def test_the_aesthetic_variant_with_activations_is_refused(folder: Path, tmp_path: Path) -> None:
    """Its weights have the same shapes and would load without a word."""
    write_head(tmp_path / "relu.pth", 24, places=(0, 3, 6, 9, 11))
    with pytest.raises(FlashGRPOError, match="linearMSE"):
        score("aesthetic", [clip(1)], model=str(folder), head=str(tmp_path / "relu.pth"))
    write_head(tmp_path / "wide.pth", 32)
    with pytest.raises(FlashGRPOError, match="vectors of 32, the model gives 24"):
        score("aesthetic", [clip(1)], model=str(folder), head=str(tmp_path / "wide.pth"))


# --- behaviour ----------------------------------------------------------------------------------


class Watching(Control):
    """Counts what is asked of it."""

    def __init__(self) -> None:
        self.brought: list[nn.Module] = []
        self.checks = 0

    def bring(self, network: nn.Module) -> None:
        self.brought.append(network)

    def check(self) -> None:
        self.checks += 1


def test_a_permuted_batch_permutes_the_scores(folder: Path) -> None:
    videos = [clip(3, seed=s) for s in range(4)]
    prompts = [PROMPTS[i % 2] for i in range(4)]
    mix = RewardMix([{"name": "clipscore", "model": str(folder)}])
    order = [2, 0, 3, 1]
    scores = mix.score(batch(videos, prompts)).terms["clipscore"]
    moved = mix.score(batch(videos, prompts).select(order)).terms["clipscore"]
    np.testing.assert_array_equal(scores[order], moved)
    assert len(set(scores)) == 4


def test_nothing_is_loaded_before_a_score_and_one_model_serves_all(folder: Path) -> None:
    terms = [
        {"name": "clipscore", "model": str(folder)},
        {"name": "pickscore", "model": str(folder)},
    ]
    mix, judge = RewardMix(terms), RewardMix(terms)
    rewards = [*mix.rewards, *judge.rewards]
    assert [reward.networks() for reward in rewards] == [[], [], [], []]
    control = Watching()
    mix.score(batch([clip(2)]), control)
    judge.score(batch([clip(2)]), control)
    networks = {id(network) for reward in rewards for network in reward.networks()}
    assert len(networks) == 1 and {id(network) for network in control.brought} == networks
    assert control.checks >= 4
    parameters = list(control.brought[0].parameters())
    assert not any(p.requires_grad for p in parameters)


def test_a_prompt_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import CLIPModel

    calls = []
    original = CLIPModel.get_text_features

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CLIPModel, "get_text_features", counted)
    mix = RewardMix([{"name": "pickscore", "model": str(folder), "batch": 2}])
    mix.score(batch([clip(5, seed=s) for s in range(4)]))
    assert len(calls) == 2, "two prompts, four videos, twelve forwards"


def test_long_prompts_are_cut_off(folder: Path) -> None:
    long = "red lake, " * 80
    reward = REWARDS["clipscore"](model=str(folder), device="cpu")
    videos = np.stack([clip(1), clip(1)])
    values = reward.score(VideoBatch(videos, [long, long + "more"], 8.0, ["a", "b"]))["clipscore"]
    assert values[0] == values[1] and np.isfinite(values).all()


def test_low_precision_agrees_roughly(folder: Path) -> None:
    video = clip(3)
    full = score("clipscore", [video], model=str(folder))
    reward = REWARDS["clipscore"](model=str(folder), dtype="bf16", device="cpu")
    low = reward.score(batch([video]))["clipscore"]
    assert reward.networks()[0].visual_projection.weight.dtype == torch.bfloat16
    assert full != low and abs(full - low) < 0.05


def test_what_is_missing_or_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FlashGRPOError, match=r"'nowhere' was not found: get .*PickScore_v1.*flashgrpo_rewards"
    ):
        REWARDS["pickscore"](model="nowhere")
    with pytest.raises(FlashGRPOError, match="batch = 0 must be a number from 1"):
        REWARDS["pickscore"](model=str(folder), batch=0)
    with pytest.raises(FlashGRPOError, match=r"dtype = 'int4' must be one of auto, fp32"):
        REWARDS["pickscore"](model=str(folder), dtype="int4")
    with pytest.raises(FlashGRPOError, match=r"device = 'cuda:77' is not available"):
        REWARDS["pickscore"](model=str(folder), device="cuda:77").score(batch([clip(1)]))

    def broken(name: str) -> Path:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        return copy

    where = broken("no tokenizer")
    (where / "merges.txt").unlink()
    with pytest.raises(FlashGRPOError, match=r"no vocab\.json and merges\.txt"):
        score("clipscore", [clip(1)], model=str(where))
    where = broken("other config")
    settings = json.loads((where / "config.json").read_text())
    settings["vision_config"]["num_hidden_layers"] = 1
    (where / "config.json").write_text(json.dumps(settings))
    with pytest.raises(FlashGRPOError, match=r"unknown: vision_model\.encoder\.layers\.1"):
        score("clipscore", [clip(1)], model=str(where))
    settings["vision_config"] |= {"num_hidden_layers": 2, "intermediate_size": 40}
    (where / "config.json").write_text(json.dumps(settings))
    with pytest.raises(FlashGRPOError, match=r"has shape \[48.*expected \[40"):
        score("clipscore", [clip(1)], model=str(where))
    where = broken("no config")
    (where / "config.json").unlink()
    with pytest.raises(FlashGRPOError, match=r"width 32 is not known.*config\.json"):
        score("clipscore", [clip(1)], model=str(where))
    where = broken("pickled code")
    (where / "model.safetensors").unlink()
    torch.save({"state_dict": Path("x")}, where / "model.pt")
    with pytest.raises(FlashGRPOError, match=r"could run code.*safetensors"):
        score("clipscore", [clip(1)], model=str(where))
    (where / "model.pt").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(FlashGRPOError, match="not readable"):
        score("clipscore", [clip(1)], model=str(where))
