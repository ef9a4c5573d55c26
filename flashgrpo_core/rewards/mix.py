"""The reward of a run: a weighted sum of named terms.

Scoring has two stages. `RewardMix.measure` looks at each video on its own; it runs wherever the
videos are. `RewardMix.compare` looks at the numbers of a whole group; it runs after they were
gathered from all processes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..control import Control
from ..errors import FlashGRPOError
from .batch import VideoBatch
from .options import FrameRule
from .terms import Term, TermBuilder, is_group_wise

log = logging.getLogger(__name__)

#: What a mistake in a reward raises; a host's own way to interrupt is not among them.
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Reward(Protocol):
    """What the mix asks of a reward.

    `score` may take the host as a second parameter named `control`. A reward that compares the
    videos of a group has `feature_size`, `features(batch)` (float64 `[B, feature_size]`) and
    `compare(features)` (`[n, feature_size]` of one group to `[n]`) instead.
    """

    name: str

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """Values of all videos, float64 `[B]`: key `name`, and `name.part` for reporting."""
        ...


@dataclass(frozen=True, eq=False)
class Measured:
    """What is known of `B` videos, each on its own.

    Attributes:
        terms: float64 `[B]` by label: the value of a term after its clip and gate; for a group-wise
            reward 1 where its gate is open, else 0.
        features: float64 `[B, D]` by label, of group-wise rewards.
        parts: everything that was measured, float64 `[B]`, by label or `label.part`.
        valid: bool `[B]`, False where a term is not finite (only with `on_nan="mask"`).
    """

    terms: dict[str, np.ndarray]
    features: dict[str, np.ndarray]
    parts: dict[str, np.ndarray]
    valid: np.ndarray

    @staticmethod
    def joined(pieces: Sequence[Measured]) -> Measured:
        """Pieces one behind the other; at least one."""

        def join(which: str) -> dict[str, np.ndarray]:
            tables = [getattr(piece, which) for piece in pieces]
            return {key: np.concatenate([t[key] for t in tables]) for key in tables[0]}

        valid = np.concatenate([piece.valid for piece in pieces])
        return Measured(join("terms"), join("features"), join("parts"), valid)


@dataclass(frozen=True, eq=False)
class MixedScores:
    """The scores of `B` videos. All arrays are float64 `[B]` unless said otherwise.

    Attributes:
        terms: value of each weighted term (after clip, gate and comparison), by label.
        weights: weight of each term, by label.
        parts: everything that was measured, by label or `label.part`; for charts and reports.
        total: sum over terms of weight times value; NaN where a term is not finite.
        valid: bool `[B]`, False where a term is not finite (only with `on_nan="mask"`).
        compared: for a win rate, the values that were compared, by their own label.
    """

    terms: dict[str, np.ndarray]
    weights: dict[str, float]
    parts: dict[str, np.ndarray]
    total: np.ndarray
    valid: np.ndarray
    compared: dict[str, np.ndarray] = field(default_factory=dict)


class RewardMix:
    """A weighted sum of rewards.

    Each entry of `terms` is a table with `name`, `weight` (default 1) and the options of that
    reward. More keys shape a term:

    - `part = "smooth"` takes a reported part of the reward instead of its total;
    - `clip = [low, high]` limits the value;
    - `gate = {name = "technical", above = 0.5}` counts it only for videos whose gating reward lies
      above (or `below`) a threshold; the others get `otherwise` (default 0). Options of the gating
      reward stand in the same table;
    - `group = "win_rate"` replaces the value by the share of the other videos of the group that it
      beats (a tie counts half).

    A repeated name gets the label `name#2`, `name#3`, ...; a win rate is labelled `name.win_rate`.

    A failed score stays NaN and is never replaced by a number: with `on_nan="error"` it stops the
    run, with `"mask"` the video leaves its group.

    Args:
        terms: the tables, at least one.
        on_nan: `error`, `mask`, or `auto`: mask when the class of a reward sets `served = True`
            (another process, which may fail for a moment), else error.

    Raises:
        FlashGRPOError: an unknown reward or option, or a bad value.
    """

    def __init__(self, terms: list[dict[str, Any]], on_nan: str = "auto") -> None:
        if on_nan not in ("auto", "error", "mask"):
            raise FlashGRPOError(f"reward.on_nan = {on_nan!r} must be 'auto', 'error' or 'mask'")
        if not terms:
            raise FlashGRPOError("the reward has no terms: add one, e.g. {name = 'motion'}")
        builder = TermBuilder()
        self._terms = [builder.term(i, table) for i, table in enumerate(terms, start=1)]
        #: The rewards, each once however many terms and gates use it.
        self.rewards = builder.rewards
        if on_nan == "auto":
            served = any(getattr(reward, "served", False) for reward in self.rewards)
            on_nan = "mask" if served else "error"
        self.on_nan = on_nan

    @property
    def labels(self) -> list[str]:
        """The labels of the terms, in order."""
        return [term.label for term in self._terms]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term, by label."""
        return {term.label: term.weight for term in self._terms}

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Length of the feature vectors of each group-wise term, by label."""
        return {t.label: int(t.reward.feature_size) for t in self._terms if t.group_wise}

    def frames_needed(self, total: int) -> int:
        """How many leading frames of a video of `total` frames the rewards look at.

        Those that score frames one by one have a `FrameRule` as `rule`, and look at its frames
        only; all others are taken to look at the whole video.
        """
        rules = [getattr(reward, "rule", None) for reward in self.rewards]
        return max(rule.needed(total) if isinstance(rule, FrameRule) else total for rule in rules)

    def check_prompts(self, prompts: Iterable[str]) -> None:
        """Ask the rewards that have `check_prompt(prompt)` whether they can score these prompts.

        Raises:
            FlashGRPOError: a reward cannot; better before the first video than after it.
        """
        checks = [getattr(reward, "check_prompt", None) for reward in self.rewards]
        for prompt in prompts:
            for check in filter(None, checks):
                check(prompt)

    def score(self, batch: VideoBatch, control: Control | None = None) -> MixedScores:
        """Measure a batch and compare inside its groups (videos of equal `group_ids`).

        Raises:
            FlashGRPOError: see `measure` and `compare`.
        """
        return self.compare(self.measure(batch, control), batch.group_ids)

    def measure(self, batch: VideoBatch, control: Control | None = None) -> Measured:
        """Look at each video, one video and reward at a time so that a stop takes effect quickly.

        A reward whose class sets `whole_batch = True` gets all videos in one call instead.

        Raises:
            FlashGRPOError: a reward returned something else than one number per video, or (with
                `on_nan="error"`) a value that is not finite.
        """
        control = control or Control()
        results = {id(r): self._of_reward(r, batch, control) for r in self.rewards}
        terms: dict[str, np.ndarray] = {}
        parts: dict[str, np.ndarray] = {}
        features: dict[str, np.ndarray] = {}
        valid = np.ones(len(batch), dtype=bool)
        for term in self._terms:
            found = results[id(term.reward)]
            if term.group_wise:
                features[term.label] = found["features"]
                value = np.where(np.isfinite(found["features"]).all(1), 1.0, np.nan)
            else:
                value = _pick(term.reward, found, term.value)
                if term.value == term.reward.name:
                    parts |= {term.base + k[len(term.value) :]: v for k, v in found.items()}
            raw = value
            if term.clip is not None and not term.group_wise:
                value = np.clip(value, *term.clip)  # NaN stays NaN
            if term.gate is not None:
                gate = _pick(term.gate.reward, results[id(term.gate.reward)], term.gate.value)
                parts[f"{term.label}.gate"] = gate
                open_ = (gate > term.gate.above) & (gate < term.gate.below)
                shut = 0.0 if term.group_wise else term.gate.otherwise
                value = np.where(np.isfinite(gate), np.where(open_, value, shut), np.nan)
            if value is not raw and not term.group_wise:
                parts[f"{term.base}.raw"] = raw
            if not term.group_wise:
                parts[term.base] = value
            terms[term.label] = value
            finite = np.isfinite(value)
            if not finite.all():
                self._report_bad(term.label, np.flatnonzero(~finite), value)
            valid &= finite
        return Measured(terms, features, parts, valid)

    def compare(self, measured: Measured, group_ids: Iterable[Any]) -> MixedScores:
        """Finish the scores: compare inside groups, weigh and add up.

        Args:
            measured: `B` videos; all videos of a group must be among them.
            group_ids: their `B` group ids; a masked video takes no part in its group.

        Raises:
            FlashGRPOError: a group-wise reward returned something else than a number per video.
        """
        groups: dict[Any, list[int]] = {}
        for index, group in enumerate(group_ids):
            if measured.valid[index]:
                groups.setdefault(group, []).append(index)
        terms = dict(measured.terms)
        parts = dict(measured.parts)
        compared: dict[str, np.ndarray] = {}
        for term in self._terms:
            value = measured.terms[term.label]
            if term.win_rate:
                compared[term.base] = value
            elif not term.group_wise:
                continue
            result = np.full(len(value), np.nan)
            for members in groups.values():
                if term.win_rate:
                    result[members] = win_rate(value[members])
                else:
                    result[members] = _compared(term, measured.features[term.label][members])
            if term.group_wise:
                parts[f"{term.label}.raw"] = result
                if term.clip is not None:
                    result = np.clip(result, *term.clip)
                if term.gate is not None:
                    result = np.where(value == 0, term.gate.otherwise, result)
                    result = np.where(np.isfinite(value), result, np.nan)
            terms[term.label] = parts[term.label] = result
        total = np.zeros(len(measured.valid))
        for term in self._terms:
            total = total + term.weight * terms[term.label]
        total = np.where(measured.valid, total, np.nan)
        return MixedScores(terms, self.weights, parts, total, measured.valid, compared)

    def _report_bad(self, label: str, videos: np.ndarray, value: np.ndarray) -> None:
        where = ", ".join(str(i) for i in videos[:8]) + (", ..." if len(videos) > 8 else "")
        if self.on_nan == "error":
            raise FlashGRPOError(
                f"reward {label!r} gave {value[videos[0]]} for video {where} of {len(value)}: fix "
                "the reward, or set reward.on_nan = 'mask' to leave such videos out"
            )
        log.warning("reward %r is not finite for video %s of %d", label, where, len(value))

    def _of_reward(self, reward: Any, batch: VideoBatch, control: Control) -> dict[str, np.ndarray]:
        count = len(batch)
        if getattr(reward, "whole_batch", False) or count == 0:
            control.check()
            return _call(reward, batch, control, first=0)
        rows: list[dict[str, np.ndarray]] = []
        for index in range(count):
            control.check()
            rows.append(_call(reward, batch.select([index]), control, first=index))
            if rows[index].keys() != rows[0].keys():
                raise FlashGRPOError(
                    f"reward {reward.name!r} reported other parts for video {index} than for video "
                    "0: it must always return the same keys (NaN where a part is unknown)"
                )
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}


def win_rate(values: np.ndarray) -> np.ndarray:
    """Share of the other values that each one beats, a tie counting half: `[n]` to `[n]` in 0..1.

    A single value has nobody to beat: 0.5.
    """
    count = len(values)
    if count < 2:
        return np.full(count, 0.5)
    gaps = np.sign(values[:, None] - values[None])  # [n, n], 0 on the diagonal
    return 0.5 + 0.5 * gaps.sum(1) / (count - 1)


def default_terms(tiny: bool) -> list[dict[str, Any]]:
    """The terms used when the configuration names none.

    Args:
        tiny: True for the embedded tiny model, which is scored on what its prompts ask for.
    """
    if tiny:
        return [{"name": "tiny_world", "weight": 1.0}]
    return [{"name": "technical", "weight": 1.0}, {"name": "motion", "weight": 0.5}]


def evaluation_terms(terms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The terms for judging a policy: without win rates, whose mean is 0.5 for every policy."""
    return [{key: v for key, v in table.items() if key != "group"} for table in terms]


