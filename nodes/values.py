"""What travels on the links: small immutable values, never a network.

ComfyUI keeps node outputs for as long as it likes, also after errors and cancels, so everything
that lies in GPU memory stays in the pool and a link only says how to find or rebuild it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io

from ..flashgrpo_core.advantage import Advantages
from ..flashgrpo_core.groups import PromptGroup
from ..flashgrpo_core.prompts import Prompt
from ..flashgrpo_core.rollout import Rollout
from ..flashgrpo_core.scoring import Scores

Tensors = Mapping[str, torch.Tensor]
Tables = dict[str, dict[str, Any]]


class LoraTensors(dict[str, torch.Tensor]):
    """LORA_MODEL; ComfyUI writes the text of all inputs into an error, so it is short.

    Attributes:
        metadata: header of the file that the tensors are from.
    """

    def __init__(self, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(tensors)
        self.metadata = dict(metadata or {})

    def __repr__(self) -> str:
        return f"LORA_MODEL of {len(self)} tensors"


@dataclass(frozen=True)
class FrozenLoras:
    """LoRAs that belong to the base: `(file, strength, expert)` in the order they are applied.

    The expert is `high_noise`, `low_noise`, or empty for every model.
    """

    loras: tuple[tuple[str, float, str], ...]

    def tables(self) -> list[dict[str, Any]]:
        """As in `model.frozen_loras`."""
        return [
            {"file": file, "strength": strength} | ({"expert": expert} if expert else {})
            for file, strength, expert in self.loras
        ]


@dataclass(frozen=True)
class ModelFiles:
    """Which files make up the policy, and the shape of its LoRA; equal values are one network.

    Attributes:
        transformer: path, or `tiny`.
        vae: path; empty with `tiny`.
        dtype: `auto`, `fp32`, `bf16` or `fp16`.
        rank: LoRA rank.
        alpha: LoRA alpha.
        targets: LoRA targets.
        continue_from: path of a LoRA to continue from, or empty.
        frozen: frozen LoRAs.
        transformer_low: path of the low-noise expert, or empty.
        train_experts: `both`, `high_noise` or `low_noise`.
        boundary: sigma at which the experts change; 0 is the family's.
        continue_from_low: like `continue_from`, for the low-noise expert.
        clip_vision: path of the CLIP vision file, or empty.
        storage: `auto`, `full` or `fp8`; empty leaves it to the preset of Video Settings.
        blocks_to_swap: blocks that rest in host memory; -1 leaves it to the preset.
    """

    transformer: str
    vae: str
    dtype: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    continue_from: str = ""
    frozen: FrozenLoras = FrozenLoras(())
    transformer_low: str = ""
    train_experts: str = "both"
    boundary: float = 0.0
    continue_from_low: str = ""
    clip_vision: str = ""
    storage: str = ""
    blocks_to_swap: int = -1

    @property
    def tiny(self) -> bool:
        """Whether this is the embedded tiny Wan."""
        return self.transformer == "tiny"

    def table(self) -> dict[str, Any]:
        """The `[model]` table of a run's configuration, without what is left to the preset."""
        saving: dict[str, Any] = {"storage": self.storage} if self.storage else {}
        if self.blocks_to_swap >= 0:
            saving["blocks_to_swap"] = self.blocks_to_swap
        return {
            "transformer": self.transformer,
            "vae": self.vae,
            "dtype": self.dtype,
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            "lora_targets": list(self.targets),
            "continue_from": self.continue_from,
            "frozen_loras": self.frozen.tables(),
            "transformer_low": self.transformer_low,
            "train_experts": self.train_experts,
            "boundary": self.boundary,
            "continue_from_low": self.continue_from_low,
            "clip_vision": self.clip_vision,
            **saving,
        }


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy at one moment of a run.

    Attributes:
        files: model files and LoRA shape.
        run: name of the run.
        iteration: iterations behind these weights.
        adapter: LoRA weights (CPU), or None before the first step.
        ema: their moving average, or None.
        optimizer: AdamW's moments, or None.
        state: counters of the run (`RunState` fields).
        digest: SHA-256 of the weights; two branches differ in it.
    """

    files: ModelFiles
    run: str
    iteration: int = 0
    # Not shown: ComfyUI puts the text of all inputs into every error message.
    adapter: Tensors | None = field(default=None, repr=False)
    ema: Tensors | None = field(default=None, repr=False)
    optimizer: Tensors | None = field(default=None, repr=False)
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    digest: str = ""


@dataclass(frozen=True)
class VideoSettings:
    """Size and sampling of the videos: tables of the configuration that a preset fills."""

    preset: str
    tables: Tables = field(hash=False)


@dataclass(frozen=True)
class Prompts:
    """Prompts of a run and how they are encoded.

    Attributes:
        train: prompts that are split by the shares, or the training part when `validation` and
            `test` are given.
        validation: held-out prompts, or None to hold out a share.
        test: likewise.
        negative: negative prompt.
        validation_share: share of the prompts held out for validation.
        test_share: share held out for the final test.
        encoder: path of the text encoder file, empty for the tiny one, or `clip:<fingerprint>`.
        tokens: length of the text context; 0 takes the model's own.
        folder: where embeddings made by a CLIP object lie, or None.
    """

    train: tuple[Prompt, ...] = field(repr=False)
    validation: tuple[Prompt, ...] | None = field(repr=False)
    test: tuple[Prompt, ...] | None = field(repr=False)
    negative: str
    validation_share: float
    test_share: float
    encoder: str
    tokens: int = 0
    folder: Path | None = None


@dataclass(frozen=True)
class Reward:
    """A mix of rewards: tables as in `reward.terms`."""

    terms: tuple[Mapping[str, Any], ...] = field(hash=False)


@dataclass(frozen=True)
class Advanced:
    """Settings that replace those of the preset."""

    tables: Tables = field(hash=False)


@dataclass(frozen=True, eq=False)
class Groups:
    """The iso-temporal groups of one iteration, and the settings they were made with."""

    run: str
    iteration: int
    digest: str
    files: ModelFiles
    groups: tuple[PromptGroup, ...] = field(repr=False)
    prompts: Prompts = field(repr=False)
    tables: Tables = field(repr=False)

    def of(self, policy: Policy) -> bool:
        """Whether they were made for exactly this policy."""
        mine, its = (self.run, self.digest, self.files), (policy.run, policy.digest, policy.files)
        return mine == its


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Sampled groups: latents of the one transition, finished latents, mp4 files."""

    source: Groups
    rollouts: tuple[Rollout, ...] = field(repr=False)
    files: tuple[Path, ...] = field(repr=False)
    forwards: int


