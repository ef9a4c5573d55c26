"""Group: which prompts an iteration samples, and where each one is stochastic."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..flashgrpo_core.build import build_prompts, build_schedule
from ..flashgrpo_core.trainer import iteration_groups
from . import host, pictures
from .pictures import to_image
from .settings import merge, run_config, window
from .values import (
    Groups,
    GroupsType,
    Policy,
    PolicyType,
    Prompts,
    PromptsType,
    VideoSettings,
    VideoSettingsType,
)
from .widgets import CATEGORY, advanced, seed, setting


class IsoTemporalGroups(host.ComfyNode):
    """The groups of the policy's next iteration."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOGroups",
            display_name="Iso-Temporal Groups",
            category=CATEGORY,
            description="Chooses the prompts of the next iteration and gives each one noise level "
            "(sigma) at which all its videos get their noise.",
            inputs=[
                PolicyType.Input("policy", tooltip="The policy whose next iteration this is."),
                PromptsType.Input("prompts", tooltip="Prompts to choose from."),
                VideoSettingsType.Input("video_settings", tooltip="Size and sampling."),
                setting("rollout", "group_size"),
                setting("rollout", "prompts_per_iteration"),
                setting("rollout", "noise"),
                io.Int.Input(
                    "window_first",
                    default=0,
                    min=0,
                    max=999,
                    tooltip="First sampling step that may be stochastic, 0 to steps - 2.",
                ),
                io.Int.Input(
                    "window_end",
                    default=0,
                    min=0,
                    max=999,
                    tooltip="Step behind the last one that may be stochastic; 0 = the first half of "
                    "the steps. The last step is never stochastic.",
                ),
                seed(
                    "Seed of all noise and of the order of the prompts, 0 to 2^53 - 1. Keep it "
                    "through a run."
                ),
                advanced(setting("schedule", "draw")),
                advanced(setting("schedule", "sde")),
                advanced(setting("schedule", "eta", step=0.05)),
                advanced(setting("schedule", "kind", name="schedule")),
            ],
            outputs=[
                GroupsType.Output(display_name="groups"),
                io.Image.Output(display_name="picture"),
            ],
        )

    @classmethod
    def execute(
        cls,
        policy: Policy,
        prompts: Prompts,
        video_settings: VideoSettings,
        group_size: int,
        prompts_per_iteration: int,
        noise: str,
        window_first: int,
        window_end: int,
        seed: int,
        draw: str,
        sde: str,
        eta: float,
        schedule: str,
    ) -> io.NodeOutput:
        """Choose prompts and noise levels."""
        steps = video_settings.tables["schedule"]["steps"]
        tables = merge(
            video_settings.tables,
            {
                "rollout": {
                    "group_size": group_size,
                    "prompts_per_iteration": prompts_per_iteration,
                    "noise": noise,
                },
                "schedule": {
                    "window": window(window_first, window_end, steps),
                    "draw": draw,
                    "sde": sde,
                    "eta": eta,
                    "kind": schedule,
                },
                "run": {"seed": seed},
            },
        )
        config = run_config(policy.files, prompts, tables)
        iteration = policy.iteration + 1
        picked = iteration_groups(config, build_prompts(config), iteration)
        sigmas = build_schedule(config).sigmas
        title = f"{policy.run}: iteration {iteration}, one noise level per prompt"
        picture = to_image(pictures.groups(picked, [float(s) for s in sigmas], title))
        value = Groups(
            policy.run, iteration, policy.digest, policy.files, tuple(picked), prompts, tables
        )
        return io.NodeOutput(value, picture, ui=ui.PreviewImage(picture))
