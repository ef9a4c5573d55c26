"""The `judge` reward: a vision language model behind an OpenAI-compatible server gives marks."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..control import Control
from ..errors import FlashGRPOError
from ..rewards.batch import VideoBatch
from ..rewards.options import number
from ..video import jpeg_data_uri
from .client import ServerFailed, ServerPool, Stop
from .reward import each_video, resolve

log = logging.getLogger(__name__)

_NUMBER = r"(?P<value>-?\d+(?:\.\d+)?)"
_FRAMES = "You see {frames} frames of a video, in order. It was made from this text: {prompt}\n"


@dataclass(frozen=True)
class Rubric:
    """What the judge is asked, and how its answer is read.

    Attributes:
        question: what to judge; `{prompt}` and `{frames}` are filled in.
        answer: in which form.
        pattern: regular expression with the group `value`, and with `part` where the answer holds
            several marks; empty: the probability of "yes" against "no" is the score.
        parts: marks that must be there; the score is their mean.
    """

    question: str
    answer: str
    pattern: str
    parts: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole question."""
        return f"{self.question}\n{self.answer}".strip()


RUBRICS: dict[str, Rubric] = {
    "points": Rubric(
        _FRAMES + "Rate it from 1 (bad) to 5 (excellent): how well it shows what the text says, "
        "how clean and sharp the frames are, and whether things move as they would in reality.",
        "Close with one line that says only:\nFinal Score: <number>",
        rf"final\s+score\W*{_NUMBER}",
    ),
    "unified": Rubric(
        _FRAMES + "Give three marks from 1 (bad) to 5 (excellent): alignment (does it show what "
        "the text says), physics (do things move and stay as in reality), style (is it pleasing "
        "and free of faults).",
        "Answer with exactly three lines:\nAlignment Score (1-5): <number>\n"
        "Physics Score (1-5): <number>\nStyle Score (1-5): <number>",
        rf"(?P<part>alignment|physics|style)\s+score\s*(?:\(1-5\))?[\s:*]*{_NUMBER}",
        ("alignment", "physics", "style"),
    ),
    "yes_no": Rubric(
        _FRAMES + "Does the video show what the text says, without faults?",
        "Answer with one word, Yes or No.",
        "",
    ),
}


