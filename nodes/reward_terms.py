"""What the nodes of rewards have in common: the frame of their schemas, common widgets, the chain."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..flashgrpo_core.rewards import REWARDS
from ..flashgrpo_core.rewards.mix import RewardMix
from ..flashgrpo_core.rewards.options import AGGREGATES
from .values import Reward, RewardType
from .widgets import CATEGORY, advanced

#: Choice of a reward's total instead of one of its parts.
TOTAL = "total"


def about(name: str, *options: Any, added: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The rest of a schema: weight, the reward's own options, and the chain.

    Args:
        name: name of the reward.
        *options: widgets of its options.
        added: widgets of options that came later; optional, for graphs that were saved before.
    """
    reward: Any = REWARDS[name]
    return frame(
        f"Reward: {reward.title}",
        f"{reward.description} {reward.range}; {reward.direction}. Can be cheated by: "
        f"{reward.hackable_by}.",
        weight(),
        *options,
        added=added,
    )


def frame(
    title: str,
    description: str,
    *inputs: Any,
    previous: str = "Further rewards: a chain is a weighted mix.",
    added: tuple[Any, ...] = (),
) -> dict[str, Any]:
    """What the schemas of all reward nodes have in common.

    Args:
        title: name of the node.
        description: what it rewards.
        *inputs: its inputs.
        previous: tooltip of the input for the chain.
        added: inputs that came later; optional, for graphs that were saved before.
    """
    chain_input = RewardType.Input("previous", optional=True, tooltip=previous)
    return {
        "display_name": title,
        "category": f"{CATEGORY}/rewards",
        "description": description,
        "inputs": [*inputs, chain_input, *added],
        "outputs": [RewardType.Output(display_name="reward")],
    }


def weight() -> Any:
    """The widget of a term's weight."""
    return io.Float.Input(
        "weight",
        default=1.0,
        min=-100.0,
        max=100.0,
        step=0.05,
        round=False,
        tooltip="Weight in the mix, -100 to 100; negative punishes. Terms are standardised before "
        "they are weighted, so 1 and 1 count equally.",
    )


def chain(name: str, inputs: dict[str, Any]) -> io.NodeOutput:
    """A term of a reward, with a node's inputs as its options, behind the previous ones."""
    previous = inputs.pop("previous", None)
    if inputs.get("part") == TOTAL:
        del inputs["part"]
    return behind(previous, {"name": name, **inputs})


def behind(previous: Reward | None, *terms: dict[str, Any]) -> io.NodeOutput:
    """Terms behind the previous ones; built here, so that a bad option fails on its own node."""
    whole = (*(previous.terms if previous else ()), *terms)
    RewardMix([dict(term) for term in whole])
    return io.NodeOutput(Reward(whole))


def number(
    name: str, default: float, low: float, high: float, tip: str, optional: bool = False
) -> Any:
    """A number among a reward's options."""
    return io.Float.Input(
        name,
        optional=optional,
        default=default,
        min=low,
        max=high,
        step=0.05,
        round=False,
        tooltip=f"{tip} Range {low:g} to {high:g}.",
    )


def short_side(default: int, low: int, high: int) -> Any:
    """The size that frames are scaled down to."""
    return advanced(
        io.Int.Input(
            "short_side",
            default=default,
            min=low,
            max=high,
            tooltip=f"Larger frames are scaled down to this short side first, {low} to {high} "
            "pixels: smaller is faster.",
        )
    )


def frames() -> Any:
    """How the scores of frames become that of the video."""
    return advanced(
        io.Combo.Input(
            "frames",
            options=list(AGGREGATES),
            default="mean",
            tooltip="How the scores of the frames become that of the video; top30 and bottom30 are "
            "the means of the best and the worst 30 percent, q25 is the quantile at 25 percent.",
        )
    )


def every(default: int = 1) -> Any:
    """Use every n-th frame."""
    return advanced(
        io.Int.Input(
            "every",
            optional=True,
            default=default,
            min=1,
            max=1024,
            tooltip="Use every n-th frame, the first one always, 1 to 1024: larger is faster.",
        )
    )


def part(name: str) -> Any:
    """The total of a reward, or one of its parts."""
    reward: Any = REWARDS[name]
    return advanced(
        io.Combo.Input(
            "part",
            optional=True,
            options=[TOTAL, *reward.parts],
            default=TOTAL,
            tooltip="What counts: the reward's total, or one of its parts alone. Chain the node "
            "twice for two parts with weights of their own.",
        )
    )
