"""Small Wan model files for tests in the real ComfyUI."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness import run_in_comfy

from flashgrpo_core import embedded

FILE_SETS = ("random", "tiny")
MODEL_FOLDERS = {
    "transformer": "diffusion_models",
    "vae": "vae",
    "text_encoder": "text_encoders",
    "lora": "loras",
}


def embedded_files() -> dict[str, Path]:
    """Return the trained tiny Wan that the pack ships."""
    return {
        "transformer": embedded.TINY_TRANSFORMER,
        "vae": embedded.TINY_VAE,
        "text_encoder": embedded.TINY_TEXT_ENCODER,
    }


def random_files(folder: Path) -> dict[str, Path]:
    """Build a 2-block transformer (4 MB) and a VAE (1 MB) that the stock loaders accept.

    Unlike trained weights, no tensor is zero or near it: a module that a test misses, or a pair
    of swapped keys, shows.
    """
    files = {
        "transformer": folder / "random_wan_t2v.safetensors",
        "vae": folder / "random_wan_vae.safetensors",
    }
    run_in_comfy(_BUILD, folder, transformer=str(files["transformer"]), vae_file=str(files["vae"]))
    return files


def copy_models(files: dict[str, Path], models: Path) -> None:
    """Put model files where ComfyUI looks for them."""
    for kind, source in files.items():
        shutil.copyfile(source, models / MODEL_FOLDERS[kind] / source.name)


_BUILD = """
import torch
from safetensors.torch import save_file

import comfy.ldm.wan.model
import comfy.ldm.wan.vae
import comfy.ops

draw = torch.Generator().manual_seed(7)


def fill(network):
    state = {}
    for name, tensor in network.state_dict().items():
        noise = torch.randn(tensor.shape, generator=draw)
        scale = 1.0 if "norm" in name and name.endswith("weight") or "gamma" in name else 0.0
        fan_in = tensor[0].numel() if tensor.dim() > 1 else 25
        state[name] = (scale + noise * (fan_in**-0.5 if scale == 0.0 else 0.1)).contiguous()
    return state


transformer_ = comfy.ldm.wan.model.WanModel(
    model_type="t2v", dim=128, ffn_dim=16, num_layers=2, in_dim=16, out_dim=16, num_heads=1,
    text_dim=4096, operations=comfy.ops.disable_weight_init, dtype=torch.float32, device="cpu",
)
save_file(fill(transformer_), transformer)
vae_ = comfy.ldm.wan.vae.WanVAE(
    dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
    temperal_downsample=[False, True, True], dropout=0.0,
)
save_file(fill(vae_), vae_file)
"""
