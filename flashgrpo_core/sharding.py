"""FSDP2: the frozen weights spread over all processes, for models that do not fit one GPU.

Every block's weights are gathered just before it runs and dropped after it, so that a device
holds its part of the model plus one block. The LoRA stays whole on every process: its optimizer,
checkpoint and export are those of any run, and gathering does not change a weight, so the numbers
are those of the whole model bit for bit.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .distributed import World
from .errors import FlashGRPOError

if TYPE_CHECKING:
    from .config import Config
    from .experts import Policy
    from .networks import Networks
    from .policy import WanPolicy

#: Text tokens of an accompanying forward. The attention of image-to-video models counts from the
#: end: the last 512 are text, those before it the image.
_TOKENS = 513


def load_sharded(config: Config, world: World) -> Networks:
    """Load the networks with the transformers' frozen weights spread over the world.

    Main memory holds one whole copy per machine at a time, while it is read; a device never does.

    Raises:
        FlashGRPOError: see `networks.load_networks`.
    """
    from .networks import load_networks

    if config.model.storage == "auto":  # a part of the weights per device needs no 8-bit storage
        config = replace(config, model=replace(config.model, storage="full"))
    with world.one_at_a_time():
        networks = load_networks(config, world.device, torch.device("cpu"))
        shard(networks.policy, world)
        networks.vae.to(world.device)
    return networks


def shard(policy: Policy, world: World) -> None:
    """Spread the frozen weights of a policy over the world, in place; its LoRA stays whole.

    From then on the ranks must make equally many forwards, which `Lockstep` sees to.

    Raises:
        FlashGRPOError: a weight was left whole.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    # The final layer returns a view; nothing writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(world.device.type, (world.size,))
    lockstep = Lockstep(policy, world)
    for expert in policy.experts.values():
        transformer: Any = expert.transformer
        lora = set(expert.parameters().values())
        for parameter in lora:
            parameter.data = parameter.data.to(world.device)
        for module in (*transformer.blocks, transformer):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=lora)
        whole = [
            name
            for name, parameter in transformer.named_parameters()
            if parameter not in lora and not isinstance(parameter, DTensor)
        ]
        if whole:
            raise FlashGRPOError(
                f"{len(whole)} frozen weights are not sharded (first: {whole[0]}): set model.shard = false"
            )
        expert.lockstep = lockstep
    world.lockstep = lockstep


class Lockstep:
    """Keeps the ranks of a sharded policy at equal numbers of forwards.

    Each forward and backward gathers the weights from all ranks, so a rank with less work must
    take part in the others' forwards or everything hangs. Before each velocity the ranks say
    what they are about to compute (which expert, guided or not, with gradient or not). Those who
    want the first kind of these compute it, the others the smallest possible input along with
    them, until it is their turn; a rank without work left calls `rest`. So no phase needs to plan
    its number of forwards.

    Attributes:
        accompanied: velocities that this rank has computed only to take part.
    """

    def __init__(self, policy: Policy, world: World) -> None:
        self.experts = list(policy.experts.values())
        self.world = world
        self.accompanied = 0

    def announce(self, expert: WanPolicy, guided: bool) -> None:
        """Wait until it is this rank's turn to compute a velocity."""
        kind = 4 * self.experts.index(expert) + 2 * torch.is_grad_enabled() + guided
        while (turn := self._agree(kind)) != kind:
            self._accompany(turn)

    def rest(self) -> None:
        """Accompany the others until every rank rests."""
        while (turn := self._agree(None)) is not None:
            self._accompany(turn)

    def _agree(self, kind: int | None) -> int | None:
        """The first kind that a rank wants; None when all rest."""
        wanted = np.zeros(4 * len(self.experts))
        if kind is not None:
            wanted[kind] = 1.0
        found = np.flatnonzero(self.world.sum_array(wanted))
        return int(found[0]) if len(found) else None

    def _accompany(self, kind: int | None) -> None:
        if kind is None:
            raise RuntimeError("a rank that wants to compute cannot have been overlooked")
        expert, with_grad = self.experts[kind // 4], bool(kind & 2)
        transformer: Any = expert.transformer
        config, device, dtype = transformer.config, expert.device, expert.dtype
        latents = torch.zeros((1, config.in_channels, *config.patch_size), dtype=dtype)
        context = torch.zeros((1, _TOKENS, config.text_dim), dtype=dtype)
        total = torch.zeros((), device=device)
        with torch.set_grad_enabled(with_grad):
            for _ in range(1 + (kind & 1)):
                out = transformer(
                    hidden_states=latents.to(device),
                    timestep=torch.full((1,), 500.0, device=device),
                    encoder_hidden_states=context.to(device),
                    return_dict=False,
                )[0]
                total = total + out.float().sum()
        if with_grad:
            total.backward()
            for parameter in expert.parameters().values():
                parameter.grad = None
        self.accompanied += 1
