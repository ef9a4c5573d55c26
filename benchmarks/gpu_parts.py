"""The parts of `gpu_check.py`: what is run and compared on the GPU."""

from __future__ import annotations

import gc
import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKLWan
from gpu_check import OutOfTime, Row, Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgrpo_core import embedded
from flashgrpo_core.adam import Adam
from flashgrpo_core.config import LossConfig, OptimConfig
from flashgrpo_core.control import Control
from flashgrpo_core.distributed import World
from flashgrpo_core.groups import make_groups
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.rollout import RolloutSampler, RolloutSettings, sample_shares
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.update import policy_gradient, update_units
from flashgrpo_core.wan.decode import decode_latents, to_bytes, use_tiles
from flashgrpo_core.wan.detect import WanSpec
from flashgrpo_core.wan.recompute import checkpoint_blocks
from flashgrpo_core.wan.storage import StoredLinear, quantise, stored_keys
from flashgrpo_core.wan.transformer import empty_transformer, fp32_islands, load_transformer
from flashgrpo_core.wan.vae import load_vae, use_quick_norm
from flashgrpo_core.wan.weights import finish

Gradient = dict[str, torch.Tensor]
GIB = 2**30
STEPS, WINDOW, PROMPTS, GROUP = 4, (0, 2), ("a", "b"), 2
OUT_OF_MEMORY = torch.cuda.OutOfMemoryError


class Clock(Control):
    """Stops the core when the time is over."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def check(self) -> None:
        self.table.check()


def environment(table: Table, device: torch.device) -> None:
    told = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
    table.add(Row("host", told))
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(0)
        size = f"{found.total_memory / GIB:.0f} GiB, capability {found.major}.{found.minor}"
        table.add(Row("host", f"{found.name}, {size}"))


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double().cpu(), wanted.double().cpu()
    return float((got - wanted).norm() / wanted.norm())


def apart(got: Gradient, wanted: Gradient) -> float:
    flat = [torch.cat([g[n].double().cpu().flatten() for n in wanted]) for g in (got, wanted)]
    return relative(*flat)


# ------------------------------------------------------------------ the small model against the CPU


def small(table: Table, device: torch.device) -> None:
    """The embedded tiny Wan: velocity, LoRA gradient and video, on the device and on the CPU."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 3, 8, 8, generator=draw)
    text = torch.randn(32, 4096, generator=draw)

    def measured(
        where: torch.device,
        dtype: torch.dtype,
        storage: str,
        swap: int = 0,
        recompute: bool = False,
    ) -> tuple[torch.Tensor, Gradient]:
        table.check()
        network, _ = load_transformer(
            embedded.TINY_TRANSFORMER, dtype, where, storage=storage, blocks_to_swap=swap
        )
        policy = WanPolicy(network, rank=4, targets=["attention", "ffn"])
        if recompute:
            checkpoint_blocks(network)
        with torch.no_grad():
            for name, parameter in policy.parameters().items():
                if name.endswith("lora_B"):
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
                    parameter.copy_(0.02 * noise)
        velocity = policy.velocity(x.to(where), 700.0, text)
        velocity.square().mean().backward()
        return velocity.detach(), {n: p.grad for n, p in policy.parameters().items()}

    cpu = torch.device("cpu")
    for storage in ("full", "fp8"):
        wanted = measured(cpu, torch.float32, storage)
        for dtype, limits in ((torch.float32, (1e-4, 1e-3)), (torch.bfloat16, (5e-2, 0.2))):
            got = measured(device, dtype, storage)
            label = f"{storage} storage, {str(dtype).removeprefix('torch.')}"
            found = relative(got[0], wanted[0])
            table.add(Row("small", f"velocity, {label}, against CPU", value=found, limit=limits[0]))
            found = apart(got[1], wanted[1])
            table.add(Row("small", f"gradient, {label}, against CPU", value=found, limit=limits[1]))
        plain = measured(device, torch.float32, storage)
        for name, options in (
            ("a block swapped", {"swap": 1}),
            ("recomputed", {"recompute": True}),
            ("a block swapped and recomputed", {"swap": 1, "recompute": True}),
        ):
            found = apart(measured(device, torch.float32, storage, **options)[1], plain[1])
            what = f"gradient, {storage} storage, {name}, against neither"
            table.add(Row("small", what, value=found, limit=1e-5))
    if device.type == "cuda":
        with sdpa_kernel(SDPBackend.MATH):
            simple = measured(device, torch.bfloat16, "full")
        found = relative(measured(device, torch.bfloat16, "full")[0], simple[0])
        table.add(Row("small", "velocity, fast attention against plain", value=found, limit=2e-2))
    _videos(table, device, x[:1, :, :2])
    _optimizer(table, device)


