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


def test_velocity_equals_diffusers(wan_files: dict[str, Path], tmp_path: Path) -> None:
    answer = run_in_comfy(
        _COMMON + "report(difference=distance(stock, ours), size=size(stock))",
        tmp_path,
        transformer=str(wan_files["transformer"]),
    )
    assert answer["size"] > 1e-2
    assert answer["difference"] <= 1e-4


def test_vae_equals_diffusers(wan_files: dict[str, Path], tmp_path: Path) -> None:
    answer = run_in_comfy(
        """
        import numpy as np
        import torch
        import comfy.sd
        import comfy.utils
        from flashgrpo_core.wan.vae import decode_latents, encode_video, load_vae

        draw = np.random.default_rng(3)
        coarse = draw.uniform(0, 255, (1, 9, 4, 4, 3)).repeat(16, 2).repeat(16, 3)
        video = coarse.astype(np.uint8)
        stock = comfy.sd.VAE(sd=comfy.utils.load_torch_file(vae))
        ours = load_vae(vae, torch.float32, "cpu")
        import comfy.latent_formats

        normal = comfy.latent_formats.Wan21()
        theirs = normal.process_in(stock.encode(torch.from_numpy(video[0]).float() / 255).float())
        latents = encode_video(ours, video)
        decoded = decode_latents(ours, latents)
        shown = stock.decode(normal.process_out(theirs))[0].clamp(0, 1) * 255
        report(
            shapes=[list(theirs.shape), list(latents.shape), list(decoded.shape)],
            latents=float((theirs - latents).abs().max()),
            pixels=float(np.abs(shown.round().numpy() - decoded[0]).max()),
        )
        """,
        tmp_path,
        vae=str(wan_files["vae"]),
    )
    assert answer["shapes"] == [[1, 16, 3, 8, 8], [1, 16, 3, 8, 8], [1, 9, 64, 64, 3]]
    assert answer["latents"] <= 1e-3
    assert answer["pixels"] <= 1.0  # one level: both round


@pytest.mark.parametrize("fmt", ["comfyui", "kohya"])
def test_exported_lora_equals_the_policy(
    wan_files: dict[str, Path], tmp_path: Path, fmt: str
) -> None:
    """At strength 1.0 the stock loader gives the trained policy, and the test can tell."""
    answer = run_in_comfy(
        _COMMON + _LORA, tmp_path, transformer=str(wan_files["transformer"]), fmt=fmt
    )
    good = answer["good"]
    assert good["unmatched"] == 0
    assert good["patches"] == answer["modules"] > 0
    assert good["effect"] >= 1e-2, "the adapter changes nothing measurable"
    assert good["error"] <= 1e-3 * good["effect"]
    # The same measurement must see a wrong file.
    halved = answer["alpha_halved"]
    assert halved["unmatched"] == 0
    assert halved["error"] > 0.1 * good["effect"]
    renamed = answer["renamed"]
    assert renamed["unmatched"] > 0
    assert renamed["error"] > 1e-3 * good["effect"]


def test_stock_lora_loader_changes_the_video(
    stock_server: ComfyServer, random_wan: dict[str, Path], tmp_path: Path
) -> None:
    run_in_comfy(
        _COMMON
        + _LORA
        + f"save_file(good, {str(stock_server.models / 'loras' / 'trained.safetensors')!r})",
        tmp_path,
        transformer=str(random_wan["transformer"]),
        fmt="comfyui",
    )
    names = (random_wan["transformer"].name, random_wan["vae"].name)
    base = pixels(frames(stock_server, sampling_prompt(*names)))
    with_lora = pixels(frames(stock_server, sampling_prompt(*names, "trained.safetensors")))
    assert abs(with_lora.astype(float) - base.astype(float)).mean() > 0.1
    assert "lora key not loaded" not in stock_server.log()
    assert "NOT LOADED" not in stock_server.log()


_COMMON = """
import torch
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
patcher = comfy.sd.load_diffusion_model(transformer, model_options=options)
policy, spec = load_transformer(transformer, torch.float32)
stock = stock_velocity(patcher)
ours = policy_velocity()
"""

_LORA = """
from peft import LoraConfig
from safetensors.torch import save_file
from flashgrpo_core.wan.lora import export_lora, target_modules

modules = target_modules(policy, ["attention", "ffn"])
policy.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=modules))
weights = {}
for name, module in policy.named_modules():
    if hasattr(module, "lora_A") and "default" in module.lora_A:
        up = module.lora_B["default"].weight
        up.copy_(torch.randn(up.shape, generator=draw) * 0.1)
        weights[name] = (module.lora_A["default"].weight.clone(), up.clone())
trained = policy_velocity()
good = {key: value.contiguous() for key, value in export_lora(weights, 8.0, fmt).items()}
halved = {k: v / 2 if k.endswith(".alpha") else v for k, v in good.items()}
renamed = {key.replace("self_attn", "attn1"): value for key, value in good.items()}
messages = []


class Collect(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


logging.getLogger().addHandler(Collect())


def measure(file_name, tensors):
    path = os.path.join(_job["base"], file_name + ".safetensors")
    save_file(tensors, path)
    messages.clear()
    lora = comfy.utils.load_torch_file(path, safe_load=True)
    loaded, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
    velocity = stock_velocity(loaded)
    loaded.unpatch_model()
    lost = [m for m in messages if "not loaded" in m.lower()]
    return {
        "unmatched": len(lost),
        "patches": len(loaded.patches),
        "effect": distance(velocity, stock),
        "error": size(velocity - trained) / size(stock),
    }


report(
    modules=len(weights),
    good=measure("good", good),
    alpha_halved=measure("alpha_halved", halved),
    renamed=measure("renamed", renamed),
)
"""
