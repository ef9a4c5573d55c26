"""The files are honest: stock ComfyUI reads them and computes what the core computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import ComfyServer, run_in_comfy
from wan_files import copy_models

CONDITIONING_NODE = Path(__file__).with_name("conditioning_node.py")


def sampling_prompt(transformer: str, vae: str, lora: str | None = None) -> dict[str, Any]:
    """KSampler and VAEDecode, 9 frames of 64x64, with stock nodes except the conditioning."""

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": inputs}

    prompt = {
        "model": node("UNETLoader", unet_name=transformer, weight_dtype="default"),
        "vae": node("VAELoader", vae_name=vae),
        "shift": node("ModelSamplingSD3", model=["model", 0], shift=3.0),
        "text": node("TestConditioning", seed=1, tokens=32),
        "latent": node("EmptyHunyuanLatentVideo", width=64, height=64, length=9, batch_size=1),
        "sample": node(
            "KSampler",
            model=["shift", 0],
            seed=5,
            steps=4,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            positive=["text", 0],
            negative=["text", 0],
            latent_image=["latent", 0],
            denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="sampled"),
    }
    if lora is not None:
        prompt["lora"] = node(
            "LoraLoaderModelOnly", model=["model", 0], lora_name=lora, strength_model=1.0
        )
        prompt["shift"]["inputs"]["model"] = ["lora", 0]
    return prompt


@pytest.fixture(scope="module")
def stock_server(
    make_server: Callable[..., ComfyServer], random_wan: dict[str, Path]
) -> ComfyServer:
    """ComfyUI with the test's conditioning node instead of the pack, and the random Wan."""
    server = make_server(pack=False, nodes=(CONDITIONING_NODE,))
    copy_models(random_wan, server.models)
    return server


@pytest.fixture(scope="module")
def measured(
    wan_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Numbers for one set of files, all from one process: starting it takes most of the time."""
    folder = tmp_path_factory.mktemp("measured")
    return run_in_comfy(
        _VELOCITY + _VAE + _LORA,
        folder,
        transformer_file=str(wan_files["transformer"]),
        vae_file=str(wan_files["vae"]),
        lora_folder=str(folder),
    )


def frames(server: ComfyServer, prompt: dict[str, Any]) -> list[bytes]:
    images = server.queue(prompt).outputs["save"]["images"]
    return [(server.output / image["filename"]).read_bytes() for image in images]


def pixels(png: list[bytes]) -> Any:
    import io

    import numpy as np
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in png])


def test_stock_nodes_sample_and_decode(
    stock_server: ComfyServer, wan_files: dict[str, Path]
) -> None:
    prompt = sampling_prompt(wan_files["transformer"].name, wan_files["vae"].name)
    video = pixels(frames(stock_server, prompt))
    assert video.shape == (9, 64, 64, 3)
    assert video.std() > 1.0, "the video is one flat colour"


def test_velocity_equals_diffusers(measured: dict[str, Any]) -> None:
    assert measured["velocity_size"] > 1e-2
    assert measured["velocity_difference"] <= 1e-4


def test_vae_equals_diffusers(measured: dict[str, Any]) -> None:
    assert measured["shapes"] == [[1, 16, 3, 8, 8], [1, 16, 3, 8, 8], [1, 9, 64, 64, 3]]
    assert measured["latents_size"] > 1e-2
    assert measured["latents_difference"] <= 1e-3
    assert measured["pixels_spread"] > 1.0
    assert measured["pixels_difference"] <= 1.0  # one level: both round


@pytest.mark.parametrize("fmt", ["comfyui", "kohya"])
def test_exported_lora_equals_the_policy(measured: dict[str, Any], fmt: str) -> None:
    """At strength 1.0 the stock loader gives the trained policy, and the test can tell."""
    lora = measured[fmt]
    good = lora["good"]
    assert good["unmatched"] == 0
    assert good["patches"] == measured["modules"] > 0
    assert good["effect"] >= 1e-2, "the adapter changes nothing measurable"
    assert good["error"] <= 1e-3 * good["effect"]
    # The same measurement must see a wrong file.
    halved = lora["alpha_halved"]
    assert halved["unmatched"] == 0
    assert halved["error"] > 0.1 * good["effect"]
    renamed = lora["renamed"]
    assert renamed["unmatched"] > 0
    assert renamed["error"] > 0.1 * good["effect"]


def test_stock_lora_loader_changes_the_video(
    stock_server: ComfyServer, wan_files: dict[str, Path], measured: dict[str, Any]
) -> None:
    copy_models({"lora": Path(measured["comfyui"]["good"]["file"])}, stock_server.models)
    copy_models({"lora": Path(measured["comfyui"]["renamed"]["file"])}, stock_server.models)
    names = (wan_files["transformer"].name, wan_files["vae"].name)
    base = pixels(frames(stock_server, sampling_prompt(*names)))
    before = len(stock_server.log())
    changed = pixels(frames(stock_server, sampling_prompt(*names, "comfyui_good.safetensors")))
    assert abs(changed.astype(float) - base.astype(float)).mean() > 0.1
    assert "lora key not loaded" not in stock_server.log()[before:]
    frames(stock_server, sampling_prompt(*names, "comfyui_renamed.safetensors"))
    assert "lora key not loaded" in stock_server.log()[before:]


_VELOCITY = """
import numpy as np
import torch

import comfy.latent_formats
import comfy.model_management
import comfy.sd
import comfy.utils
from flashgrpo_core.wan.transformer import load_transformer

draw = torch.Generator().manual_seed(11)
x = torch.randn(1, 16, 3, 8, 8, generator=draw)  # [B, C, t, h, w]
context = torch.randn(1, 32, 4096, generator=draw)
timestep = torch.tensor([731.0])


def stock_velocity(patcher):
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    return patcher.model.diffusion_model(x, timestep, context=context)


def policy_velocity():
    return policy(x, timestep, context, return_dict=False)[0]


def size(tensor):
    return float(tensor.double().pow(2).mean().sqrt())


def distance(one, other):
    return size(one - other) / size(other)


torch.set_grad_enabled(False)
options = {"dtype": torch.float32}
patcher = comfy.sd.load_diffusion_model(transformer_file, model_options=options)
policy, spec = load_transformer(transformer_file, torch.float32)
stock = stock_velocity(patcher)
report(velocity_difference=distance(policy_velocity(), stock), velocity_size=size(stock))
"""

_VAE = """
from flashgrpo_core.wan.decode import decode_latents
from flashgrpo_core.wan.vae import encode_video, load_vae

corners = np.random.default_rng(3).uniform(0, 255, (1, 9, 4, 4, 3))
video = corners.repeat(16, 2).repeat(16, 3).astype(np.uint8)  # [B, T, H, W, 3]
stock_vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(vae_file))
our_vae = load_vae(vae_file, torch.float32, "cpu")
scale = comfy.latent_formats.Wan21()
theirs = scale.process_in(stock_vae.encode(torch.from_numpy(video[0]).float() / 255).float())
latents = encode_video(our_vae, video)
decoded = decode_latents(our_vae, latents)
shown = stock_vae.decode(scale.process_out(latents))[0].clamp(0, 1).mul(255).round().numpy()
report(
    shapes=[list(theirs.shape), list(latents.shape), list(decoded.shape)],
    latents_size=size(theirs),
    latents_difference=distance(latents, theirs),
    pixels_spread=float(shown.std()),
    pixels_difference=float(np.abs(shown - decoded[0]).max()),
)
"""

_LORA = """
from peft import LoraConfig
from safetensors.torch import save_file
from flashgrpo_core.wan.lora import export_lora, target_modules

