"""Score: what the videos are worth, and how each compares with the others of its prompt."""

from __future__ import annotations

import numpy as np
from comfy_api.latest import io, ui

from ..flashgrpo_core.advantage import check_masked, compute_advantages
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.rewards.mix import RewardMix
from ..flashgrpo_core.scoring import score_rollouts
from . import host, pictures, pool
from .pictures import to_image
from .settings import run_config
from .values import Reward, RewardType, Rollouts, RolloutsType, Scored, ScoredType
from .widgets import CATEGORY, advanced, setting


class ScoreRollouts(host.ComfyNode):
    """Scores rollouts and compares the videos of each prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOScore",
            display_name="Score Rollouts",
            category=CATEGORY,
            description="Scores every video and compares it with the others of its prompt: the "
            "advantage. Stops with advice when all videos of every prompt score the same.",
            inputs=[
                RolloutsType.Input("rollouts", tooltip="The sampled groups."),
                RewardType.Input("reward", tooltip="The reward, or a chain of rewards."),
                advanced(setting("loss", "advantage_std")),
                advanced(setting("loss", "advantage_clamp", step=0.5)),
                advanced(setting("reward", "normalise")),
                advanced(setting("reward", "on_nan")),
            ],
            outputs=[
                ScoredType.Output(display_name="scored"),
                io.Image.Output(display_name="picture"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        rollouts: Rollouts,
        reward: Reward,
        advantage_std: str,
        advantage_clamp: float,
        normalise: bool,
        on_nan: str,
    ) -> io.NodeOutput:
        """Decode, score and compare."""
        source = rollouts.source
        config = run_config(source.files, source.prompts, source.tables)
        control = pool.control()
        networks = pool.networks(source.files, **pool.options(config))
        frames: dict[tuple[str, int], np.ndarray] = {}

        def keep(prompt: str, group_id: str, sample: int, video: np.ndarray) -> None:
            frames[group_id, sample] = video[len(video) // 2][None].copy()

        control.bring(networks.vae)
        control.phase("score", sum(len(r.samples) for r in rollouts.rollouts), source.iteration)
        mix = RewardMix([dict(term) for term in reward.terms], on_nan)
        scores = score_rollouts(
            networks.vae,
            source.groups,
            rollouts.rollouts,
            mix,
            fps=config.rollout.fps,
            decode_batch=config.rollout.decode_batch,
            control=control,
            keep=keep,
        )
        check_masked(scores.valid)
        pool.keep_rewards(mix)
        advantages = compute_advantages(
            scores.terms,
            scores.weights,
            scores.valid,
            std=advantage_std,
            clamp=advantage_clamp,
            normalise=normalise,
        )
        if advantages.no_signal:
            raise FlashGRPOError(
                "no signal: all videos of every prompt got the same reward, there is nothing to "
                "learn from; raise group_size, use a finer reward, or choose prompts that are not "
                "solved (or hopeless) yet"
            )
        tables = {
            "reward": {"normalise": normalise, "on_nan": on_nan},
            "loss": {"advantage_std": advantage_std, "advantage_clamp": advantage_clamp},
        }
        picture = to_image(pictures.scored_sheet(source.groups, frames, scores, advantages))
        value = Scored(rollouts, scores, advantages, reward.terms, tables)
        return io.NodeOutput(value, picture, ui=ui.PreviewImage(picture))
