"""Ranking existing videos: order, groups, failures, and what stands in files beside them."""

from __future__ import annotations

import numpy as np
import pytest

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.ranking import Clip, prompts_beside, rank_videos, videos_in
from flashgrpo_core.rewards import RewardMix
from flashgrpo_core.video import read_video, write_mp4
from tests.unit._clips import blurred, disc, frozen, line, natural, noisy


def clip(name: str, video: np.ndarray, prompt: str = "p", fps: float = 16.0) -> Clip:
    return Clip(name, prompt, lambda: (video, fps))


def test_videos_are_ranked_best_first_whatever_their_order_and_size() -> None:
    good = natural()[:5]
    clips = [
        clip("soft", blurred(good, 4)),
        clip("small", disc(line(7))),
        clip("good", good),
        clip("grainy", noisy(good, 20)),
        clip("still", frozen(good)),
    ]
    reward = RewardMix([{"name": "technical"}])
    names = [r.clip.name for r in rank_videos(clips, reward)]
    assert names == [r.clip.name for r in rank_videos(clips[::-1], reward)]
    assert set(names[:2]) == {"good", "small"} and names.index("grainy") < names.index("soft")
    ranked = rank_videos(clips, reward)
    totals = [r.total for r in ranked]
    assert totals == sorted(totals, reverse=True)
    best = next(r for r in ranked if r.clip.name == "good")
    assert best.frames == 5 and best.fps == 16 and best.terms["technical"] == best.total
    np.testing.assert_array_equal(best.middle[0], good[2])


def test_groups_are_the_videos_of_one_prompt() -> None:
    levels = {"a": 10, "b": 200, "c": 20, "d": 100}
    clips = [
        clip(name, np.full((2, 8, 8, 3), level, np.uint8), prompt="first" if name in "ab" else "x")
        for name, level in levels.items()
    ]
    terms = [{"name": "brightness", "target": 1.0, "group": "win_rate"}]
    ranked = rank_videos(clips, RewardMix(terms))
    assert {r.clip.name: r.total for r in ranked} == {"a": 0, "b": 1, "c": 0, "d": 1}


def test_a_failed_score_comes_last_or_names_its_video(monkeypatch: pytest.MonkeyPatch) -> None:
    clips = [clip("dark.mp4", np.zeros((2, 8, 8, 3), np.uint8)), clip("b.mp4", disc(line(2)))]
    terms = [{"name": "brightness"}]

    def score(self, batch):  # noqa: ANN001, ANN202
        bright = batch.videos.reshape(len(batch), -1).mean(1)
        return {"brightness": np.where(bright > 0, bright, np.nan)}

    monkeypatch.setattr("flashgrpo_core.rewards.picture.BrightnessReward.score", score)
    last = rank_videos(clips, RewardMix(terms, "mask"))[-1]
    assert last.clip.name == "dark.mp4" and np.isnan(last.total)
    with pytest.raises(FlashGRPOError, match="dark.mp4: reward 'brightness' gave nan"):
        rank_videos(clips, RewardMix(terms, "error"))


def test_files_and_their_prompts(tmp_path) -> None:  # noqa: ANN001
    for name in ("b.mp4", "a.mp4"):
        write_mp4(tmp_path / name, disc(line(3)), 8)
    (tmp_path / "notes.txt").write_text("no video", encoding="utf-8")
    files = videos_in(tmp_path)
    assert [f.name for f in files] == ["a.mp4", "b.mp4"]
    assert videos_in(files[0]) == [files[0]]
    assert prompts_beside(files) == [None, None]
    (tmp_path / "a.txt").write_text("\ufeffa dog\nin the snow\n", encoding="utf-8")
    (tmp_path / "index.json").write_text(
        '[{"file": "b.mp4", "prompt": "cat"}, {"file": "a.mp4", "prompt": "x"}]', encoding="utf-8"
    )
    assert prompts_beside(files) == ["a dog in the snow", "cat"]
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FlashGRPOError, match="a.txt"):
        prompts_beside(files)
    with pytest.raises(FlashGRPOError, match="holds no video"):
        videos_in(tmp_path.joinpath("empty").mkdir() or tmp_path / "empty")


def test_gifs_are_videos_too(tmp_path) -> None:  # noqa: ANN001
    from PIL import Image

    frames = [Image.fromarray(f) for f in disc(line(4))]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=125)
    (file,) = videos_in(tmp_path)
    (ranked,) = rank_videos(
        [Clip("a", "", lambda: read_video(file))], RewardMix([{"name": "motion"}])
    )
    assert ranked.frames == 4 and ranked.fps == pytest.approx(8, abs=0.5) and ranked.total > 0.2
