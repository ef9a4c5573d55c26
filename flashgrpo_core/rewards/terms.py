"""From the tables of `reward.terms` to terms: checked, and every reward made once."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import FlashGRPOError
from .installed import installed_rewards

#: Keys of a term that belong to the mix; all others are options of the reward.
TERM_KEYS = ("name", "weight", "part", "clip", "gate", "group", "once_per_node")
#: Keys of a gate that belong to the mix; all others are options of the gating reward.
GATE_KEYS = ("name", "part", "above", "below", "otherwise")
#: What the key `group` can ask for.
COMPARISONS = ("win_rate",)


@dataclass(frozen=True)
class Gate:
    """Counts a term only for videos whose gating value lies strictly between two thresholds."""

    reward: Any
    value: str
    above: float
    below: float
    otherwise: float


@dataclass(frozen=True)
class Term:
    """One weighted term.

    Attributes:
        label: its name in logs and charts, unique in the mix.
        base: the label without `.win_rate`: the name of what is compared.
        weight: its weight.
        reward: the reward.
        value: key of the reward's result that is the term's value.
        clip: limits, or None.
        gate: gate, or None.
        win_rate: whether the value is replaced by its win rate inside the group.
    """

    label: str
    base: str
    weight: float
    reward: Any
    value: str
    clip: tuple[float, float] | None = None
    gate: Gate | None = None
    win_rate: bool = False

    @property
    def group_wise(self) -> bool:
        """Whether the reward itself can only compare the videos of a group."""
        return is_group_wise(type(self.reward))


def is_group_wise(cls: type) -> bool:
    """Whether a reward class compares videos (`features`, `compare`) instead of scoring each."""
    return callable(getattr(cls, "compare", None))


class TermBuilder:
    """Makes terms; rewards with equal name and options are one instance, with one model.

    Attributes:
        rewards: all instances that were made.
    """

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}
        self._seen: dict[str, int] = {}

    @property
    def rewards(self) -> list[Any]:
        """All instances that were made, in the order of their first use."""
        return list(self._built.values())

    def term(self, position: int, table: Any) -> Term:
        """The term of one table.

        Args:
            position: its number, from 1, for messages.
            table: the table.

        Raises:
            FlashGRPOError: an unknown reward, option or part, or a bad value.
        """
        where = f"reward term {position}"
        if not isinstance(table, dict):
            raise FlashGRPOError(f"{where} is {table!r}: it must be a table with a name")
        name = table.get("name")
        options = {key: value for key, value in table.items() if key not in TERM_KEYS}
        reward = self._build(where, name, options)
        where = f"{where} ({name})"
        weight = _number(f"{where}: weight", table.get("weight", 1.0))
        clip = gate = None
        if table.get("clip") is not None:
            clip = _clip_range(f"{where}: clip", table["clip"])
        if table.get("gate") is not None:
            gate = self._gate(f"{where}: gate", table["gate"])
        value = _value(where, reward, table.get("part"))
        group = table.get("group")
        if group is not None and group not in COMPARISONS:
            raise FlashGRPOError(f"{where}: group = {group!r} must be {' or '.join(COMPARISONS)}")
        if is_group_wise(type(reward)) and (group or table.get("part")):
            raise FlashGRPOError(
                f"{where}: {name!r} already compares the videos of a group: leave out "
                f"{'group' if group else 'part'}"
            )
        self._seen[value] = self._seen.get(value, 0) + 1
        base = value if self._seen[value] == 1 else f"{value}#{self._seen[value]}"
        label = f"{base}.win_rate" if group else base
        return Term(label, base, weight, reward, value, clip, gate, bool(group))

    def _gate(self, where: str, table: Any) -> Gate:
        if not isinstance(table, dict):
            raise FlashGRPOError(f"{where} = {table!r} must be a table: name, and above or below")
        if "above" not in table and "below" not in table:
            raise FlashGRPOError(f"{where} needs a threshold: add above = 0.5 or below = 0.5")
        options = {key: value for key, value in table.items() if key not in GATE_KEYS}
        reward = self._build(where, table.get("name"), options)
        if is_group_wise(type(reward)):
            raise FlashGRPOError(
                f"{where}: {table['name']!r} compares the videos of a group and cannot be a gate: "
                "gate with a reward that scores each video"
            )
        return Gate(
            reward=reward,
            value=_value(where, reward, table.get("part")),
            above=_number(f"{where}.above", table["above"]) if "above" in table else -math.inf,
            below=_number(f"{where}.below", table["below"]) if "below" in table else math.inf,
            otherwise=_number(f"{where}.otherwise", table.get("otherwise", 0.0)),
        )

    def _build(self, where: str, name: Any, options: dict[str, Any]) -> Any:
        cls = reward_class(where, name)
        key = repr((name, sorted(options.items(), key=lambda item: item[0])))
        if key not in self._built:
            check_options(where, name, cls, options)
            self._built[key] = cls(**options)
        return self._built[key]


def reward_class(where: str, name: Any) -> type:
    """The class of a reward by its name: one of ours, or of an installed package.

    Raises:
        FlashGRPOError: it is unknown, or its package cannot be loaded.
    """
    from . import REWARDS  # the dict lives in the package, which imports this module

    if isinstance(name, str):
        if name in REWARDS:
            return REWARDS[name]
        others: Mapping[str, Any] = installed_rewards()
        if name in others:
            return others[name].load()
    else:
        others = installed_rewards()
    names = [*REWARDS, *others]
    match = difflib.get_close_matches(str(name), sorted(names), n=1)
    hint = f"did you mean {match[0]!r}?" if match else f"known are {', '.join(names)}"
    raise FlashGRPOError(f"{where}: unknown reward {name!r}: {hint}")


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


def _value(where: str, reward: Any, part: Any) -> str:
    if part is None:
        return str(reward.name)
    if not isinstance(part, str) or not part:
        raise FlashGRPOError(f"{where}: part = {part!r} must be the name of a part")
    # Which parts there are is known for certain only when a video was scored; a class that says
    # so lets a typing error be found before training.
    known = getattr(type(reward), "parts", None)
    if known is not None and part not in known:
        raise FlashGRPOError(
            f"{where}: {reward.name!r} has no part {part!r}: choose one of {', '.join(known)}"
        )
    return f"{reward.name}.{part}"


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