def _videos(table: Table, device: torch.device, latents: torch.Tensor) -> None:
    wanted = decode_latents(load_vae(embedded.TINY_VAE, torch.float32), latents).astype(int)
    for dtype, limit in ((torch.float32, 0.1), (torch.bfloat16, 2.0)):
        vae = load_vae(embedded.TINY_VAE, dtype, device)
        error = float(np.abs(decode_latents(vae, latents).astype(int) - wanted).mean())
        what = f"decoded video, {str(dtype).removeprefix('torch.')}, against CPU, mean level"
        table.add(Row("small", what, value=error, limit=limit))


def _optimizer(table: Table, device: torch.device) -> None:
    if find_spec("torchao") is None:
        table.add(Row("small", "8-bit AdamW against CPU", "no torchao"))
        return
    moved = []
    for where in (torch.device("cpu"), device):
        draw = torch.Generator().manual_seed(0)
        start = torch.randn(16, 512, generator=draw)
        parameter = torch.nn.Parameter(start.to(where))
        adam = Adam({"a": parameter}, OptimConfig(kind="adamw8bit"))
        for _ in range(5):
            adam.step({"a": 1e-8 * torch.randn(16, 512, generator=draw).to(where)}, 1e-3)
        moved.append(parameter.detach().cpu() - start)
    found = relative(moved[1], moved[0])
    table.add(Row("small", "8-bit AdamW, five steps, against CPU", value=found, limit=2e-2))


# ----------------------------------------------------------------------- random weights, real shape


def spec_of(dim: int, ffn: int, layers: int, text: int = 4096) -> WanSpec:
    return WanSpec(
        family="wan2.1-t2v", size="custom", layout="diffusers", prefix="", dim=dim, ffn_dim=ffn,
        num_layers=layers, num_heads=dim // 128, in_channels=16, out_channels=16, text_dim=text,
        freq_dim=256, patch_size=(1, 2, 2), image_dim=None, added_kv_proj_dim=None,
        pos_embed_seq_len=None, cross_attn_norm=True, weight_dtype="bf16", quantisation="none",
        parameters=0,
    )  # fmt: skip


