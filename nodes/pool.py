"""The networks in memory: one transformer with its LoRA, and one VAE, both under ComfyUI's eyes.

Adapter weights never stay here between nodes: each use loads those of the policy at hand, so two
branches of a run cannot disturb each other.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..flashgrpo_core.build import Networks, load_networks
from ..flashgrpo_core.config import Config
from ..flashgrpo_core.config_io import build_config
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.networks import continue_policy
from ..flashgrpo_core.rewards.mix import RewardMix
from ..flashgrpo_core.wan.decode import use_tiles
from ..flashgrpo_core.wan.recompute import checkpoint_blocks
from . import host
from .progress import HostControl
from .values import ModelFiles, Policy

log = logging.getLogger(__name__)


@dataclass
class _Held:
    key: object
    networks: Networks
    patchers: dict[int, Any]


_held: _Held | None = None
#: Networks that belong to no policy, with their patchers: text encoders, which stay only for a
#: moment, and the models of rewards.
_guests: dict[int, tuple[nn.Module, Any]] = {}
#: The rewards that scored last. They hold their models, so that the next scoring need not load them.
_rewards: list[Any] = []
#: Bytes of working memory that the next network needs besides its weights.
_working_memory = 0
_alone = False


def networks(
    files: ModelFiles,
    *,
    checkpointing: bool = False,
    alone: bool = False,
    tokens: int = 0,
    storage: str = "auto",
    blocks_to_swap: int = 0,
    blocks_to_keep: int = 0,
    vae_tile: int = 0,
) -> Networks:
    """The networks of some model files, loaded unless they are the ones in memory.

    Args:
        files: the model files and the shape of the LoRA.
        checkpointing: recompute activations in the backward pass.
        alone: keep only the network of the current phase on the device.
        tokens: latent tokens that go through the transformer together.
        storage: how the weights of the blocks rest.
        blocks_to_swap: number of blocks that rest in host memory.
        blocks_to_keep: with checkpointing, number of blocks that keep their activations.
        vae_tile: side in pixels of the tiles that the VAE decodes one by one; 0 = whole frames.

    Raises:
        FlashGRPOError: a file is missing, broken or of another model family.
    """
    global _held, _working_memory, _alone
    host.running.heavy = True
    key = (files, storage, blocks_to_swap, _stamps(files))
    if _held is None or _held.key != key:
        clear()
        saving = {"storage": storage, "blocks_to_swap": blocks_to_swap}
        config = build_config({"model": files.table() | saving})
        loaded = load_networks(config, host.compute_device(), host.offload_device())
        patchers = {id(n): host.managed(n) for n in (*loaded.transformers, loaded.vae)}
        for patcher in patchers.values():
            size, total = host.sizes(patcher)
            if host.compute_device().type != "cpu" and size > total:
                raise FlashGRPOError(
                    f"the weights need {size / 2**30:.1f} GB, the card has {total / 2**30:.1f} GB: "
                    "set storage to fp8 or blocks_to_swap in Load Wan Policy, or choose a smaller "
                    "model"
                )
        _held = _Held(key, loaded, patchers)
    # One block works on about 24 tensors [tokens, dim] of 16 bit.
    _working_memory, _alone = 48 * tokens * _held.networks.spec.dim, alone
    for transformer in _held.networks.transformers:
        network: Any = transformer
        if checkpointing:
            checkpoint_blocks(network, blocks_to_keep)
        else:
            network.disable_gradient_checkpointing()
    use_tiles(_held.networks.vae, vae_tile)
    return _held.networks


def policy_networks(policy: Policy, seed: int, **options: Any) -> Networks:
    """The networks of a policy, with its LoRA weights and reference policy in place.

    Args:
        policy: the policy.
        seed: seed of the run; decides the LoRA's start.
        **options: see `networks`.
    """
    found = networks(policy.files, **options)
    found.policy.initialise(seed)
    continue_policy(found.policy, build_config({"model": policy.files.table()}))
    if policy.adapter is not None:
        found.policy.load(policy.adapter)
    return found


def options(config: Config) -> dict[str, Any]:
    """How the networks of a run are kept, as `networks` takes it."""
    r = config.rollout
    return {
        "checkpointing": config.model.gradient_checkpointing,
        "alone": config.model.offload,
        "storage": config.model.storage,
        "blocks_to_swap": config.model.blocks_to_swap,
        "blocks_to_keep": config.model.blocks_to_keep,
        "vae_tile": config.model.vae_tile,
        "tokens": (r.width // 16) * (r.height // 16) * ((r.frames - 1) // 4 + 1) * r.micro_batch,
    }


def bring(network: nn.Module) -> None:
    """Make a network resident on the compute device."""
    host.running.heavy = True
    held = _held.patchers if _held is not None else {}
    patcher = held.get(id(network))
    if patcher is None and id(network) in _guests:
        patcher = _guests[id(network)][1]
    if patcher is None:
        patcher = host.managed(network)
        size, total = host.sizes(patcher)
        if host.compute_device().type != "cpu" and size > 0.9 * total:
            log.info("a network is larger than the card and runs on the CPU: this is slow")
            return
        _guests[id(network)] = (network, patcher)
    if _alone:
        for other in (*held.values(), *(guest for _, guest in _guests.values())):
            if other is not patcher:
                host.dismiss(other)
    host.make_resident(patcher, _working_memory)


def control() -> HostControl:
    """A control that shows phases on the running node."""
    return HostControl(bring)


def keep_rewards(mix: RewardMix) -> None:
    """Keep the models of the rewards that have just scored, and let go of earlier ones."""
    _rewards[:] = mix.rewards
    models = [reward.networks() for reward in mix.rewards if hasattr(reward, "networks")]
    kept = {id(network) for networks in models for network in networks}
    for key in _guests.keys() - kept:
        host.dismiss(_guests.pop(key)[1])


def release_guests() -> None:
    """Take text encoders and reward models off the device; rewards keep theirs in main memory."""
    while _guests:
        host.dismiss(_guests.popitem()[1][1])


def clear() -> None:
    """Let go of every network."""
    global _held
    _rewards.clear()
    release_guests()
    held, _held = _held, None
    if held is not None:
        for patcher in held.patchers.values():
            host.dismiss(patcher)
        del held
        host.give_back()


def _stamps(files: ModelFiles) -> tuple[Any, ...]:
    paths = [files.transformer, files.transformer_low, files.vae, files.clip_vision]
    paths += [files.continue_from, files.continue_from_low]
    paths += [file for file, _, _ in files.frozen.loras]
    return tuple(stamp(path) for path in paths if os.path.exists(path))


def stamp(path: str | Path) -> tuple[str, int, int]:
    """What changes when a file is replaced: path, modification time, size."""
    status = os.stat(path)
    return str(path), status.st_mtime_ns, status.st_size


host.on_failure.append(clear)
