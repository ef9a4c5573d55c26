"""The `ocr` reward: readable text in the video, the text that the prompt quotes.

The reader is rapidocr with the PP-OCR models inside its wheel (Apache-2.0), on the CPU through
onnxruntime; both come with the optional extra `ocr` and are loaded at the first score. rapidocr
fetches models that are missing, so their paths are given and checked here.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import FlashGRPOError
from .batch import VideoBatch
from .options import frame_rule, number

_INSTALL = 'install it with: pip install "rapidocr>=3.10,<4" onnxruntime'
_MODELS = {
    "Det": "PP-OCRv6_det_small.onnx",
    "Cls": "ch_ppocr_mobile_v2.0_cls_mobile.onnx",
    "Rec": "PP-OCRv6_rec_small.onnx",
}
#: Pairs of quotation marks. A straight single quote opens only after a space, or it is an apostrophe.
_QUOTED = re.compile(
    r'"([^"]+)"|\u201c([^\u201d]+)\u201d|\u00ab([^\u00bb]+)\u00bb|\u300c([^\u300d]+)\u300d'
    r"|\u2018([^\u2019]+)\u2019|(?:(?<=\s)|^)'([^']+)'(?!\w)"
)


class OcrReward:
    """Closeness of the text in the frames to the quoted text of the prompt.

    Per frame `max(0, 1 - distance / length)`: the edit distance (insertions, deletions and
    replacements of characters) between what is read and what is asked, over the length of what is
    asked. Case, spaces and punctuation do not count. All texts in quotation marks of a prompt are
    asked for, in their order; texts that are read are put together from top to bottom.

    Args:
        text: text to ask for instead of the quoted one of the prompt.
        frames: how the frames' scores become the video's (see `options.aggregate`).
        every: use every n-th frame, the first one always.
        short_side: smaller frames are enlarged to this short side first, pixels.
    """

    name = "ocr"
    title = "Readable text"
    description = "Rewards videos that show the text in quotation marks of the prompt, readable."
    range = "0 (not the text) .. 1 (exactly the text)"
    direction = "higher is better"
    hackable_by = (
        "large plain letters on a plain ground, like a subtitle, in every frame. Mix it with a "
        "quality reward"
    )
    cost = "0.3 to 1 s per frame on a CPU, 150 MB of memory; needs rapidocr and onnxruntime"
    licence = "Apache-2.0 (models inside the package)"

    def __init__(
        self, text: str = "", frames: str = "mean", every: int = 8, short_side: int = 256
    ) -> None:
        if not isinstance(text, str):
            raise FlashGRPOError(f"reward {self.name!r}: text = {text!r} must be text")
        if text and not _letters(text):
            raise FlashGRPOError(f"reward {self.name!r}: text = {text!r} has no letter or digit")
        self.text = text
        self.rule = frame_rule(self.name, frames, every)
        self.short_side = int(number(self.name, "short_side", short_side, 32, 1024))
        if importlib.util.find_spec("rapidocr") is None:
            raise FlashGRPOError(f"reward {self.name!r} needs the package rapidocr: {_INSTALL}")
        self._reader: Any = None

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class.

        Raises:
            FlashGRPOError: a prompt quotes no text, or the reader cannot be loaded.
        """
        asked = [self.check_prompt(prompt) for prompt in batch.prompts]
        values = []
        for video, text in zip(batch.videos, asked, strict=True):
            scores = [_closeness(_letters(self.read(f)), text) for f in self.rule.pick(video)]
            values.append(self.rule.total(np.array(scores)))
        return {self.name: np.array(values, dtype=np.float64)}

    def check_prompt(self, prompt: str) -> str:
        """The letters and digits that a prompt asks for.

        Raises:
            FlashGRPOError: it quotes no text.
        """
        text = _letters(self.text or quoted(prompt))
        if not text:
            raise FlashGRPOError(
                f"ocr reward: prompt {prompt[:80]!r} has no text in quotation marks: write e.g. "
                'a sign that reads "OPEN", or set the option text'
            )
        return text

    def read(self, frame: np.ndarray) -> str:
        """The text in one frame, uint8 RGB `[H, W, 3]`."""
        if self._reader is None:
            self._reader = _load_reader()
        height, width = frame.shape[:2]
        scale = self.short_side / min(height, width)
        if scale > 1:
            size = (round(width * scale), round(height * scale))
            frame = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC))
        # rapidocr takes arrays as BGR.
        found = self._reader(np.ascontiguousarray(frame[..., ::-1]))
        return " ".join(found.txts or ())


def quoted(prompt: str) -> str:
    """All texts in quotation marks of a prompt, with a space between; empty when there is none."""
    return " ".join(next(g for g in match.groups() if g) for match in _QUOTED.finditer(prompt))


def edit_distance(first: str, second: str) -> int:
    """Smallest number of insertions, deletions and replacements that makes one the other."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def _letters(text: str) -> str:
    return "".join(c for c in text.casefold() if c.isalnum())


def _closeness(read: str, asked: str) -> float:
    return max(0.0, 1.0 - edit_distance(read, asked) / len(asked))


def _load_reader() -> Any:
    try:
        import rapidocr
    except ImportError as exc:
        raise FlashGRPOError(f"reward 'ocr' cannot load rapidocr ({exc}): {_INSTALL}") from None
    folder = Path(rapidocr.__file__).parent / "models"
    missing = [name for name in _MODELS.values() if not (folder / name).is_file()]
    if missing:
        raise FlashGRPOError(
            f"reward 'ocr': rapidocr has no model {missing[0]!r} inside, so it is another version: "
            f"{_INSTALL}"
        )
    logging.getLogger("RapidOCR").setLevel(logging.ERROR)
    parameters = {f"{stage}.model_path": str(folder / name) for stage, name in _MODELS.items()}
    try:
        return rapidocr.RapidOCR(params={"Global.log_level": "error", **parameters})
    except Exception as exc:  # a missing onnxruntime surfaces in several ways
        text = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise FlashGRPOError(f"reward 'ocr' cannot start rapidocr ({text}): {_INSTALL}") from None
