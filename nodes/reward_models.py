"""Rewards with a neural network, one node each; the weights lie in ComfyUI's model folders.

Networks are brought to the device by ComfyUI's own memory management, see `pool.bring`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.rewards import REWARDS
from ..flashgrpo_core.rewards.model_reward import DTYPES, FOLDER
from . import host
from . import reward_terms as terms
from .widgets import advanced

#: Where the models of CLIP-like rewards may lie.
_CLIP = (FOLDER, "clip_vision")


def _model(option: str, tip: str, *kinds: str) -> Any:
    places = " or ".join(f"models/{kind}" for kind in kinds)
    return io.Combo.Input(
        option, options=host.reward_choices(*kinds), tooltip=f"{tip} Lists {places}."
    )


def _batch(default: int) -> Any:
    return advanced(
        io.Int.Input(
            "batch",
            default=default,
            min=1,
            max=1024,
            tooltip="Frames that go through the network together, 1 to 1024: lower it when memory "
            "runs out.",
        )
    )


def _computing() -> tuple[Any, Any]:
    return (
        advanced(
            io.Combo.Input(
                "dtype",
                options=["auto", *DTYPES],
                default="auto",
                tooltip="Compute type of the reward's network; auto is bf16 on a GPU and fp32 on "
                "the CPU.",
            )
        ),
        advanced(
            io.Combo.Input(
                "device",
                options=["auto", "cpu"],
                default="auto",
                tooltip="auto lets ComfyUI move the network to the GPU and away again; cpu keeps "
                "it in main memory, which is slow.",
            )
        ),
    )


def _reward(name: str, inputs: dict[str, Any], **kinds: tuple[str, ...]) -> io.NodeOutput:
    """The term, with paths for the names of models."""
    for option, folders in kinds.items():
        if inputs[option] == host.NO_MODEL:
            reward: Any = REWARDS[name]
            raise FlashGRPOError(
                f"no model for the reward {name!r} was found: {reward.source}; put it into "
                f"{' or '.join(f'models/{kind}' for kind in folders)} and press R"
            )
        inputs[option] = host.reward_path(inputs[option], *folders)
    return terms.chain(name, inputs)


def _clip_reward(name: str, inputs: dict[str, Any]) -> io.NodeOutput:
    """A CLIP-like term; a model without a tokenizer takes ComfyUI's."""
    chosen = inputs["model"]
    if chosen != host.NO_MODEL:
        path = Path(host.reward_path(chosen, *_CLIP))
        folder = path if path.is_dir() else path.parent
        if not (folder / "vocab.json").is_file():
            inputs["tokenizer"] = host.clip_tokenizer()
    return _reward(name, inputs, model=_CLIP)


class RewardClipScore(host.ComfyNode):
    """Reward: CLIPScore."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardClipscore",
            **terms.about(
                "clipscore",
                _model("model", "A complete CLIP model, folder or file.", *_CLIP),
                terms.frames(),
                terms.every(),
                _batch(16),
                *_computing(),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _clip_reward("clipscore", inputs)


class RewardPickScore(host.ComfyNode):
    """Reward: PickScore."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardPickscore",
            **terms.about(
                "pickscore",
                _model("model", "PickScore_v1, folder or file.", *_CLIP),
                terms.frames(),
                terms.every(),
                _batch(16),
                *_computing(),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _clip_reward("pickscore", inputs)


class RewardHpsV2(host.ComfyNode):
    """Reward: HPSv2.1."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardHpsv2",
            **terms.about(
                "hpsv2",
                _model("model", "HPS_v2.1_compressed.pt, or a folder of it.", *_CLIP),
                terms.frames(),
                terms.every(),
                _batch(16),
                *_computing(),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _clip_reward("hpsv2", inputs)


class RewardAesthetic(host.ComfyNode):
    """Reward: LAION aesthetic."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardAesthetic",
            **terms.about(
                "aesthetic",
                _model("model", "OpenAI's CLIP L/14, complete or its vision side.", *_CLIP),
                _model("head", "sac+logos+ava1-l14-linearMSE, the predictor.", FOLDER),
                terms.frames(),
                terms.every(),
                _batch(16),
                *_computing(),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _reward("aesthetic", inputs, model=_CLIP, head=(FOLDER,))


class RewardHpsV3(host.ComfyNode):
    """Reward: HPSv3."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardHpsv3",
            **terms.about(
                "hpsv3",
                _model("model", "The folder with HPSv3.safetensors.", FOLDER),
                terms.number("limit", 15.0, 0.1, 1000.0, "Scores are limited to -limit and limit."),
                terms.frames(),
                terms.every(4),
                _batch(4),
                *_computing(),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _reward("hpsv3", inputs, model=(FOLDER,))


class RewardVideoReward(host.ComfyNode):
    """Reward: VideoReward."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        parts = (("visual", "visual quality"), ("motion", "motion quality"), ("text", "alignment"))
        return io.Schema(
            node_id="FlashGRPORewardVideoreward",
            **terms.about(
                "videoreward",
                _model("model", "The folder with VideoReward's files.", FOLDER),
                *(terms.number(o, 1.0, -100.0, 100.0, f"Weight of {what}.") for o, what in parts),
                *_computing(),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _reward("videoreward", inputs, model=(FOLDER,))


#: All nodes of rewards with a network.
REWARD_MODEL_NODES: tuple[type[host.ComfyNode], ...] = (
    RewardClipScore,
    RewardPickScore,
    RewardHpsV2,
    RewardAesthetic,
    RewardHpsV3,
    RewardVideoReward,
)