@dataclass(frozen=True, eq=False)
class Scored:
    """Scored rollouts with their advantages."""

    source: Rollouts
    scores: Scores = field(repr=False)
    advantages: Advantages = field(repr=False)
    terms: tuple[Mapping[str, Any], ...] = field(repr=False)
    tables: Tables = field(repr=False)


@dataclass(frozen=True)
class Run:
    """A run on disk, by name."""

    name: str
    iteration: int


PolicyType = io.Custom("FLASHGRPO_POLICY")
FrozenLorasType = io.Custom("FLASHGRPO_FROZEN_LORAS")
VideoSettingsType = io.Custom("FLASHGRPO_VIDEO_SETTINGS")
PromptsType = io.Custom("FLASHGRPO_PROMPTS")
GroupsType = io.Custom("FLASHGRPO_GROUPS")
RolloutsType = io.Custom("FLASHGRPO_ROLLOUTS")
RewardType = io.Custom("FLASHGRPO_REWARD")
ScoredType = io.Custom("FLASHGRPO_SCORED")
AdvancedType = io.Custom("FLASHGRPO_ADVANCED")
RunType = io.Custom("FLASHGRPO_RUN")

#: Python class that must arrive on a link of each type.
CLASSES: dict[str, type] = {
    "FLASHGRPO_POLICY": Policy,
    "FLASHGRPO_FROZEN_LORAS": FrozenLoras,
    "FLASHGRPO_VIDEO_SETTINGS": VideoSettings,
    "FLASHGRPO_PROMPTS": Prompts,
    "FLASHGRPO_GROUPS": Groups,
    "FLASHGRPO_ROLLOUTS": Rollouts,
    "FLASHGRPO_REWARD": Reward,
    "FLASHGRPO_SCORED": Scored,
    "FLASHGRPO_ADVANCED": Advanced,
    "FLASHGRPO_RUN": Run,
}