@torch.no_grad()
def random_policy(
    spec: WanSpec, device: torch.device, storage: str = "full", swap: int = 0
) -> WanPolicy:
    """A bf16 model with weights that are made on the device, and a LoRA that is not zero."""
    dtype = torch.bfloat16
    network = empty_transformer(spec)
    islands = fp32_islands(network, dtype)
    draw = torch.Generator(device)
    stored = stored_keys(dict(network.named_parameters()), spec.num_layers, storage, swap)

    def drawn(name: str, shape: torch.Size) -> torch.Tensor:
        draw.manual_seed(zlib.crc32(name.encode()))  # the same weights however they are stored
        wide = any(part in islands for part in name.split("."))
        weight = torch.empty(shape, device=device, dtype=torch.float32 if wide else dtype)
        if "norm" in name and name.endswith("weight"):
            return weight.fill_(1.0)
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else 2500
        return weight.normal_(std=fan_in**-0.5, generator=draw)

    for name, parameter in list(network.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        if name not in stored:
            made = torch.nn.Parameter(drawn(name, parameter.shape), requires_grad=False)
            network.get_submodule(owner)._parameters[leaf] = made
    for name, store in stored.items():
        owner, _, leaf = name.removesuffix(".weight").rpartition(".")
        parent = network.get_submodule(owner)
        old = getattr(parent, leaf)
        weight, scale = drawn(name, old.weight.shape), None
        if store.eight_bit:
            weight, scale = quantise(weight)
        if store.swapped:
            weight = weight.cpu().pin_memory() if device.type == "cuda" else weight
            scale = None if scale is None else scale.cpu()
        setattr(parent, leaf, StoredLinear(weight, old.bias, dtype, scale, store.swapped))
    network.rope = type(network.rope)(
        attention_head_dim=128, patch_size=spec.patch_size, max_seq_len=1024
    ).to(device)
    finish(network)
    policy = WanPolicy(network, rank=16, alpha=32.0)
    checkpoint_blocks(network)
    for name, parameter in policy.parameters().items():
        if name.endswith("lora_B"):
            parameter.normal_(std=1e-3, generator=draw.manual_seed(zlib.crc32(name.encode())))
    return policy


def random_vae(device: torch.device) -> AutoencoderKLWan:
    torch.manual_seed(0)
    with device:
        vae = AutoencoderKLWan(base_dim=96 if device.type == "cuda" else 4)
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    finish(vae)
    use_quick_norm(vae)
    return vae


class Iteration:
    """Two groups of two videos through rollout, decode and update, each phase measured."""

    def __init__(
        self,
        table: Table,
        part: str,
        policy: WanPolicy,
        vae: Any,
        size: tuple[int, int, int],
    ) -> None:
        self.table, self.part, self.policy, self.vae = table, part, policy, vae
        width, height, frames = size
        self.shape = (16, (frames - 1) // 4 + 1, height // 8, width // 8)
        draw, network = torch.Generator().manual_seed(0), policy.transformer
        self.text = torch.randn(512, network.config.text_dim, generator=draw)  # type: ignore[arg-type,union-attr]

    @contextmanager
    def phase(self, what: str) -> Iterator[Row]:
        """Measure a phase; the row is added when it has ended well."""
        row = Row(self.part, what)
        cuda = self.policy.device.type == "cuda"
        self.table.check()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        yield row
        if cuda:
            torch.cuda.synchronize()
            row.peak_gib = torch.cuda.max_memory_allocated() / GIB
        row.seconds = time.monotonic() - started
        self.table.add(row)

    def rollout(self, label: str, *, savings: bool) -> None:
        """Sample; `savings` are the shared prefix and the graph that is kept for the update."""
        control = Clock(self.table)
        settings = RolloutSettings(self.shape, shared_prefix=savings, micro_batch=1)
        self.groups = make_groups(PROMPTS, iteration=1, run_seed=0, group_size=GROUP, window=WINDOW)
        self.sampler = RolloutSampler(
            self.policy,
            make_schedule("simple", STEPS, 3.0),
            settings,
            dict.fromkeys(PROMPTS, self.text),
            None,
            control,
            keep_graph=4.0 if savings else 0.0,
        )
        with self.phase(f"rollout, {label}"):
            shares = sample_shares(self.groups, 1)
            self.rollouts = list(self.sampler.sample_all(self.groups, shares))
            self.sampler.forget()

    def decode(self, label: str, run: Callable[[torch.Tensor], object]) -> None:
        with self.phase(f"decode of one video, {label}"):
            run(self.rollouts[0].final)

    def update(self, label: str, wanted: Gradient | None = None) -> Gradient:
        """The gradient; compared with an earlier one, `wanted`."""
        used = np.ones((len(PROMPTS), GROUP), bool)
        with self.phase(f"update, {label}") as row:
            units = update_units(self.sampler, self.groups, self.rollouts, used, World())
            gradient, stats = policy_gradient(
                self.policy,
                self.sampler,
                self.groups,
                units,
                np.array([[1.0, -1.0]] * len(PROMPTS)),
                used,
                LossConfig(),
                WINDOW,
                control=Clock(self.table),
            )
            for rollout in self.rollouts:
                rollout.velocity = None
            if wanted is not None:
                row.value, row.limit = apart(gradient, wanted), 5e-2
        if wanted is None:
            found = stats.ratio_drift
            self.table.add(Row(self.part, "ratio drift before the update", value=found, limit=1e-3))
        return {name: g.cpu() for name, g in gradient.items()}


def real_1_3b(table: Table, device: torch.device) -> None:
    """1.3B at 480x832: the largest number of frames that fits, and what each saving saves."""
    toy = device.type == "cpu"
    spec = spec_of(128, 256, 4, 64) if toy else spec_of(1536, 8960, 30)
    policy, vae = random_policy(spec, device), random_vae(device)
    blocks = spec.num_layers
    for frames in (9, 5) if toy else (81, 49, 33, 17, 5):
        size = (96, 32, frames) if toy else (832, 480, frames)
        work = Iteration(table, "1.3B", policy, vae, size)
        shown, first = f"{frames} frames", None
        try:
            work.rollout(f"{shown}, exact savings", savings=True)
            work.decode(f"{shown}, in pieces", lambda z: decode_latents(vae, z))
            first = work.update(f"{shown}, exact savings, recomputing all")
        except OUT_OF_MEMORY:
            table.add(Row("1.3B", shown, "out of memory"))
        release(device)
        if first is not None:
            break
    else:
        return
    use_tiles(vae, 64 if toy else 256)
    attempt(work, lambda: work.decode(f"{shown}, in tiles", lambda z: decode_latents(vae, z)))
    use_tiles(vae, 0)
    parameter = next(vae.parameters())

    def at_once(z: torch.Tensor) -> object:
        with torch.no_grad():
            return to_bytes(vae.decode(z.to(parameter)).sample)

    attempt(work, lambda: work.decode(f"{shown}, at once", at_once))
    for keep in (blocks // 2, blocks):
        checkpoint_blocks(policy.transformer, keep)
        attempt(work, lambda n=keep: work.update(f"{shown}, {n} of {blocks} blocks kept", first))
    checkpoint_blocks(policy.transformer)
    attempt(work, lambda: work.rollout(f"{shown}, no savings", savings=False))
    attempt(work, lambda: work.update(f"{shown}, no savings, recomputing all", first))
    del policy, work
    release(device)
    swapped = random_policy(spec, device, swap=blocks // 2)
    work = Iteration(table, "1.3B", swapped, vae, size)
    attempt(work, lambda: work.rollout(f"{shown}, {blocks // 2} blocks swapped", savings=True))
    forget(work)
    attempt(work, lambda: work.update(f"{shown}, {blocks // 2} blocks swapped", first))


def real_14b(table: Table, device: torch.device) -> None:
    """14B in 8 bits: one iteration of a small video, all on the device if it fits."""
    toy = device.type == "cpu"
    spec = spec_of(128, 256, 6, 64) if toy else spec_of(5120, 13824, 40)
    room = torch.cuda.get_device_properties(0).total_memory / GIB if not toy else 80
    swap = 0 if room > 22 else 32
    with torch.no_grad():
        policy = random_policy(spec, device, "fp8", swap)
    vae = random_vae(device)
    size = (96, 32, 5) if toy else (832, 480, 17) if room > 22 else (416, 240, 17)
    work = Iteration(table, "14B", policy, vae, size)
    label = f"8-bit, {'x'.join(map(str, size))}" + (f", {swap} swapped" if swap else "")
    work.rollout(label, savings=True)
    work.decode(label, lambda z: decode_latents(vae, z))
    work.update(label)


def attempt(work: Iteration, step: Callable[[], object]) -> None:
    """Run a step; when it fails, say so in a row and go on."""
    try:
        step()
    except OutOfTime:
        raise
    except OUT_OF_MEMORY:
        work.table.add(Row(work.part, "the step after the row above", "out of memory"))
    except Exception as exc:
        work.table.add(Row(work.part, f"{type(exc).__name__}: {exc}"[:160], "FAILED"))
    release(work.policy.device)


def forget(work: Iteration) -> None:
    """Drop kept graphs, so that the next update computes its forward itself."""
    for rollout in work.rollouts:
        rollout.velocity = None


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
