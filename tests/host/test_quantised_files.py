"""8-bit files and frozen LoRAs against the real ComfyUI: its velocity, its merge.

One ComfyUI process measures everything; the files are small, random and in its own layout.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from harness import run_in_comfy

from flashgrpo_core.files import save_tensors
from flashgrpo_core.wan import names
from tests.training._family import transformer

LAYOUTS = ("fp8", "fp8_scaled", "fp8_marked")
STORAGES = ("full", "fp8", "swapped")
#: What ComfyUI is given is always in its own spelling; ours reads the named one.
SPELLINGS = {
    "comfyui": True,
    "comfyui, no alpha": False,
    "kohya": True,
    "kohya, no alpha": False,
    "diffusers": True,
    "diffusers, no alpha": False,
    "diff and diff_b": True,
    "one block": True,
    "beside the blocks": True,
}
STRENGTHS = (0.7, -0.4)
Tensors = dict[str, torch.Tensor]


def is_layer(name: str, value: torch.Tensor, everywhere: bool = False) -> bool:
    inside = everywhere or name.startswith("blocks.")
    return inside and value.ndim == 2 and name.endswith(".weight")


def quantised(state: Tensors, layout: str) -> tuple[Tensors, dict[str, str], Tensors]:
    """A state dict as an 8-bit file: tensors, header, and the weights that it stands for."""
    stored, exact, layers = {}, dict(state), {}
    for name, value in state.items():
        # ComfyUI holds every linear layer of a file with `scaled_fp8` in 8 bits.
        if not is_layer(name, value, everywhere=layout == "fp8_scaled"):
            stored[name] = value
            continue
        module = name.removesuffix(".weight")
        scale = torch.ones(()) if layout == "fp8" else value.abs().max() / 448
        stored[name] = (value / scale).to(torch.float8_e4m3fn)
        exact[name] = stored[name].float() * scale
        if layout == "fp8_scaled":
            stored[f"{module}.scale_weight"] = scale
        elif layout == "fp8_marked":
            stored[f"{module}.weight_scale"] = scale
            layers[module] = {"format": "float8_e4m3fn"}
    header = {}
    if layout == "fp8_scaled":
        stored["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    elif layout == "fp8_marked":
        header["_quantization_metadata"] = json.dumps({"layers": layers})
    return stored, header, exact


def lora(state: Tensors, spelling: str, seed: int) -> tuple[Tensors, Tensors, dict[str, str]]:
    """One LoRA twice: as ComfyUI reads it, and in the spelling that ours has to read."""
    draw = torch.Generator().manual_seed(seed)
    kind, alpha = spelling.split(",")[0], SPELLINGS[spelling]
    theirs: Tensors = {}
    ours: Tensors = {}
    for name, value in state.items():
        module = name.removesuffix(".weight")
        inside = is_layer(name, value) and (kind != "one block" or name.startswith("blocks.1."))
        beside = module in ("head.head", "text_embedding.0", "time_projection.1")
        if not (beside if kind == "beside the blocks" else inside):
            continue
        found = {
            "lora_down.weight": 0.2 * torch.randn(4, value.shape[1], generator=draw),
            "lora_up.weight": 0.2 * torch.randn(value.shape[0], 4, generator=draw),
        }
        if alpha:
            found["alpha"] = torch.tensor(8.0)
        if kind == "diff and diff_b":
            found = {
                "diff": 0.02 * torch.randn(value.shape, generator=draw),
                "diff_b": 0.1 * torch.randn(value.shape[0], generator=draw),
            }
        theirs |= {f"diffusion_model.{module}.{end}": t for end, t in found.items()}
        if kind == "kohya":
            flat = f"lora_unet_{module.replace('.', '_')}"
            ours |= {f"{flat}.{end}": t for end, t in found.items()}
        elif kind == "diffusers":
            other = f"transformer.{names.to_diffusers(module)}"
            ours[f"{other}.lora_A.weight"] = found["lora_down.weight"]
            ours[f"{other}.lora_B.weight"] = found["lora_up.weight"]
    if kind == "diff and diff_b":  # norms too, as distilled LoRAs have them
        for name in ("blocks.0.self_attn.norm_q", "blocks.1.norm3"):
            shape = state[f"{name}.weight"].shape
            theirs[f"diffusion_model.{name}.diff"] = 0.2 * torch.randn(shape, generator=draw)
        theirs["diffusion_model.patch_embedding.diff_b"] = 0.2 * torch.randn(128, generator=draw)
    header = {}
    if kind == "diffusers" and alpha:
        header["lora_adapter_metadata"] = json.dumps({"transformer.lora_alpha": 8})
    return theirs, ours or theirs, header


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("quantised")
    state = {
        names.to_original(key) or key: value.detach().bfloat16().float()
        for key, value in transformer(0).state_dict().items()
    }
    for key in state:  # and their biases too, unscaled: here rounding them changes nothing
        if key.endswith(".bias"):
            state[key] = state[key].to(torch.float8_e4m3fn).float()
    original = folder / "original.safetensors"
    save_tensors(original, {key: value.bfloat16() for key, value in state.items()})
    files = {}
    exact: Tensors = {}
    for layout in LAYOUTS:
        stored, header, exact = quantised(state, layout)
        save_tensors(folder / f"{layout}.safetensors", stored, header)
        files[layout] = str(folder / f"{layout}.safetensors")
    # The 8-bit file's own values in fp32: what both sides add the LoRAs to.
    save_tensors(folder / "exact.safetensors", exact)
    loras = {}
    for spelling in SPELLINGS:
        pairs = []
        for seed in range(len(STRENGTHS)):
            theirs, ours, header = lora(state, spelling, seed)
            stem = f"{spelling.replace(', ', '-').replace(' ', '-')}-{seed}"
            save_tensors(folder / f"{stem}-theirs.safetensors", theirs)
            save_tensors(folder / f"{stem}-ours.safetensors", ours, header)
            pairs.append(
                [str(folder / f"{stem}-{side}.safetensors") for side in ("theirs", "ours")]
            )
        loras[spelling] = pairs
    return run_in_comfy(
        _SCRIPT,
        folder,
        original=str(original),
        files=files,
        exact=str(folder / "exact.safetensors"),
        loras=loras,
        strengths=STRENGTHS,
        storages=STORAGES,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_velocity_is_that_of_the_file(measured: dict[str, Any], layout: str) -> None:
    """Of this very file in ComfyUI, and within the rounding to 8 bits of the bf16 original."""
    found = measured[layout]
    assert found["eight_bit"] == 20
    assert found["difference_to_comfyui"] <= 1e-4
    assert 1e-3 < found["difference_to_original"] <= 0.05
    # The bound means something: a file read without its scales is far off.
    if layout != "fp8":
        assert found["without_scales"] > 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_lora_matrix_gets_a_gradient_and_is_not_in_8_bits(
    measured: dict[str, Any], layout: str
) -> None:
    found = measured[layout]
    assert found["matrices"] == 2 * 20
    assert found["without_gradient"] == []
    assert found["lora_types"] == ["torch.float32"]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("spelling", list(SPELLINGS))
def test_frozen_loras_are_comfyuis_merge(
    measured: dict[str, Any], spelling: str, storage: str
) -> None:
    """Two of them, with strengths; also on 8-bit and on swapped layers."""
    found = measured["loras"][spelling]
    assert found["unmatched"] == 0
    assert found["effect"] >= 1e-2, "the LoRAs change nothing measurable"
    assert found[storage] <= 1e-4 * found["effect"] + 1e-5


_SCRIPT = """
import logging