def _pick(reward: Any, found: dict[str, np.ndarray], key: str) -> np.ndarray:
    if key not in found:
        have = ", ".join(k[len(reward.name) + 1 :] for k in found if k != reward.name) or "none"
        raise FlashGRPOError(
            f"reward {reward.name!r} has no part {key[len(reward.name) + 1 :]!r}: it has {have}"
        )
    return found[key]


def _call(reward: Any, batch: VideoBatch, control: Control, first: int) -> dict[str, np.ndarray]:
    """Ask a reward; a mistake in it is reported with its name."""
    try:
        return _ask(reward, batch, control, first)
    except _MISTAKES as exc:
        if type(exc).__name__ == "OutOfMemoryError":  # torch's is a RuntimeError
            raise
        raise FlashGRPOError(
            f"reward {reward.name!r} failed on video {first}: {type(exc).__name__}: {exc}"
        ) from exc


def _ask(reward: Any, batch: VideoBatch, control: Control, first: int) -> dict[str, np.ndarray]:
    """Ask a reward, and check that it answered as it must."""
    if is_group_wise(type(reward)):
        features = np.asarray(reward.features(batch), dtype=np.float64)
        shape = (len(batch), int(reward.feature_size))
        if features.shape != shape:
            raise FlashGRPOError(
                f"reward {reward.name!r} returned features {list(features.shape)} for video "
                f"{first}: expected {list(shape)}"
            )
        return {"features": features}
    with_control = "control" in inspect.signature(reward.score).parameters
    result = reward.score(batch, control) if with_control else reward.score(batch)
    return _checked(reward.name, result, len(batch), first)


def _compared(term: Term, features: np.ndarray) -> np.ndarray:
    values = np.asarray(term.reward.compare(features), dtype=np.float64)
    if values.shape != (len(features),) or not np.isfinite(values).all():
        raise FlashGRPOError(
            f"reward {term.reward.name!r} compared {len(features)} videos and returned "
            f"{list(values.shape)} values: expected one finite number per video"
        )
    return values


def _checked(name: str, result: Any, count: int, first: int) -> dict[str, np.ndarray]:
    if not isinstance(result, dict) or name not in result:
        raise FlashGRPOError(f"reward {name!r} returned no value named {name!r} for video {first}")
    checked = {}
    for key, values in result.items():
        if key != name and not key.startswith(name + "."):
            raise FlashGRPOError(
                f"reward {name!r} returned {key!r}: further values are named {name + '.part'!r}"
            )
        values = np.asarray(values, dtype=np.float64)
        if values.shape != (count,):
            raise FlashGRPOError(
                f"reward {name!r} returned {list(values.shape)} values as {key!r} for video "
                f"{first}: expected one per video, [{count}]"
            )
        checked[key] = values
    return checked
