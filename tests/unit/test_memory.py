"""The memory plan: traced tensors, sizes of the real models, and what is said when it does not fit."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import nn

from flashgrpo_core import memory_fit
from flashgrpo_core.config import Config
from flashgrpo_core.config_io import build_config
from flashgrpo_core.embedded import with_embedded_files
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.memory import plan_memory, sharding_plan
from flashgrpo_core.memory_fit import MARGIN, check_memory, fit, with_changes
from flashgrpo_core.memory_trace import Trace
from flashgrpo_core.model_shapes import empty_policy, model_shapes, published_shapes
from flashgrpo_core.presets import PRESETS, preset_tables
from flashgrpo_core.wan.published import TRANSFORMERS

META = torch.device("meta")


def tiny(**tables: dict[str, Any]) -> Config:
    return build_config({"model": {"transformer": "tiny", **tables.pop("model", {})}, **tables})


def preset_config(name: str) -> Config:
    tables = preset_tables(name)
    model = {**tables["model"], "transformer": "high.safetensors"}
    if "A14B" in name:
        model["transformer_low"] = "low.safetensors"
    return build_config({**tables, "model": model})


def test_a_trace_counts_live_tensors_and_operations() -> None:
    x = torch.empty(64, 256, device=META)
    weight = torch.empty(512, 256, device=META, requires_grad=True)
    trace = Trace()
    trace.know([x, weight])
    with trace:
        hidden = x @ weight.t()  # [64, 512], 131072 bytes
        kept = hidden.relu()  # as large, kept for the backward pass
        del hidden
        assert trace.live == 64 * 512 * 4
        assert trace.peak == 2 * 64 * 512 * 4
        kept.sum().backward()
        assert weight.grad is not None and weight.grad.is_meta
    # Forward and the gradient of the weight; the input needs none.
    assert trace.flops == 2 * (2 * 64 * 256 * 512)
    del kept
    weight.grad = None
    assert trace.live == 0


def test_attention_is_traced_without_its_score_matrix() -> None:
    query = torch.empty(1, 4, 1024, 64, device=META, requires_grad=True)
    trace = Trace()
    trace.know([query])
    with trace:
        out = nn.functional.scaled_dot_product_attention(query, query, query)
        assert trace.peak == query.nbytes + 4 * 1024 * 4
        out.sum().backward()
    assert trace.peak < 4 * 1024 * 1024 * 4  # the matrix alone
    assert trace.flops == 3.5 * 4 * query.numel() * 1024


def test_recomputed_parts_are_traced_too() -> None:
    """Attention inside a checkpoint is the same operation in the backward pass."""
    plain = plan_memory(tiny(), device="cpu")
    again = plan_memory(tiny(model={"gradient_checkpointing": True}), device="cpu")
    assert again.train_flops > 1.15 * plain.train_flops
    assert again.forward_flops == plain.forward_flops


def parameters_of(dim: int, ffn: int, blocks: int, inputs: int, outputs: int, image: bool) -> int:
    """Parameters of a Wan transformer, counted from its description."""

    def linear(a: int, b: int) -> int:
        return a * b + b

    attention = 4 * linear(dim, dim) + 2 * dim
    block = 2 * attention + linear(dim, ffn) + linear(ffn, dim) + 2 * dim + 6 * dim
    outer = linear(4 * inputs, dim) + linear(4096, dim) + linear(dim, dim)
    outer += linear(256, dim) + linear(dim, dim) + linear(dim, 6 * dim)
    outer += linear(dim, 4 * outputs) + 2 * dim
    if image:
        block += 2 * linear(dim, dim) + dim
        outer += 2 * 1280 + linear(1280, 1280) + linear(1280, dim) + 2 * dim
    return blocks * block + outer


PARAMETERS = {
    "Wan 2.1 1.3B": parameters_of(1536, 8960, 30, 16, 16, False),
    "Wan 2.1 14B T2V": parameters_of(5120, 13824, 40, 16, 16, False),
    "Wan 2.1 14B I2V": parameters_of(5120, 13824, 40, 36, 16, True),
    "Wan 2.2 A14B I2V": parameters_of(5120, 13824, 40, 36, 16, False),
    "Wan 2.2 5B": parameters_of(3072, 14336, 30, 48, 48, False),
}


@pytest.mark.parametrize("model", PARAMETERS)
def test_real_shapes_are_spread_without_loss(model: str) -> None:
    """Constructed at real shape: parts of all ranks add up to every parameter."""
    assert PARAMETERS["Wan 2.1 14B T2V"] == 14_288_491_584
    config = build_config({"model": {"transformer": "x.safetensors", "storage": "full"}})
    spec = TRANSFORMERS[model]
    policy = empty_policy(config, spec, torch.bfloat16, spec.num_layers, 0)
    lora = sum(p.numel() for p in policy.parameters().values())
    assert lora == spec.num_layers * 8 * 2 * 16 * spec.dim
    total = sum(p.numel() for p in policy.transformer.parameters()) - lora
    assert total == PARAMETERS[model]
    for processes in (1, 3, 8):
        found = sharding_plan(policy, processes)
        assert len(found.parameters) == processes and sum(found.parameters) == total
        assert max(found.parameters) < 1.02 * total / processes + 1e6
    # A rank of eight holds an eighth, two gathered blocks and the LoRA.
    assert found.device_bytes < 2 * total / 8 + 3 * 2 * total / spec.num_layers + 4 * lora


def test_sizes_follow_from_two_blocks() -> None:
    """What two blocks tell is what the whole model has, swapped and in 8 bits too."""
    from flashgrpo_core.memory import _sizes
    from flashgrpo_core.wan.storage import resident_bytes

    spec = TRANSFORMERS["Wan 2.1 1.3B"]
    for model in ({"storage": "full"}, {"storage": "fp8", "blocks_to_swap": 11}):
        config = build_config({"model": {"transformer": "x.safetensors", **model}})
        whole = empty_policy(config, spec, torch.bfloat16, spec.num_layers, 0)
        found = _sizes(config, spec, torch.bfloat16, one_memory=False)
        assert found.resident == resident_bytes(whole.transformer)
        lora = sum(p.numel() for p in whole.parameters().values())
        total = sum(p.numel() for p in whole.transformer.parameters())
        assert (found.parameters, found.lora) == (total - lora, lora)
        assert (found.swapped > 0) == ("blocks_to_swap" in model)


#: Two of the tightest; all of them: benchmarks/preset_memory.py.
SMALLEST = (
    "Wan 2.1 14B T2V, 12 GB, 416x240",
    "Wan 2.2 5B, 12 GB, 704x384",
)


@pytest.mark.parametrize("name", SMALLEST)
def test_presets_fit_their_card(name: str) -> None:
    config, preset = preset_config(name), PRESETS[name]
    found = fit(config, published_shapes(preset.model), preset.card_gb)
    assert found.fits and not found.changes
    assert MARGIN * found.plan.peak.device <= preset.card_gb * 1e9
    assert found.plan.parameters == PARAMETERS[preset.model]


def test_savings_save() -> None:
    """Each saving lowers what it is for, and only time is paid for the exact ones."""
    config = tiny(rollout={"keep_graph": 0.0})
    base = {p.name: p.device for p in plan_memory(config).phases}
    for changes, phase in (
        ({"rollout.micro_batch": 1, "rollout.decode_batch": 1}, "rollout"),
        ({"rollout.micro_batch": 1, "rollout.decode_batch": 1}, "score"),
        ({"model.gradient_checkpointing": True}, "update"),
        ({"model.offload": True}, "rollout"),
    ):
        less = {p.name: p.device for p in plan_memory(with_changes(config, changes)).phases}
        assert less[phase] < base[phase], changes


def test_a_run_that_cannot_fit_is_refused_with_the_fix() -> None:
    config = tiny()
    peak = plan_memory(config, device="cpu").peak
    check_memory(config, torch.device("cpu"), limit=2 * peak.device)
    warnings: list[str] = []
    check_memory(config, torch.device("cpu"), limit=int(0.95 * peak.device), warn=warnings.append)
    assert len(warnings) == 1 and "may run out of memory" in warnings[0]
    with pytest.raises(FlashGRPOError) as caught:
        check_memory(config, torch.device("cpu"), limit=int(0.75 * peak.device))
    message = str(caught.value)
    assert f"the {peak.name} phase needs about" in message and "set " in message
    # The named settings do fit.
    fix = message.partition("set ")[2].partition(" (")[0]
    changes = {k: json.loads(v) for k, v in (part.split(" = ") for part in fix.split(", "))}
    better = plan_memory(with_changes(config, changes), device="cpu")
    assert better.peak.device <= 0.75 * peak.device


def test_training_asks_before_it_loads(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgrpo_core.training import train

    config = tiny(run={"output": str(tmp_path), "iterations": 1})
    peak = plan_memory(config, device="cpu").peak.device
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: int(0.75 * peak))
    with pytest.raises(FlashGRPOError, match="needs about .* of main memory are free"):
        train(config)
    assert not (tmp_path / "flashgrpo" / "runs").exists()


def test_a_tight_run_is_warned_of(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning reaches the run's events."""
    from flashgrpo_core.training import train

    short = {"frames": 5, "width": 32, "height": 32, "group_size": 2}
    config = tiny(
        run={"output": str(tmp_path), "iterations": 1},
        rollout=short,
        eval={"every": 0},
        schedule={"steps": 4},
    )
    peak = plan_memory(config, device="cpu").peak.device
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: int(0.95 * peak))
    found = train(config)
    lines = (found.folder / "events.jsonl").read_text().splitlines()
    warnings = [e for e in map(json.loads, lines) if e.get("code") == "memory"]
    assert len(warnings) == 1 and "may run out of memory" in warnings[0]["message"]


