"""The OCR reward reads rendered text with the real reader, and compares it with the prompt's."""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import RewardMix, VideoBatch
from flashgrpo_core.rewards.ocr import OcrReward, edit_distance, quoted
from tests.unit._clips import blurred, noisy

PROMPT = 'a shop at night, a neon sign that reads "Hello World"'


@cache
def reader() -> OcrReward:
    """Loading the models takes a second, so it is done once."""
    return OcrReward()


def clip(text: str, size: tuple[int, int] = (320, 192)) -> np.ndarray:
    image = Image.new("RGB", size, (30, 60, 90))
    draw = ImageDraw.Draw(image)
    draw.text((24, 70), text, font=ImageFont.load_default(40), fill=(255, 250, 240))
    return np.asarray(image)[None]


def score(prompt: str, *videos: np.ndarray) -> list[float]:
    batch = VideoBatch(np.stack(videos), [prompt] * len(videos), 8.0, ["g"] * len(videos))
    return reader().score(batch)["ocr"].tolist()


def test_rendered_text_is_read_and_compared() -> None:
    right, wrong_letter, other, nothing = score(
        PROMPT, clip("HELLO WORLD"), clip("HELO WRLD"), clip("CLOSED"), clip("")
    )
    assert right == 1
    assert wrong_letter == pytest.approx(0.8, abs=0.11)  # two of ten letters are missing
    assert nothing == 0
    assert right > wrong_letter > other >= nothing


def test_text_survives_grain_and_drowns_in_blur() -> None:
    grainy, soft = score(PROMPT, noisy(clip("HELLO WORLD"), 40), blurred(clip("HELLO WORLD"), 10))
    assert grainy > 0.85 and soft < 0.3


def test_more_text_than_asked_for_is_not_the_text() -> None:
    """A target inside a longer text is no full score: else writing everything would win."""
    assert score('a sign "OPEN"', clip("OPEN DAILY"))[0] == 0


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('the word "OPEN" on a door', "OPEN"),
        ("“Bonjour” and «Paris» beside 「東京」", "Bonjour Paris 東京"),
        ("it's a dog's life, 'big day' on a banner", "big day"),
        ('two signs: "LEFT", "RIGHT"', "LEFT RIGHT"),
        ("the cats' house and the dogs' garden", ""),
        ('an unfinished "quote', ""),
        ("", ""),
    ],
)
def test_quoted_text_of_a_prompt(prompt: str, text: str) -> None:
    assert quoted(prompt) == text


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("a", "a", 0)],
)
def test_edit_distance(first: str, second: str, steps: int) -> None:
    assert edit_distance(first, second) == edit_distance(second, first) == steps


def test_a_prompt_without_quoted_text_is_named_unless_the_text_is_given() -> None:
    with pytest.raises(FlashGRPOError, match="'a dog' has no text in quotation marks"):
        score("a dog", clip("OPEN"))
    batch = VideoBatch(clip("OPEN")[None], ["a dog"], 8.0, ["g"])
    mix = RewardMix([{"name": "ocr", "text": "open!"}])
    mix.rewards[0]._reader = reader()._reader
    assert mix.score(batch).total.tolist() == [1.0]


def test_without_the_package_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FlashGRPOError, match='pip install "rapidocr'):
        OcrReward()
    monkeypatch.undo()
    broken = OcrReward()
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(FlashGRPOError, match="cannot load rapidocr"):
        broken.read(clip("")[0])


@pytest.mark.parametrize("options", [{"text": 3}, {"text": "!?"}, {"every": 0}, {"frames": "all"}])
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(FlashGRPOError, match=next(iter(options))):
        OcrReward(**options)
