"""Write a checkpoint with the shapes of Wan 2.1 T2V 1.3B and random weights of a sane scale.

For measuring memory and speed without the published weights:

    python benchmarks/make_wan_1_3b.py --out wan_1.3b_random.safetensors [--vae vae.safetensors]

The diffusion model is bf16 with ComfyUI's key names (2.84 GB), the optional VAE fp32 with diffusers'
(0.5 GB). Tensors are made and written one at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashgrpo_core.files import write_tensors  # noqa: E402
from flashgrpo_core.wan import names  # noqa: E402

WAN_1_3B = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
    "text_dim": 4096,
    "freq_dim": 256,
    "in_channels": 16,
    "out_channels": 16,
}


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Weights that keep activations of order one: fan-in scale, norms 1, biases near 0."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "norm" in name and len(shape) == 1 and name.endswith("weight") or name.endswith("gamma"):
        return (1.0 + 0.02 * noise).to(dtype)
    if len(shape) == 1:
        return (0.02 * noise).to(dtype)
    if name.endswith("modulation"):
        return (noise / math.sqrt(shape[-1])).to(dtype)
    return (noise / math.sqrt(math.prod(shape[1:]))).to(dtype)


def write_transformer(path: Path, settings: dict[str, int]) -> str:
    with torch.device("meta"):
        model = WanTransformer3DModel(**settings)
    layout = {}
    for name, tensor in model.state_dict().items():
        original = names.to_original(name)
        assert original is not None, name
        layout[original] = (torch.bfloat16, tuple(tensor.shape))
    return write_tensors(
        path, layout, lambda name: random_tensor(name, layout[name][1], torch.bfloat16)
    )


def write_vae(path: Path, base_dim: int) -> str:
    with torch.device("meta"):
        model = AutoencoderKLWan(base_dim=base_dim)
    layout = {n: (torch.float32, tuple(t.shape)) for n, t in model.state_dict().items()}
    return write_tensors(
        path, layout, lambda name: random_tensor(name, layout[name][1], torch.float32)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="diffusion model to write")
    parser.add_argument("--vae", type=Path, help="also write a random VAE here")
    parser.add_argument("--layers", type=int, default=30, help="fewer blocks for a quick look")
    args = parser.parse_args()
    print(args.out, write_transformer(args.out, {**WAN_1_3B, "num_layers": args.layers}))
    if args.vae:
        print(args.vae, write_vae(args.vae, 96))


if __name__ == "__main__":
    main()