modules = target_modules(policy, ["attention", "ffn"])
torch.manual_seed(0)  # PEFT draws lora_A from the global generator
policy.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=modules))
weights = {}
for name, module in policy.named_modules():
    if hasattr(module, "lora_A") and "default" in module.lora_A:
        up = module.lora_B["default"].weight
        up.copy_(torch.randn(up.shape, generator=draw) * 0.1)
        weights[name] = (module.lora_A["default"].weight.clone(), up.clone())
trained = policy_velocity()
messages = []


class Collect(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


logging.getLogger().addHandler(Collect())


def measure(file_name, tensors):
    path = os.path.join(lora_folder, file_name + ".safetensors")
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    messages.clear()
    lora = comfy.utils.load_torch_file(path, safe_load=True)
    loaded, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
    velocity = stock_velocity(loaded)
    loaded.unpatch_model()
    return {
        "file": path,
        "unmatched": len([text for text in messages if "not loaded" in text.lower()]),
        "patches": len(loaded.patches),
        "effect": distance(velocity, stock),
        "error": size(velocity - trained) / size(stock),
    }


for fmt in ("comfyui", "kohya"):
    good = export_lora(weights, 8.0, fmt)
    halved = {key: value / 2 if key.endswith(".alpha") else value for key, value in good.items()}
    # Module names that no loader knows.
    names = {"self_attn": "attn1", "cross_attn": "attn2", "ffn": "net"}
    renamed = dict(good)
    for old, new in names.items():
        renamed = {key.replace(old, new): value for key, value in renamed.items()}
    measurements = {
        "good": measure(fmt + "_good", good),
        "alpha_halved": measure(fmt + "_alpha_halved", halved),
        "renamed": measure(fmt + "_renamed", renamed),
    }
    report(modules=len(weights), **{fmt: measurements})
"""
