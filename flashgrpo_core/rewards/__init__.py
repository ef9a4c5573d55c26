"""Rewards: what makes one video better than another.

One file per reward, one dict of names. A reward is any class with a `name` and
`score(batch) -> dict[str, np.ndarray]` (see `mix.Reward`); its constructor takes JSON-able keyword
options. Put a new class into `REWARDS` and its name works in `reward.terms`.

Class attributes for the interface and the documentation, all strings: `title`, `description`,
`range`, `direction` and `hackable_by` (what a policy may do to score high without being better).
"""

from __future__ import annotations

from .batch import VideoBatch, check_videos
from .diversity import DiversityReward
from .loop_closure import LoopClosureReward
from .mix import MixedScores, Reward, RewardMix, default_terms
from .motion import MotionReward
from .picture import BrightnessReward, ColourfulnessReward, ContrastReward, JpegSizeReward
from .technical import TechnicalReward
from .temporal import FlickerReward, FreezeReward
from .terms import option_defaults
from .tiny_world import TinyWorldReward

#: All rewards by the name used in `reward.terms`.
REWARDS: dict[str, type] = {
    reward.name: reward
    for reward in (
        TechnicalReward,
        MotionReward,
        FlickerReward,
        FreezeReward,
        LoopClosureReward,
        BrightnessReward,
        ContrastReward,
        ColourfulnessReward,
        JpegSizeReward,
        DiversityReward,
        TinyWorldReward,
    )
}

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
