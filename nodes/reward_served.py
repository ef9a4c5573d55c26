"""Rewards of servers that the user has listed: reward servers, and language models as judges.

There is no network code here, and the nodes take no address: a server is chosen by its name in
`flashgrpo_servers.json` in ComfyUI's user folder. Versions of the pack without the network code
(the registry's) keep the nodes, so that saved workflows load, and say what is missing when one runs.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.rewards import REWARDS
from ..flashgrpo_core.rewards.servers import FILE_NAME, server_names, use_file
from . import host
from . import reward_terms as terms
from .widgets import advanced

#: The only choice while the file names no server, and in a version without network code.
NOTHING = f"none: write user/{FILE_NAME}"
NO_NETWORK = "none: the registry's version has no network code. Install the pack with git clone"

use_file(host.user_file(FILE_NAME))


def _schema(title: str, description: str, kind: str, *options: Any, node_id: str) -> io.Schema:
    listed = server_names(kind) if "served" in REWARDS else [NO_NETWORK]
    server = io.Combo.Input(
        "server",
        options=listed or [NOTHING],
        tooltip=f"Name of the server in the file {FILE_NAME} in ComfyUI's user folder; after a "
        "change of the file press R.",
    )
    return io.Schema(
        node_id=node_id, **terms.frame(title, description, terms.weight(), server, *options)
    )


def _timeout() -> Any:
    return advanced(
        io.Float.Input(
            "timeout",
            default=300.0,
            min=1.0,
            max=86400.0,
            step=10.0,
            round=False,
            tooltip="Seconds without an answer after which a request has failed, 1 to 86400. It is "
            "tried again a few times; then the video has no score and is left out.",
        )
    )


def _chain(name: str, inputs: dict[str, Any]) -> io.NodeOutput:
    """A term behind the previous ones, once there is a server to ask."""
    if name not in REWARDS:
        raise FlashGRPOError(
            "this version of the pack has no network code, so it cannot ask servers: install the "
            "pack from its repository with git clone instead of the registry"
        )
    if inputs["server"] == NOTHING:
        raise FlashGRPOError(
            f"no server is listed: write {str(host.user_file(FILE_NAME))!r} with one line per "
            "server (see the help of this node), then press R and choose it"
        )
    return terms.chain(name, inputs)


class RewardServed(host.ComfyNode):
    """Reward: what a reward server says."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return _schema(
            "Reward: Served",
            "Asks a reward server for the scores: any reward, in its own environment or on another "
            "machine. A video that cannot be scored is left out of its group.",
            "reward",
            io.String.Input(
                "reward",
                default="",
                tooltip="Which reward of the server; empty when it serves only one.",
            ),
            advanced(
                io.Combo.Input(
                    "encoding",
                    options=["safetensors", "mp4"],
                    default="safetensors",
                    tooltip="How videos are sent: safetensors is exact, mp4 about a fiftieth of "
                    "the size for slow networks.",
                )
            ),
            _timeout(),
            node_id="FlashGRPORewardServed",
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("served", inputs)


class RewardJudge(host.ComfyNode):
    """Reward: the marks of a vision language model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return _schema(
            "Reward: Judge",
            "Shows frames of each video to a vision language model on a server of yours and takes "
            "its marks. Can be cheated by text in the picture that flatters the judge.",
            "judge",
            io.Combo.Input(
                "rubric",
                options=["points", "unified", "yes_no"],
                default="points",
                tooltip="points = one mark from 1 to 5; unified = the mean of alignment, physics "
                "and style, 1 to 5; yes_no = the probability of yes, 0 to 1.",
            ),
            io.String.Input(
                "question",
                default="",
                multiline=True,
                tooltip="What to judge, in your words, with {prompt} where the prompt belongs; "
                "empty = the rubric's own question.",
            ),
            io.Int.Input(
                "frames",
                default=8,
                min=1,
                max=64,
                tooltip="Frames that the judge sees, evenly spaced, 1 to 64.",
            ),
            _timeout(),
            node_id="FlashGRPORewardJudge",
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("judge", inputs)


#: Nodes of served rewards.
SERVED_NODES: tuple[type[host.ComfyNode], ...] = (RewardServed, RewardJudge)
