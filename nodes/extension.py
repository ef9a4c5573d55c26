"""The extension object that ComfyUI asks for the pack's nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import routes
from .compare import Compare
from .groups import IsoTemporalGroups
from .plan import Plan
from .policy import FrozenLora, LoadPolicy, VideoSettingsNode
from .prompts import EncodePrompt, PromptsNode
from .reward_compose import COMPOSE_NODES
from .reward_models import REWARD_MODEL_NODES
from .reward_served import SERVED_NODES
from .rewards import REWARD_NODES
from .rollout import RolloutNode
from .runs import LoadRun, SaveLora
from .score import ScoreRollouts
from .score_videos import ScoreVideos
from .step import TrainStep
from .train import Train, TrainAdvanced


class FlashGRPOExtension(ComfyExtension):
    """Lists the nodes of the pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the node classes in the order in which menus show them."""
        return [
            LoadPolicy,
            FrozenLora,
            VideoSettingsNode,
            PromptsNode,
            EncodePrompt,
            *REWARD_NODES,
            *REWARD_MODEL_NODES,
            *SERVED_NODES,
            *COMPOSE_NODES,
            Train,
            TrainAdvanced,
            Compare,
            ScoreVideos,
            SaveLora,
            LoadRun,
            IsoTemporalGroups,
            RolloutNode,
            ScoreRollouts,
            TrainStep,
            Plan,
        ]


async def comfy_entrypoint() -> ComfyExtension:
    """Return the extension; ComfyUI calls this once at start-up."""
    routes.register()
    return FlashGRPOExtension()
