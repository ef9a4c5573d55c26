"""VideoReward (VideoAlign): visual quality, motion quality and text alignment of a whole video."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..control import Control
from ..errors import FlashGRPOError
from .batch import VideoBatch
from .checkpoint import Tensors, read_json, read_tensors
from .clip import to_planes
from .model_reward import ModelReward
from .options import number
from .qwen_vl import QwenReward, canonical, fit_size, load_qwen_reward, plain

#: The reward tokens, in the order in which they were added, and the names of their values.
TOKENS = {"<|VQ_reward|>": "VQ", "<|MQ_reward|>": "MQ", "<|TA_reward|>": "TA"}
#: Least pixels of a frame, unless the checkpoint allows fewer at most.
MIN_PIXELS = 128 * 28 * 28
#: Least and most frames of a video.
FRAMES = (4, 768)

_TEMPLATE = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"


class VideoRewardReward(ModelReward):
    """VideoReward (Liu et al., "Improving video generation with human feedback", 2025).

    Three values from one pass of a Qwen2-VL 2B over the video, standardised with the mean and
    standard deviation of the checkpoint: visual quality, motion quality, text alignment. The score
    is their weighted sum.

    Args:
        model: folder with model_config.json, the checkpoint, prompt_template.py of the VideoAlign
            repository, and the base model's config.json and tokenizer.json.
        visual: weight of visual quality.
        motion: weight of motion quality.
        text: weight of text alignment.
        dtype: `auto` (bf16 on a GPU, fp32 on the CPU), `fp32`, `bf16` or `fp16`.
        device: `auto`, `cpu`, `cuda:1`, ...
    """

    name = "videoreward"
    title = "VideoReward"
    description = (
        "Rewards videos by visual quality, motion quality and text alignment (VideoAlign)."
    )
    range = "standardised, each about -3 .. 3; the sum of the weighted values"
    direction = "higher is better"
    hackable_by = "showy camera moves and gloss; it sees two frames per second"
    parts = ("visual", "motion", "text")
    memory = "5 GB (bf16)"
    licence = "code MIT; see the model card for the weights"
    source = (
        "make a folder with all files of KwaiVGI/VideoReward, config.json and tokenizer.json of "
        "Qwen/Qwen2-VL-2B-Instruct (hub names), and prompt_template.py of the VideoAlign repository"
    )
    files = {"model": "reward"}

    def __init__(
        self,
        model: str,
        visual: float = 1.0,
        motion: float = 1.0,
        text: float = 1.0,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__(dtype, device, model=model)
        self.weights = np.array(
            [
                number(self.name, option, value, -100, 100)
                for option, value in (("visual", visual), ("motion", motion), ("text", text))
            ]
        )
        folder = self.paths["model"]
        self._template = _template(folder)
        settings = read_json(folder / "model_config.json")
        data = settings.get("data_config") or {}
        self.fps = number(self.name, "data_config.fps", data.get("fps", 2.0), 0.01, 1000)
        pixels = data.get("max_frame_pixels", 240 * 320)
        self.max_pixels = int(number(self.name, "data_config.max_frame_pixels", pixels, 784, 1e9))
        for key, only in (("prompt_template_type", "detailed_special"), ("sample_type", "uniform")):
            if data.get(key, only) != only:
                raise FlashGRPOError(
                    f"{folder / 'model_config.json'}: {key} = {data[key]!r} is not supported, only "
                    f"{only!r}: use the published checkpoint"
                )
        norm = settings.get("inference_config") or {}
        self._mean = np.array([float(norm.get(f"{key}_mean", 0.0)) for key in TOKENS.values()])
        self._std = np.array([float(norm.get(f"{key}_std", 1.0)) for key in TOKENS.values()])
        self._lora = settings.get("peft_lora_config") or {}

    def score(self, batch: VideoBatch, control: Control | None = None) -> dict[str, np.ndarray]:
        """See the class; `.visual`, `.motion` and `.text` are the standardised values."""
        control = control or Control()
        rows = []
        for video, prompt in zip(batch.videos, batch.prompts, strict=True):
            control.check()
            model = self.model(control)
            chosen = video[sampled_frames(len(video), batch.fps, self.fps)]
            factor = model.patch * model.merge
            height, width = video.shape[1:3]
            size = fit_size(height, width, factor, MIN_PIXELS, self.max_pixels)
            text = self._template.replace("{text_prompt}", plain(prompt))
            with torch.no_grad():
                outputs = model("video", text, _resized(chosen, size), clip=True)[0].double().cpu()
            # One column per value: the diagonal; a single column is shared by the three tokens.
            rows.append((outputs.diagonal() if outputs.shape[1] == 3 else outputs[:, 0]).numpy())
        found = (np.array(rows, dtype=np.float64).reshape(-1, 3) - self._mean) / self._std
        scores = {f"{self.name}.{part}": found[:, i] for i, part in enumerate(self.parts)}
        return {self.name: found @ self.weights, **scores}

    def _load(self, dtype: torch.dtype) -> QwenReward:
        folder = self.paths["model"]
        tensors, source = _checkpoint(folder, self._lora)
        shape = tensors["rm_head.weight"].shape if "rm_head.weight" in tensors else (3, 1)
        head = nn.Linear(int(shape[1]), int(shape[0]), bias=False)
        return load_qwen_reward(folder, tensors, source, list(TOKENS), dtype, head, fp32_head=False)


def sampled_frames(count: int, fps: float, wanted: float) -> list[int]:
    """Indices of evenly spread frames: `wanted` per second, an even number, at least 4.

    Args:
        count: frames of the video.
        fps: its frames per second.
        wanted: frames per second to look at.
    """
    most = min(FRAMES[1], count) // 2 * 2
    number_of = round(min(max(count / fps * wanted, FRAMES[0]), most) / 2) * 2
    if number_of < 2:
        return [0, 0]  # a single picture is seen as a still video
    return torch.linspace(0, count - 1, number_of).round().long().tolist()


def _resized(frames: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """Frames as planes 0..1, resized by the antialiased bicubic filter of torch to whole levels."""
    planes = to_planes(frames)
    if tuple(planes.shape[2:]) != size:
        planes = F.interpolate(planes * 255, size, mode="bicubic", antialias=True)
        planes = planes.round().clamp(0, 255) / 255
    return planes


def _template(folder: Path) -> str:
    """The text of the reward, from the repository's file: read as data, never run.

    Raises:
        FlashGRPOError: the file or the text is not there.
    """
    path = folder / "prompt_template.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FlashGRPOError(
            f"{path} is missing: put prompt_template.py of the VideoAlign repository there, it "
            "holds the text that this reward was trained with (read as data, never run)"
        ) from None
    except (OSError, ValueError, SyntaxError) as exc:
        raise FlashGRPOError(f"{path}: not readable ({exc}); download it again") from None
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        if [t.id for t in node.targets if isinstance(t, ast.Name)] == [_TEMPLATE]:
            text = str(node.value.value)
            if all(text.count(token) == 1 for token in [*TOKENS, "{text_prompt}"]):
                return text
    raise FlashGRPOError(
        f"{path}: no text {_TEMPLATE} with the tokens {', '.join(TOKENS)}: use the file of the "
        "VideoAlign repository"
    )


# --- checkpoint ---------------------------------------------------------------------------------


def _checkpoint(folder: Path, lora: dict[str, Any]) -> tuple[Tensors, Path]:
    """All weights with the LoRA merged, and the file they come from.

    Published in two layouts: model.pth with everything, or adapter_model.safetensors and
    non_lora_state_dict.pth beside the base model's own weights.
    """
    steps = [p for p in folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
    newest = max(steps, key=lambda p: int(p.name.rpartition("-")[2]), default=folder)
    whole = newest / "model.pth"
    if whole.is_file():
        return _merged(dict(read_tensors(whole)), lora, whole), whole
    adapter, others = newest / "adapter_model.safetensors", newest / "non_lora_state_dict.pth"
    if not adapter.is_file() or not others.is_file():
        raise FlashGRPOError(
            f"{newest}: no model.pth, and no adapter_model.safetensors with "
            "non_lora_state_dict.pth: put all files of KwaiVGI/VideoReward there"
        )
    tensors = {**read_tensors(folder), **read_tensors(others), **read_tensors(adapter)}
    return _merged(tensors, lora, adapter), adapter


def _merged(tensors: dict[str, torch.Tensor], lora: dict[str, Any], source: Path) -> Tensors:
    """Weights without PEFT's names: `W + scale * B @ A`."""
    # One spelling of the names first: the base may come from another version of transformers.
    plain_names = {name: canonical(_without_peft(name)) for name in tensors}
    found: dict[str, torch.Tensor] = {}
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    # Trained values come behind the ones that they replace.
    for name in sorted(tensors, key=lambda n: ("base_model." in n, "modules_to_save" in n)):
        if "original_module." in name:
            continue
        plain_name = plain_names[name]
        if plain_name is None:
            continue
        match = re.fullmatch(r"(.+)\.lora_([AB])(\.\w+)?\.weight", plain_name)
        if match:
            pairs.setdefault(f"{match[1]}.weight", {})[match[2]] = tensors[name]
        elif "lora_" in name:
            raise FlashGRPOError(f"{source}: `{name}` is no LoRA of a linear layer: not supported")
        else:
            found[plain_name] = tensors[name]
    if pairs and not lora.get("lora_r"):
        raise FlashGRPOError(
            f"{source}: holds a LoRA, but model_config.json has no peft_lora_config.lora_r: use "
            "the model_config.json of the checkpoint"
        )
    for name, pair in pairs.items():
        if name not in found or len(pair) != 2:
            raise FlashGRPOError(
                f"{source}: a LoRA without its base weight `{name}`: put the weights of the base "
                "model into the folder"
            )
        rank = int(lora["lora_r"])
        scale = float(lora.get("lora_alpha", rank))
        scale /= math.sqrt(rank) if lora.get("use_rslora") else rank
        base, a, b = (t.float() for t in (found[name], pair["A"], pair["B"]))
        found[name] = (base + scale * (b @ a)).to(found[name].dtype)
    return found


def _without_peft(name: str) -> str:
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return re.sub(r"\.modules_to_save\.\w+\.", ".", name)
