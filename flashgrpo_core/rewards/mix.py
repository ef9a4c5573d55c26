"""The reward of a run: a weighted sum of named terms."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..control import Control
from ..errors import FlashGRPOError
from .batch import VideoBatch

log = logging.getLogger(__name__)

#: Keys of a term that belong to the mix; all others are options of the reward.
TERM_KEYS = ("name", "weight", "clip", "gate")
#: Keys of a gate that belong to the mix; all others are options of the gating reward.
GATE_KEYS = ("name", "above", "below", "otherwise")


class Reward(Protocol):
    """What the mix asks of a reward."""

    name: str

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """Values of all videos, float64 `[B]`: key `name`, and `name.part` for reporting."""
        ...


@dataclass(frozen=True, eq=False)
class MixedScores:
    """The scores of one batch of `B` videos. All arrays are float64 `[B]` unless said otherwise.

    Attributes:
        terms: value of each weighted term (after its clip and gate), by label.
        weights: weight of each term, by label.
        parts: everything that was measured, by label or `label.part`; for charts and reports.
        total: sum over terms of weight times value; NaN where a term is not finite.
        valid: bool `[B]`, False where a term is not finite (only with `on_nan="mask"`).
    """

    terms: dict[str, np.ndarray]
    weights: dict[str, float]
    parts: dict[str, np.ndarray]
    total: np.ndarray
    valid: np.ndarray


@dataclass
class _Gate:
    reward: Reward
    above: float
    below: float
    otherwise: float


@dataclass
class _Term:
    label: str
    weight: float
    reward: Reward
    clip: tuple[float, float] | None = None
    gate: _Gate | None = None


class RewardMix:
    """A weighted sum of rewards.

    Each entry of `terms` is a table with `name`, `weight` (default 1) and the options of that
    reward. Two more keys shape a term: `clip = [low, high]` limits its value, and
    `gate = {name = "technical", above = 0.5}` counts it only for videos whose gating reward lies
    above (or `below`) a threshold; the others get `otherwise` (default 0). Options of the gating
    reward stand in the same table. A repeated name gets the label `name#2`, `name#3`, ...

    A failed score stays NaN and is never replaced by a number: with `on_nan="error"` it stops the
    run, with `"mask"` the video leaves its group.

    Args:
        terms: the tables, at least one.
        on_nan: `error` or `mask`.

    Raises:
        FlashGRPOError: an unknown reward or option, or a bad value.
    """

    def __init__(self, terms: list[dict[str, Any]], on_nan: str = "error") -> None:
        if on_nan not in ("error", "mask"):
            raise FlashGRPOError(f"reward.on_nan = {on_nan!r} must be 'error' or 'mask'")
        if not terms:
            raise FlashGRPOError("the reward has no terms: add one, e.g. {name = 'motion'}")
        self.on_nan = on_nan
        self._built: dict[str, Reward] = {}
        self._terms: list[_Term] = []
        seen: dict[str, int] = {}
        for position, table in enumerate(terms, start=1):
            self._terms.append(self._build_term(position, table, seen))

    @property
    def labels(self) -> list[str]:
        """The labels of the terms, in order."""
        return [term.label for term in self._terms]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term, by label."""
        return {term.label: term.weight for term in self._terms}

    def score(self, batch: VideoBatch, control: Control | None = None) -> MixedScores:
        """Score a batch, one video and reward at a time so that a stop takes effect quickly.

        A reward whose class sets `whole_batch = True` gets all videos in one call instead.

        Raises:
            FlashGRPOError: a reward returned something else than one number per video, or (with
                `on_nan="error"`) a value that is not finite.
        """
        control = control or Control()
        count = len(batch)
        by_reward = {
            id(reward): self._score_reward(reward, batch, control)
            for reward in self._built.values()
        }
        terms: dict[str, np.ndarray] = {}
        parts: dict[str, np.ndarray] = {}
        total = np.zeros(count)
        for term in self._terms:
            values = by_reward[id(term.reward)]
            raw = values[term.reward.name]
            for key, part in values.items():
                parts[term.label + key[len(term.reward.name) :]] = part
            value = raw
            if term.clip is not None:
                value = np.clip(value, *term.clip)  # NaN stays NaN
            if term.gate is not None:
                gate = by_reward[id(term.gate.reward)][term.gate.reward.name]
                parts[f"{term.label}.gate"] = gate
                open_ = (gate > term.gate.above) & (gate < term.gate.below)
                value = np.where(open_, value, term.gate.otherwise)
                value = np.where(np.isfinite(gate), value, np.nan)
            if value is not raw:
                parts[f"{term.label}.raw"] = raw
            parts[term.label] = value
            terms[term.label] = value
            total = total + term.weight * value
        valid = np.ones(count, dtype=bool)
        for label, value in terms.items():
            finite = np.isfinite(value)
            if not finite.all():
                self._report_bad(label, np.flatnonzero(~finite), value)
            valid &= finite
        total = np.where(valid, total, np.nan)
        return MixedScores(terms, self.weights, parts, total, valid)

    def _report_bad(self, label: str, videos: np.ndarray, value: np.ndarray) -> None:
        where = ", ".join(str(i) for i in videos[:8]) + (", ..." if len(videos) > 8 else "")
        if self.on_nan == "error":
            raise FlashGRPOError(
                f"reward {label!r} gave {value[videos[0]]} for video {where} of {len(value)}: fix "
                "the reward, or set reward.on_nan = 'mask' to leave such videos out"
            )
        log.warning("reward %r is not finite for video %s of %d", label, where, len(value))

    def _score_reward(
        self, reward: Reward, batch: VideoBatch, control: Control
    ) -> dict[str, np.ndarray]:
        count = len(batch)
        if getattr(reward, "whole_batch", False) or count == 0:
            control.check()
            return _checked(reward, reward.score(batch), count, first=0)
        rows: list[dict[str, np.ndarray]] = []
        for index in range(count):
            control.check()
            rows.append(_checked(reward, reward.score(batch.select([index])), 1, first=index))
            if rows[index].keys() != rows[0].keys():
                raise FlashGRPOError(
                    f"reward {reward.name!r} reported other parts for video {index} than for video "
                    "0: it must always return the same keys (NaN where a part is unknown)"
                )
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}

    def _build_term(self, position: int, table: Any, seen: dict[str, int]) -> _Term:
        where = f"reward term {position}"
        if not isinstance(table, dict):
            raise FlashGRPOError(f"{where} is {table!r}: it must be a table with a name")
        name = table.get("name")
        options = {key: value for key, value in table.items() if key not in TERM_KEYS}
        reward = self._build(where, name, options)
        weight = _number(f"{where} ({name}): weight", table.get("weight", 1.0))
        clip = None
        if table.get("clip") is not None:
            clip = _clip_range(f"{where} ({name}): clip", table["clip"])
        gate = None
        if table.get("gate") is not None:
            gate = self._build_gate(f"{where} ({name}): gate", table["gate"])
        label = reward.name
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            label = f"{label}#{seen[label]}"
        return _Term(label, weight, reward, clip, gate)

    def _build_gate(self, where: str, table: Any) -> _Gate:
        if not isinstance(table, dict):
            raise FlashGRPOError(f"{where} = {table!r} must be a table: name, and above or below")
        if "above" not in table and "below" not in table:
            raise FlashGRPOError(f"{where} needs a threshold: add above = 0.5 or below = 0.5")
        options = {key: value for key, value in table.items() if key not in GATE_KEYS}
        return _Gate(
            reward=self._build(where, table.get("name"), options),
            above=_number(f"{where}.above", table["above"]) if "above" in table else -math.inf,
            below=_number(f"{where}.below", table["below"]) if "below" in table else math.inf,
            otherwise=_number(f"{where}.otherwise", table.get("otherwise", 0.0)),
        )

    def _build(self, where: str, name: Any, options: dict[str, Any]) -> Reward:
        """Make a reward once: equal name and options share one instance and one scoring."""
        from . import REWARDS  # the dict lives in the package, which imports this module

        if not isinstance(name, str) or name not in REWARDS:
            match = difflib.get_close_matches(str(name), sorted(REWARDS), n=1)
            hint = f"did you mean {match[0]!r}?" if match else f"known are {', '.join(REWARDS)}"
            raise FlashGRPOError(f"{where}: unknown reward {name!r}: {hint}")
        key = repr((name, sorted(options.items(), key=lambda item: item[0])))
        if key not in self._built:
            check_options(where, name, REWARDS[name], options)
            self._built[key] = REWARDS[name](**options)
        return self._built[key]


