"""Rollout: sample the videos of the groups with the policy."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
from comfy_api.latest import InputImpl, io, ui

from ..flashgrpo_core.build import (
    Networks,
    build_schedule,
    latent_layout,
    rollout_settings,
    start_images,
)
from ..flashgrpo_core.config import Config
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.forwards import rollout_forwards
from ..flashgrpo_core.prompts import Prompt
from ..flashgrpo_core.rollout import Rollout, RolloutSampler, sample_shares
from ..flashgrpo_core.video import write_mp4
from ..flashgrpo_core.wan.decode import decode_latents
from . import host, pictures, pool
from .embeddings import cache_folder, embed
from .pictures import to_image
from .progress import HostControl
from .settings import run_config
from .values import Groups, GroupsType, Policy, PolicyType, Rollouts, RolloutsType
from .widgets import CATEGORY


class RolloutNode(host.ComfyNode):
    """Samples all videos of the groups."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORollout",
            display_name="Rollout Sampler",
            category=CATEGORY,
            description="Samples every video of the groups: deterministic except for the one step "
            "whose noise the training learns from.",
            inputs=[
                PolicyType.Input("policy", tooltip="The policy that the groups were made for."),
                GroupsType.Input("groups", tooltip="The groups of this iteration."),
            ],
            outputs=[
                RolloutsType.Output(display_name="rollouts"),
                io.Video.Output(display_name="videos", is_output_list=True),
                io.Image.Output(display_name="contact_sheet"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, policy: Policy, groups: Groups) -> io.NodeOutput:
        """Sample, then decode."""
        if not groups.of(policy):
            raise FlashGRPOError(
                f"the groups were made for run {groups.run!r} at iteration {groups.iteration - 1}, "
                f"the policy is run {policy.run!r} at {policy.iteration}: connect both to the same "
                "policy"
            )
        config = run_config(groups.files, groups.prompts, groups.tables)
        control = pool.control()
        sampler, networks = _sampler(policy, groups, config, control)
        picked, settings = groups.groups, sampler.settings
        shares = sample_shares(picked, settings.micro_batch)
        control.phase("rollout", sum(len(samples) for _, samples in shares), groups.iteration)
        rollouts = tuple(sampler.sample_all(picked, shares))
        sampler.forget()
        control.bring(networks.vae)
        files, frames, captions = _decode(groups, rollouts, sampler, networks, config, control)
        columns = max(group.size for group in picked)
        picture = to_image(pictures.rollout_sheet(frames, captions, columns))
        value = Rollouts(
            groups,
            rollouts,
            tuple(files),
            rollout_forwards(picked, sampler.schedule, settings, sampler.stages),
        )
        videos = [InputImpl.VideoFromFile(str(file)) for file in files]
        return io.NodeOutput(value, videos, picture, ui=ui.PreviewImage(picture))


def _sampler(
    policy: Policy, groups: Groups, config: Config, control: HostControl
) -> tuple[RolloutSampler, Networks]:
    """The sampler of the groups' settings, with the policy's weights in place."""
    guided = rollout_settings(config).guided
    texts = {group.prompt for group in groups.groups}
    texts |= {groups.prompts.negative} if guided else set()
    context = embed(groups.prompts, groups.files, texts, control)
    networks = pool.policy_networks(policy, config.run.seed, **pool.options(config))
    prompts = [Prompt(group.prompt, group.start_image) for group in groups.groups]
    sampler = RolloutSampler(
        networks.policy,
        build_schedule(config),
        rollout_settings(config, *latent_layout(networks)),
        context,
        context[groups.prompts.negative] if guided else None,
        control,
        start_images(config, networks, prompts, cache_folder(), control),
    )
    return sampler, networks


def _decode(
    groups: Groups,
    rollouts: tuple[Rollout, ...],
    sampler: RolloutSampler,
    networks: Networks,
    config: Config,
    control: HostControl,
) -> tuple[list[Path], list[np.ndarray], list[str]]:
    """Write every video; keeps one frame of each, uint8 `[1, H, W, 3]`, and a caption."""
    folder = host.temp_folder(groups.run, f"{groups.iteration:06d}-{uuid.uuid4().hex[:8]}")
    row_of = {group.group_id: row for row, group in enumerate(groups.groups)}
    files, frames, captions = [], [], []
    control.phase("decode", sum(len(r.samples) for r in rollouts), groups.iteration)
    for rollout in rollouts:
        row, sigma = row_of[rollout.group.group_id], sampler.schedule.sigmas[rollout.group.sde_step]
        for start in range(0, len(rollout.samples), config.rollout.decode_batch):
            control.check()
            part = rollout.final[start : start + config.rollout.decode_batch]
            for i, video in enumerate(decode_latents(networks.vae, part), start):  # [T, H, W, 3]
                sample = rollout.samples[i]
                path = folder / f"group{row + 1:02d}_video{sample + 1:02d}.mp4"
                files.append(write_mp4(path, video, config.rollout.fps))
                frames.append(video[len(video) // 2][None])
                captions.append(f"sigma {sigma:.2f}: {rollout.group.prompt}")
                if sample == 0:
                    control.preview(video, rollout.group.prompt)
                control.tick()
    return files, frames, captions
