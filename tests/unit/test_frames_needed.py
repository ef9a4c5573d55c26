"""Only the frames that the rewards look at are decoded, and the scores stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashgrpo_core import scoring
from flashgrpo_core.control import Control
from flashgrpo_core.embedded import TINY_VAE
from flashgrpo_core.overlap import decode
from flashgrpo_core.rewards.mix import RewardMix
from flashgrpo_core.rewards.options import frame_rule
from flashgrpo_core.rollout import Rollout
from flashgrpo_core.wan.decode import decode_latents
from flashgrpo_core.wan.vae import load_vae
from tests.unit._tiny import one_thread, tiny_groups  # noqa: F401

FRAMES = 17  # of 5 latent frames


@pytest.fixture(scope="module")
def vae() -> object:
    return load_vae(TINY_VAE, torch.float32)


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn(4, 16, 5, 4, 4, generator=torch.Generator().manual_seed(3))


def rollout_of(latents: torch.Tensor) -> Rollout:
    group, nothing = tiny_groups(2)[0], torch.empty(0)
    return Rollout(group, range(4), nothing, nothing, nothing, latents)


@pytest.mark.parametrize("frames", [1, 2, 5, 6, 17])
def test_a_part_of_the_latents_gives_the_first_frames(vae, latents, frames: int) -> None:
    part = scoring.whole_or_start(latents, frames, False)
    assert part.shape[2] == {1: 1, 2: 2, 5: 2, 6: 3, 17: 5}[frames]
    whole = decode_latents(vae, latents)
    assert np.array_equal(decode_latents(vae, part)[:, :frames], whole[:, :frames])


@pytest.mark.parametrize(
    ("how", "every", "needed"),
    [("mean", 1, 17), ("mean", 8, 17), ("median", 10, 11), ("last", 6, 13), ("first", 2, 1),
     ("q90", 1024, 1)],
)  # fmt: skip
def test_a_rule_says_how_many_frames_it_needs(how: str, every: int, needed: int) -> None:
    rule = frame_rule("x", how, every)
    assert rule.needed(FRAMES) == needed
    video = np.random.default_rng(0).integers(0, 255, (FRAMES, 2, 2, 3), dtype=np.uint8)
    assert np.array_equal(rule.pick(video[:needed]), rule.pick(video))
    if needed > 1:
        assert not np.array_equal(rule.pick(video[: needed - 1]), rule.pick(video))


@pytest.mark.parametrize(
    ("terms", "needed"),
    [
        ([{"name": "brightness", "frames": "first"}], 1),
        ([{"name": "brightness", "frames": "first"}, {"name": "contrast", "every": 10}], 11),
        ([{"name": "brightness", "frames": "first"}, {"name": "motion"}], 17),
        # A gate looks too.
        ([{"name": "brightness", "frames": "first", "gate": {"name": "motion", "above": 0.0}}], 17),
    ],
)
def test_scores_are_those_of_whole_videos(monkeypatch, vae, latents, terms, needed: int) -> None:
    reward = RewardMix(terms)
    assert reward.frames_needed(FRAMES) == needed
    decoded: list[int] = []

    def watched(vae: object, part: torch.Tensor) -> np.ndarray:
        decoded.append(part.shape[2])
        return decode_latents(vae, part)

    monkeypatch.setattr(scoring, "decode_latents", watched)
    rollout, shown = rollout_of(latents), []

    class Host(Control):
        def preview(self, video: np.ndarray, caption: str) -> None:
            shown.append(video)

    def scores(keep=None) -> scoring.Scores:  # noqa: ANN001
        decoded.clear()
        groups = [rollout.group]
        return scoring.score_rollouts(
            vae, groups, [rollout], reward, fps=8.0, control=Host(), keep=keep
        )

    cheap = scores()
    few = -(-(needed - 1) // 4) + 1
    assert decoded == [5, few, few, few], "the first is previewed whole"
    kept: list[int] = []
    whole = scores(lambda prompt, group, sample, video: kept.append(len(video)))
    assert decoded == [5] * 4 and kept == [FRAMES] * 4
    assert np.array_equal(cheap.total, whole.total) and len(set(cheap.total[0])) == 4
    assert [len(video) for video in shown] == [FRAMES] * 2
    # Beside sampling it is the same.
    batch = decode(vae, rollout, 8.0, 1, Host(), needed)
    assert batch.videos.shape[1] == needed and len(shown[-1]) == FRAMES
    assert np.array_equal(reward.score(batch).total, cheap.total[0])
