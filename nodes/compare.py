"""Compare: the same noise before and after training, side by side in one video."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from comfy_api.latest import InputImpl, io, ui

from ..flashgrpo_core.build import (
    Networks,
    build_eval_reward,
    build_prompts,
    build_schedule,
    latent_layout,
    rollout_settings,
    start_images,
)
from ..flashgrpo_core.conditioning import find_image
from ..flashgrpo_core.config import Config
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.groups import prompt_key
from ..flashgrpo_core.ode import OdeJob, sample_all_ode
from ..flashgrpo_core.policy import policy_weights
from ..flashgrpo_core.prompts import Prompt
from ..flashgrpo_core.rewards.mix import RewardMix
from ..flashgrpo_core.scoring import score_latents
from ..flashgrpo_core.seeds import derive_seed
from ..flashgrpo_core.video import side_by_side, write_mp4
from ..flashgrpo_core.wan.lora import read_lora
from . import host, pool
from .embeddings import Embeddings, cache_folder, embed
from .lora_files import newest_lora_files
from .progress import HostControl
from .settings import files_of, load_policy, merge, run_config, run_folder
from .values import (
    FrozenLoras,
    FrozenLorasType,
    Policy,
    PolicyType,
    Prompts,
    PromptsType,
    Reward,
    RewardType,
    Run,
    RunType,
    Tables,
    VideoSettings,
    VideoSettingsType,
)
from .widgets import CATEGORY, seed


class Compare(host.ComfyNode):
    """One video: the starting policy on the left, the trained one on the right."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOCompare",
            display_name="Compare",
            category=CATEGORY,
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            description="Samples held-out prompts from the same noise before and after training and "
            "puts them side by side in one video, with their rewards.",
            inputs=[
                io.MultiType.Input(
                    "trained",
                    types=[PolicyType, RunType],
                    tooltip="A policy, or a run (its exported LoRA is shown).",
                ),
                PromptsType.Input("prompts", tooltip="Test prompts are taken first."),
                VideoSettingsType.Input("video_settings", tooltip="Size and sampling."),
                io.Int.Input(
                    "prompt_count",
                    default=3,
                    min=1,
                    max=64,
                    tooltip="How many prompts are shown, 1 to 64.",
                ),
                io.Int.Input(
                    "seeds_per_prompt",
                    default=1,
                    min=1,
                    max=16,
                    tooltip="How many pairs of videos per prompt, 1 to 16.",
                ),
                seed("First seed of the noise, 0 to 2^53 - 1; the same on both sides."),
                RewardType.Input(
                    "reward",
                    optional=True,
                    tooltip="Reward shown above the videos; without it the run's own.",
                ),
                FrozenLorasType.Input(
                    "speed_loras",
                    optional=True,
                    tooltip="LoRAs that are on in both videos, for example a speed LoRA; set steps "
                    "and guidance in the video settings to match.",
                ),
            ],
            outputs=[io.Video.Output(display_name="video")],
        )

    @classmethod
    def execute(
        cls,
        trained: Policy | Run,
        prompts: Prompts,
        video_settings: VideoSettings,
        prompt_count: int,
        seeds_per_prompt: int,
        seed: int,
        reward: Reward | None = None,
        speed_loras: FrozenLoras | None = None,
    ) -> io.NodeOutput:
        """Sample both, score both, write one file."""
        name = trained.name if isinstance(trained, Run) else trained.run
        folder = run_folder(name)
        stored = folder.config() if folder.exists() else None
        policy = trained if isinstance(trained, Policy) else _policy_of(name)
        if speed_loras is not None:
            loras = FrozenLoras((*policy.files.frozen.loras, *speed_loras.loras))
            files = dataclasses.replace(policy.files, frozen=loras)
            policy = dataclasses.replace(policy, files=files)
        config = run_config(
            policy.files,
            prompts,
            merge(video_settings.tables, _reward_tables(reward, stored)),
            {"run": {"name": name, "seed": stored.run.seed if stored else 0}},
        )
        split = build_prompts(config)
        shown = [*split.test, *split.validation, *split.train][:prompt_count]
        control = pool.control()
        guided = rollout_settings(config).guided
        texts = {p.text for p in shown} | ({prompts.negative} if guided else set())
        context = embed(prompts, policy.files, texts, control)
        networks = pool.policy_networks(policy, config.run.seed, **pool.options(config))
        if isinstance(trained, Run):
            _load_loras(networks, name)
        sampled = _Comparison(config, networks, context, control, shown, seeds_per_prompt, seed)
        path = _free_file(name)
        write_mp4(path, sampled.video(build_eval_reward(config)), config.rollout.fps)
        shown_in_ui = ui.PreviewVideo([host.saved_result(path)])
        return io.NodeOutput(InputImpl.VideoFromFile(str(path)), ui=shown_in_ui)