class JudgeReward:
    """Marks of a vision language model (UnifiedReward and the like) for some frames of each video.

    The server speaks OpenAI's chat completions (vLLM, llama.cpp, SGLang, ...); it is asked without
    sampling (`temperature` 0), so that equal videos get equal marks. An answer that cannot be read
    is a failed score, never a bad one.

    Args:
        server: name in the servers file (`kind` judge).
        url: address up to `/v1`, instead of `server`.
        token_file: file with the key for `url`.
        model: name of the model there; empty takes the one of the servers file.
        rubric: `points`, `unified`, `yes_no`, or an own text with `{prompt}` and the form of the
            answer in it.
        question: replaces the question of a named rubric, not the form of its answer.
        pattern: for an own text, the regular expression that finds the marks (see `Rubric`);
            empty: the answer is yes or no, and its probability the score.
        low: lowest mark; anything outside is a failed score.
        high: highest mark.
        frames: frames shown, evenly spaced, the first and the last among them.
        max_tokens: longest answer.
        timeout: seconds without a byte after which a request has failed.
        attempts: how often a request may fail.
        parallel: videos judged at a time; 0 = four per server.
    """

    name = "judge"
    title = "Judge"
    description = "Asks a vision language model on an OpenAI-compatible server for marks, with a rubric of your choice."
    range = "1 .. 5 (points, unified), 0 .. 1 (yes_no)"
    direction = "higher is better"
    hackable_by = (
        "text in the picture that flatters or instructs the judge, and looks that language models "
        "like; it sees a few frames only, so motion between them does not count"
    )

    served = True
    whole_batch = True
    #: Options that name files, looked up beside the TOML.
    files = ("token_file",)
    source = "write the server's token into it"

    def __init__(
        self,
        server: str = "",
        url: str | list[str] = "",
        token_file: str = "",
        model: str = "",
        rubric: str = "points",
        question: str = "",
        pattern: str = "",
        low: float = 1.0,
        high: float = 5.0,
        frames: int = 8,
        max_tokens: int = 512,
        timeout: float = 300.0,
        attempts: int = 4,
        parallel: int = 0,
    ) -> None:
        found = resolve(self.name, server, url, token_file, "judge")
        self.model = model or found.model
        if not isinstance(self.model, str) or not self.model:
            raise FlashGRPOError(
                "reward 'judge' needs the model's name: set model here or in the servers file"
            )
        self.rubric = _rubric(rubric, question, pattern)
        self.low = number(self.name, "low", low, -1e6, 1e6)
        self.high = number(self.name, "high", high, -1e6, 1e6)
        if self.low >= self.high:
            raise FlashGRPOError(f"reward 'judge': low = {low:g} must be below high = {high:g}")
        self.frames = int(number(self.name, "frames", frames, 1, 64))
        self.max_tokens = int(number(self.name, "max_tokens", max_tokens, 1, 32768))
        self.parallel = int(number(self.name, "parallel", parallel, 0, 256)) or 4 * len(found.urls)
        self.pool = ServerPool(
            found.urls,
            found.token,
            number(self.name, "timeout", timeout, 0.1, 86400),
            int(number(self.name, "attempts", attempts, 1, 100)),
        )

    def score(self, batch: VideoBatch, control: Control | None = None) -> dict[str, np.ndarray]:
        """See the class."""
        rows = each_video(batch, self._ask, self.parallel, control or Control())
        keys = ["", *self.rubric.parts]
        columns = {key: np.array([r.get(key, np.nan) for r in rows], np.float64) for key in keys}
        return {f"{self.name}.{k}" if k else self.name: column for k, column in columns.items()}

    def _ask(self, video: VideoBatch, stop: Stop) -> dict[str, float]:
        """Marks of one video; empty when there are none that can be read."""
        frames = video.videos[0]
        count = min(self.frames, len(frames))
        shown = [frames[i] for i in np.linspace(0, len(frames) - 1, count).round().astype(int)]
        text = self.rubric.text.replace("{frames}", str(count))
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": jpeg_data_uri(frame, quality=95)}}
            for frame in shown
        ]
        content.append({"type": "text", "text": text.replace("{prompt}", video.prompts[0])})
        question: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        if not self.rubric.pattern:
            question |= {"max_tokens": min(self.max_tokens, 8), "logprobs": True}
            question["top_logprobs"] = 20
        try:
            body = json.dumps(question).encode()
            data = self.pool.ask("POST", "/chat/completions", body, stop=stop)
            choice = json.loads(data)["choices"][0]
            if self.rubric.pattern:
                return self._marks(str(choice["message"]["content"]))
            return {"": _yes(choice["logprobs"]["content"])}
        except (ServerFailed, ValueError, KeyError, TypeError, IndexError) as exc:
            if not stop.event.is_set():
                reason = f"{type(exc).__name__}: {exc}" if isinstance(exc, KeyError) else exc
                log.warning("judge: a video was not scored: %s", str(reason)[:300])
            return {}

    def _marks(self, answer: str) -> dict[str, float]:
        marks: dict[str, float] = {}
        for match in re.finditer(self.rubric.pattern, answer, re.IGNORECASE):
            found = match.groupdict()
            # The last one counts: reasoning in front of the verdict may mention marks too.
            marks[(found.get("part") or "").lower()] = float(found["value"])
        missing = [part for part in self.rubric.parts if part not in marks]
        bad = [mark for mark in marks.values() if not self.low <= mark <= self.high]
        if not marks or missing or bad:
            raise ValueError(f"no mark from {self.low:g} to {self.high:g} in {answer[-120:]!r}")
        return {**marks, "": math.fsum(marks.values()) / len(marks)}


def _rubric(rubric: Any, question: Any, pattern: Any) -> Rubric:
    """A rubric by name, with its own or another question, or an own text.

    Raises:
        FlashGRPOError: a text without `{prompt}`, or a pattern that cannot be used.
    """
    named = isinstance(rubric, str) and rubric in RUBRICS
    for name, text in (("question", question), ("rubric", "{prompt}" if named else rubric)):
        if not isinstance(text, str) or (text.strip() and "{prompt}" not in text):
            raise FlashGRPOError(
                f"reward 'judge': {name} = {str(text)[:80]!r} must be a text with {{prompt}} in it, "
                f"where the prompt is put{'; or ' + ', '.join(RUBRICS) if name == 'rubric' else ''}"
            )
    if named:
        chosen = RUBRICS[rubric]
        chosen = replace(chosen, question=question) if question.strip() else chosen
        return replace(chosen, pattern=pattern) if pattern else chosen
    try:
        groups = re.compile(pattern).groupindex if pattern else {"value": 1}
    except (re.error, TypeError) as exc:
        raise FlashGRPOError(
            f"reward 'judge': pattern = {pattern!r} cannot be used: {exc}"
        ) from None
    if "value" not in groups:
        raise FlashGRPOError(
            f"reward 'judge': pattern = {pattern!r} needs the group (?P<value>...) around the mark"
        )
    return Rubric(rubric, "", pattern)


def _yes(tokens: Any) -> float:
    """Probability of yes against no, at the first token that is either."""
    for token in tokens:
        chances = {"yes": 0.0, "no": 0.0}
        for option in token["top_logprobs"]:
            word = option["token"].strip(" \t\r\n.,!\"'*").lower()
            if word in chances:
                chances[word] += math.exp(float(option["logprob"]))
        if token["token"].strip(" \t\r\n.,!\"'*").lower() in chances and sum(chances.values()) > 0:
            return chances["yes"] / (chances["yes"] + chances["no"])
    raise ValueError("the answer is neither yes nor no")