import torch

import comfy.sd
import comfy.utils
import comfy.model_management
from flashgrpo_core.files import open_tensors, save_tensors
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.wan.lora import merge_lora, read_lora
from flashgrpo_core.wan.storage import StoredLinear
from flashgrpo_core.wan.transformer import load_transformer

draw = torch.Generator().manual_seed(5)
x = torch.randn(1, 16, 2, 4, 4, generator=draw)
context = torch.randn(1, 512, 4096, generator=draw)
messages = []


class Collect(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


logging.getLogger().addHandler(Collect())


def distance(one, other):
    return float((one - other).double().norm() / other.double().norm())


def theirs_of(patcher):
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    with torch.no_grad():
        return patcher.model.diffusion_model(x, torch.tensor([731.0]), context=context)


def ours_of(network, **options):
    with torch.no_grad():
        return network(x, torch.tensor([731.0]), context).sample


def network_of(path, **options):
    return load_transformer(path, torch.float32, **options)[0]


plain = comfy.sd.load_diffusion_model(original, model_options={"dtype": torch.float32})
wanted = theirs_of(plain)
for layout, path in files.items():
    theirs = theirs_of(comfy.sd.load_diffusion_model(path))
    network = network_of(path, storage="fp8")
    velocity = ours_of(network)
    kept = [m for m in network.modules() if isinstance(m, StoredLinear)]
    found = {
        "eight_bit": len([m for m in kept if m.weight.dtype == torch.float8_e4m3fn]),
        "difference_to_comfyui": distance(velocity, theirs),
        "difference_to_original": distance(velocity, wanted),
    }
    for layer in kept:
        layer.weight_scale = None
    found["without_scales"] = distance(ours_of(network), wanted)
    policy = WanPolicy(network_of(path, storage="fp8"), rank=4, targets=["attention", "ffn"])
    parameters = policy.parameters()
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.1, generator=draw)
    policy.velocity(x, 731.0, context[0]).square().sum().backward()
    found["matrices"] = len(parameters)
    found["without_gradient"] = [
        n for n, p in parameters.items() if p.grad is None or float(p.grad.norm()) == 0
    ]
    found["lora_types"] = sorted({str(p.dtype) for p in parameters.values()})
    report(**{layout: found})

options = {
    "full": (exact, {}),
    "fp8": (files["fp8_marked"], {"storage": "fp8"}),
    "swapped": (files["fp8_marked"], {"storage": "fp8", "blocks_to_swap": 1}),
}
base = comfy.sd.load_diffusion_model(exact, model_options={"dtype": torch.float32})
before = theirs_of(base)
results = {}
for spelling, pairs in loras.items():
    messages.clear()
    patched = base
    for (file, _), strength in zip(pairs, strengths):
        loaded = comfy.utils.load_torch_file(file, safe_load=True)
        patched, _ = comfy.sd.load_lora_for_models(patched, None, loaded, strength, 0.0)
    theirs = theirs_of(patched)
    patched.unpatch_model()
    found = {
        "effect": distance(theirs, before),
        "unmatched": len([text for text in messages if "not loaded" in text.lower()]),
    }
    for storage in storages:
        path, how = options[storage]
        network = network_of(path, **how)
        for (_, file), strength in zip(pairs, strengths):
            merge_lora(network, read_lora(file), strength)
        found[storage] = distance(ours_of(network), theirs)
    results[spelling] = found
report(loras=results)
"""
