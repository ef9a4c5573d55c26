"""Nodes that shape rewards of a chain: gate, limits, win rate; diversity; rewards of packages."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.rewards.installed import installed_rewards
from ..flashgrpo_core.rewards.terms import GATE_KEYS
from . import host
from . import reward_terms as terms
from .values import Reward, RewardType

#: The only choice when no installed package offers a reward.
NOTHING = "none installed"
_PREVIOUS = "Further rewards, which stay as they are: a chain is a weighted mix."


@functools.cache
def _installed_names() -> list[str]:
    """Looking through all installed packages takes a moment, and they change only at a restart."""
    return [*installed_rewards()] or [NOTHING]


def _shape(reward: Reward, previous: Reward | None, **keys: Any) -> io.NodeOutput:
    """The terms of `reward`, each with more keys, behind the previous ones."""
    shaped = []
    for term in reward.terms:
        taken = [key for key in keys if term.get(key) is not None]
        if taken:
            raise FlashGRPOError(
                f"reward {term['name']!r} has a {taken[0].replace('group', 'win rate')} already: "
                "use one such node per reward"
            )
        shaped.append({**term, **keys})
    return terms.behind(previous, *shaped)


def _schema(title: str, description: str, *inputs: Any, node_id: str) -> io.Schema:
    return io.Schema(
        node_id=node_id, **terms.frame(title, description, *inputs, previous=_PREVIOUS)
    )


class RewardGate(host.ComfyNode):
    """Counts a reward only where another one passes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return _schema(
            "Reward: Gate",
            "Counts rewards only for videos that pass another reward; the others get a fixed value. "
            "Against rewards that broken videos can have.",
            RewardType.Input("reward", tooltip="The rewards that are counted behind the gate."),
            RewardType.Input("gate", tooltip="The reward that decides; a single one."),
            io.Combo.Input(
                "passes",
                options=["above", "below"],
                default="above",
                tooltip="Whether a video passes with a gate reward above or below the threshold.",
            ),
            terms.number("threshold", 0.5, -1000.0, 1000.0, "Where the gate opens."),
            terms.number(
                "otherwise", 0.0, -1000.0, 1000.0, "Value of the videos that do not pass."
            ),
            node_id="FlashGRPORewardGate",
        )

    @classmethod
    def execute(
        cls,
        reward: Reward,
        gate: Reward,
        passes: str,
        threshold: float,
        otherwise: float,
        previous: Reward | None = None,
    ) -> io.NodeOutput:
        """Put the gate before the rewards."""
        return _shape(
            reward, previous, gate={**_gate(gate), passes: threshold, "otherwise": otherwise}
        )


def _gate(gate: Reward) -> dict[str, Any]:
    """The table of a gating reward."""
    if len(gate.terms) != 1:
        raise FlashGRPOError(
            f"the gate is a chain of {len(gate.terms)} rewards: link a single one, without previous"
        )
    term = dict(gate.terms[0])
    shaped = [key for key in ("clip", "gate", "group") if term.get(key) is not None]
    if shaped:
        raise FlashGRPOError(
            f"the gate reward {term['name']!r} has a {shaped[0]}: link the plain reward"
        )
    term.pop("weight", None)
    options = set(term) & set(GATE_KEYS) - {"name", "part"}
    if options:
        raise FlashGRPOError(
            f"reward {term['name']!r} has an option {options.pop()!r} and cannot be a gate"
        )
    return term


class RewardLimits(host.ComfyNode):
    """Limits the value of a reward."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return _schema(
            "Reward: Limits",
            "Limits the value of rewards, so that nothing is gained beyond it. Against rewards that "
            "can be driven without end.",
            RewardType.Input("reward", tooltip="The rewards that are limited."),
            terms.number("low", 0.0, -1000.0, 1000.0, "Lower values count as this one."),
            terms.number("high", 1.0, -1000.0, 1000.0, "Higher values count as this one."),
            node_id="FlashGRPORewardLimits",
        )

    @classmethod
    def execute(
        cls, reward: Reward, low: float, high: float, previous: Reward | None = None
    ) -> io.NodeOutput:
        """Limit the rewards."""
        return _shape(reward, previous, clip=[low, high])


class RewardWinRate(host.ComfyNode):
    """Replaces a reward by its win rate inside the group."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return _schema(
            "Reward: Win rate",
            "Replaces a reward by the share of the other videos of the prompt that a video beats. "
            "Only the order counts: a single extreme score decides nothing.",
            RewardType.Input("reward", tooltip="The rewards that are compared, each on its own."),
            node_id="FlashGRPORewardWinRate",
        )

    @classmethod
    def execute(cls, reward: Reward, previous: Reward | None = None) -> io.NodeOutput:
        """Compare inside the groups."""
        return _shape(reward, previous, group="win_rate")


class RewardDiversity(host.ComfyNode):
    """Reward: videos that differ from each other."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardDiversity",
            **terms.about(
                "diversity",
                terms.number(
                    "scale",
                    0.1,
                    0.001,
                    10.0,
                    "Distance of two videos that counts 0.63; smaller values see finer differences.",
                ),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("diversity", inputs)


class RewardInstalled(host.ComfyNode):
    """Reward of a Python package that the user has installed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return _schema(
            "Reward: Installed",
            "A reward of your own: a class in a Python package that you have installed into "
            "ComfyUI's Python. docs/rewards.md shows one in 20 lines.",
            terms.number("weight", 1.0, -100.0, 100.0, "Weight in the mix; negative punishes."),
            io.Combo.Input(
                "name",
                options=_installed_names(),
                tooltip="Rewards that installed packages offer (entry points of the group "
                "flashgrpo.rewards), read when ComfyUI starts.",
            ),
            io.String.Input(
                "options",
                multiline=True,
                default="",
                placeholder="scale = 2.0",
                tooltip="Options of the reward, one a line: name = value, text in quotes (TOML).",
            ),
            node_id="FlashGRPORewardInstalled",
        )

    @classmethod
    def execute(
        cls, weight: float, name: str, options: str, previous: Reward | None = None
    ) -> io.NodeOutput:
        """Add the term."""
        if name == NOTHING:
            raise FlashGRPOError(
                "no installed package offers a reward: install one into ComfyUI's Python and "
                "restart; docs/rewards.md shows how to write one"
            )
        term = {**_options(options), "name": name, "weight": weight}
        return terms.chain(
            name, {k: v for k, v in term.items() if k != "name"} | {"previous": previous}
        )


def _options(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise FlashGRPOError(
            f"options {text[:80]!r} are not 'name = value' lines: {exc}; put text in quotes"
        ) from None


#: The nodes of this module.
COMPOSE_NODES: tuple[type[host.ComfyNode], ...] = (
    RewardDiversity,
    RewardInstalled,
    RewardGate,
    RewardLimits,
    RewardWinRate,
)