def test_every_process_is_asked(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several processes holds the whole model without `model.shard`."""
    from flashgrpo_core.distributed import World
    from flashgrpo_core.training import train

    config = tiny(run={"output": str(tmp_path), "iterations": 1})
    peak = plan_memory(config, device="cpu").peak.device
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: int(0.75 * peak))
    world = World(0, 2, torch.device("cpu"))
    monkeypatch.setattr(world, "leave", lambda failed=False: None)  # there is no other process
    with pytest.raises(FlashGRPOError, match="needs about .* of main memory are free"):
        train(config, world=world)


def test_a_huge_run_is_refused_after_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """81 frames of 4096x4096 take as long as small ones: no noise is drawn, no frame is filled."""
    plans: list[Config] = []

    def counted(config: Config, *given: Any, **more: Any) -> Any:
        plans.append(config)
        return plan_memory(config, *given, **more)

    monkeypatch.setattr(memory_fit, "plan_memory", counted)
    huge = tiny(rollout={"width": 4096, "height": 4096, "frames": 81})
    began = time.process_time()
    with pytest.raises(FlashGRPOError, match=r"lower rollout\.width, height or frames"):
        check_memory(huge, torch.device("cpu"), limit=20_000_000_000)
    assert len(plans) <= 2 + memory_fit.TRIES
    assert time.process_time() - began < 30  # about 6 s; drawing the noise took 95 s


def test_changes_that_save_nothing_are_not_named() -> None:
    """Weights of 0.01 GB are not what fills a card."""
    config = with_embedded_files(tiny(rollout={"width": 512, "height": 512, "frames": 17}))
    shapes = model_shapes(config)
    peak = plan_memory(config, shapes).peak
    for share in (0.9, 0.3):
        found = fit(config, shapes, share * peak.device / 1e9)
        assert found.fits and found.changes
        assert not {"model.storage", "model.blocks_to_swap"} & found.changes.keys()


def test_small_runs_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo must not wait for a plan."""
    monkeypatch.setattr(memory_fit, "plan_memory", None)
    check_memory(tiny(), torch.device("cpu"), limit=4_000_000_000)


def test_shapes_come_from_headers() -> None:
    shapes = model_shapes(with_embedded_files(tiny()))
    assert shapes.spec.dim == 128 and shapes.vae.z_dim == 16 and shapes.spatial == 8
    assert shapes.encoder_parameters > shapes.encoder_streamed > 0
    with pytest.raises(FlashGRPOError, match=r"model\.vae is empty"):
        model_shapes(build_config({"model": {"transformer": "x.safetensors"}}))