def _policy_of(name: str) -> Policy:
    folder = run_folder(name)
    if not folder.exists():
        raise FlashGRPOError(f"run {name!r} is no longer on disk: train it again")
    return load_policy(files_of(folder.config()), name)


def _load_loras(networks: Networks, name: str) -> None:
    files = newest_lora_files(run_folder(name))
    if not files:
        raise FlashGRPOError(f"run {name!r} has exported no LoRA yet: let it train further")
    for expert, path in files.items():
        policy = networks.policy.experts[expert]
        policy.load(policy_weights(policy, read_lora(path)))


def _reward_tables(reward: Reward | None, stored: Config | None) -> Tables:
    if reward is not None:
        return {"reward": {"terms": [dict(term) for term in reward.terms]}}
    if stored is not None:
        return {"reward": {"terms": stored.eval.terms or stored.reward.terms}}
    return {}


class _Comparison:
    """Latents of both policies, then their videos: each network is needed once."""

    def __init__(
        self,
        config: Config,
        networks: Networks,
        context: Embeddings,
        control: HostControl,
        shown: Sequence[Prompt],
        seeds: int,
        first_seed: int,
    ) -> None:
        self._config, self._networks, self._control = config, networks, control
        self._shown = shown
        schedule = build_schedule(config)
        settings = rollout_settings(config, *latent_layout(networks))
        negative = context[config.prompts.negative] if settings.guided else None
        images = start_images(config, networks, shown, cache_folder(), control)
        control.phase("rollout", 2 * len(shown) * seeds)

        def sample() -> list[torch.Tensor]:
            jobs = [
                OdeJob(
                    [
                        derive_seed(first_seed, prompt_key(p.text), i, "compare")
                        for i in range(seeds)
                    ],
                    context[p.text],
                    find_image(images, p.image),
                )
                for p in shown
            ]
            return sample_all_ode(networks.policy, jobs, schedule, settings, negative, control)

        with networks.policy.reference():
            before = sample()
        self._latents = list(zip(before, sample(), strict=True))

    def video(self, reward: RewardMix) -> np.ndarray:
        """All pairs one after the other, uint8 `[T, H, W, 3]`."""
        self._control.bring(self._networks.vae)
        pairs = sum(len(before) for before, _ in self._latents)
        self._control.phase("score", 2 * pairs)
        clips = []
        for prompt, (before, after) in zip(self._shown, self._latents, strict=True):
            left, right = self._score(prompt, before, reward), self._score(prompt, after, reward)
            for (old, old_reward), (new, new_reward) in zip(left, right, strict=True):
                labels = (f"before {old_reward:.3f}", f"after {new_reward:.3f}: {prompt.text}")
                clips.append(side_by_side(old, new, labels))
        return np.concatenate(clips)

    def _score(
        self, prompt: Prompt, latents: torch.Tensor, reward: RewardMix
    ) -> list[tuple[np.ndarray, float]]:
        """Video and total reward of each latent."""
        videos: dict[int, np.ndarray] = {}
        measured = score_latents(
            self._networks.vae,
            latents,
            [prompt.text] * len(latents),
            [prompt_key(prompt.text)] * len(latents),
            reward,
            self._config.rollout.fps,
            self._config.rollout.decode_batch,
            self._control,
            videos.__setitem__,
        )
        total = reward.compare(measured, [0] * len(latents)).total
        self._control.preview(videos[0], prompt.text)
        return [(videos[i], float(total[i])) for i in range(len(latents))]


def _free_file(run: str) -> Path:
    folder = host.inside_output(host.output_folder() / "flashgrpo" / "compare")
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while (folder / f"{run}_{number:04d}.mp4").exists():
        number += 1
    return folder / f"{run}_{number:04d}.mp4"
