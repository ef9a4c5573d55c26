"""Rewards: what makes one video better than another.

One file per reward, one dict of names. A reward is any class with a `name` and
`score(batch) -> dict[str, np.ndarray]` (see `mix.Reward`); its constructor takes JSON-able keyword
options. Put a new class into `REWARDS` and its name works in `reward.terms`; a class of another
installed package works without that (see `installed`).

Class attributes for the interface and `docs/rewards.md`, all strings: `title`, `description`,
`range`, `direction`, `hackable_by` (what a policy may do to score high without being better) and
`cost` (or `memory` of the weights). `parts`, a tuple, names the parts that a term may take instead
of the total; `uses_prompt = False` says that videos need no prompt.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from .aesthetic import AestheticReward
from .batch import VideoBatch, check_videos
from .clip_scores import ClipScoreReward, HpsV2Reward, PickScoreReward
from .diversity import DiversityReward
from .hpsv3 import HpsV3Reward
from .loop_closure import LoopClosureReward
from .mix import MixedScores, Reward, RewardMix, default_terms
from .motion import MotionReward
from .naturalness import NaturalnessReward
from .ocr import OcrReward
from .picture import BrightnessReward, ColourfulnessReward, ContrastReward, JpegSizeReward
from .technical import TechnicalReward
from .temporal import FlickerReward, FreezeReward
from .terms import option_defaults
from .tiny_world import TinyWorldReward
from .video_reward import VideoRewardReward

#: All rewards by the name used in `reward.terms`.
REWARDS: dict[str, type] = {
    reward.name: reward
    for reward in (
        TechnicalReward,
        NaturalnessReward,
        MotionReward,
        FlickerReward,
        FreezeReward,
        LoopClosureReward,
        BrightnessReward,
        ContrastReward,
        ColourfulnessReward,
        JpegSizeReward,
        OcrReward,
        DiversityReward,
        TinyWorldReward,
        ClipScoreReward,
        PickScoreReward,
        HpsV2Reward,
        AestheticReward,
        HpsV3Reward,
        VideoRewardReward,
    )
}

# The network code lies apart, and the registry's archive leaves it out: without it the rewards of
# other processes are not offered.
_SERVED = f"{__package__.rpartition('.')[0]}.served"
if find_spec(_SERVED) is not None:
    REWARDS["served"] = import_module(f"{_SERVED}.reward").ServedReward
    REWARDS["judge"] = import_module(f"{_SERVED}.judge").JudgeReward

__all__ = [
    "REWARDS",
    "MixedScores",
    "Reward",
    "RewardMix",
    "VideoBatch",
    "check_videos",
    "default_terms",
    "option_defaults",
]