def default_terms(tiny: bool) -> list[dict[str, Any]]:
    """The terms used when the configuration names none.

    Args:
        tiny: True for the embedded tiny model, which is scored on what its prompts ask for.
    """
    if tiny:
        return [{"name": "tiny_world", "weight": 1.0}]
    return [{"name": "technical", "weight": 1.0}, {"name": "motion", "weight": 0.5}]


def option_defaults(cls: type) -> dict[str, Any]:
    """The options a reward class takes, with their defaults."""
    parameters = inspect.signature(cls).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default for p in parameters if p.kind in kinds}


def check_options(where: str, name: str, cls: type, options: dict[str, Any]) -> None:
    """Check that a reward class knows all `options` and gets all it needs.

    Raises:
        FlashGRPOError: naming the option and the ones that exist.
    """
    known = option_defaults(cls)
    for key in options:
        if key not in known:
            names = [*known, *TERM_KEYS[1:]]
            match = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {match[0]!r}?" if match else f"known are {', '.join(names)}"
            raise FlashGRPOError(f"{where}: reward {name!r} has no option {key!r}: {hint}")
    for key, default in known.items():
        if default is inspect.Parameter.empty and key not in options:
            raise FlashGRPOError(f"{where}: reward {name!r} needs the option {key!r}: add it")


def _checked(reward: Reward, result: Any, count: int, first: int) -> dict[str, np.ndarray]:
    name = reward.name
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


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise FlashGRPOError(f"{where} = {value!r} must be a finite number")
    return float(value)


def _clip_range(where: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise FlashGRPOError(f"{where} = {value!r} must be two numbers, [low, high]")
    low, high = (_number(where, v) for v in value)
    if low >= high:
        raise FlashGRPOError(f"{where} = {value!r} must have its low end below its high end")
    return low, high
