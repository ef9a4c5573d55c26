"""Wan VAEs 2.1 and 2.2: strict loading, latent normalisation, uint8 both ways."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.files import save_tensors
from flashgrpo_core.wan import vae as wan_vae
from flashgrpo_core.wan.decode import decode_latents, to_bytes
from flashgrpo_core.wan.lora import describe
from flashgrpo_core.wan.vae import encode_video, load_vae

KINDS = {
    "2.1": {"base_dim": 4},
    "2.2": {
        "base_dim": 4,
        "decoder_base_dim": 8,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": list(wan_vae.MEAN_22),
        "latents_std": list(wan_vae.STD_22),
    },
}


def build(version: str) -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(**KINDS[version]).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=list(KINDS))
def vae(request) -> tuple[str, AutoencoderKLWan]:
    return request.param, build(request.param)


def original_name(name: str, version: str) -> str:
    """The published name of a diffusers VAE parameter, written down independently."""
    fixed = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
    head, _, rest = name.partition(".")
    if head in fixed:
        return f"{fixed[head]}.{rest}"
    name = name.replace(".conv_in.", ".conv1.").replace(".conv_out.", ".head.2.")
    name = name.replace(".norm_out.", ".head.0.")
    for ours, theirs in (
        ("mid_block.resnets.0", "middle.0"),
        ("mid_block.attentions.0", "middle.1"),
        ("mid_block.resnets.1", "middle.2"),
    ):
        name = name.replace(ours, theirs)

    def stage(match: re.Match[str]) -> str:
        block, kind, layer = int(match[2]), match[3], int(match[4] or 0)
        side = "downsamples" if match[1] == "down" else "upsamples"
        last = 2 if match[1] == "down" else 3
        position = layer if kind == "resnets" else last
        if version == "2.2":
            return f"{side}.{block}.{side}.{position}."
        return f"{side}.{block * 4 + position}."

    name = re.sub(
        r"(down|up)_blocks\.(\d+)\.(resnets|upsamplers|upsampler|downsampler)\.(?:(\d+)\.)?",
        stage,
        name,
    )
    name = name.replace("down_blocks.", "downsamples.")  # 2.1 encoder: one flat list in both
    inner = {
        "norm1": "residual.0",
        "conv1": "residual.2",
        "norm2": "residual.3",
        "conv2": "residual.6",
    }
    match = re.match(r"^(.*(?:samples|middle)\.\d+(?:\.\w+samples\.\d+)?)\.(\w+)\.(.+)$", name)
    if match and match[2] in inner:
        name = f"{match[1]}.{inner[match[2]]}.{match[3]}"
    return name.replace("conv_shortcut", "shortcut")


def original(version: str, model: AutoencoderKLWan) -> dict[str, torch.Tensor]:
    return {original_name(key, version): value for key, value in model.state_dict().items()}


def movie(frames: int = 5) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, frames, 32, 48, 3), dtype=np.uint8)


def test_published_key_names(vae) -> None:
    """Names that the published files are known to have; ComfyUI detects by some of them."""
    version, model = vae
    keys = set(original(version, model))
    assert len(keys) == len(model.state_dict())
    assert {"conv1.weight", "conv2.bias", "decoder.middle.0.residual.0.gamma"} <= keys
    assert {"decoder.head.0.gamma", "encoder.middle.1.to_qkv.weight"} <= keys
    some = {
        "2.1": {
            "encoder.downsamples.2.resample.1.weight",
            "encoder.downsamples.3.shortcut.weight",
            "encoder.downsamples.5.time_conv.weight",
            "decoder.upsamples.3.resample.1.bias",
            "decoder.upsamples.4.shortcut.weight",
            "decoder.upsamples.14.residual.6.bias",
        },
        "2.2": {
            "encoder.downsamples.0.downsamples.2.resample.1.weight",
            "encoder.downsamples.1.downsamples.0.shortcut.weight",
            "decoder.upsamples.0.upsamples.0.residual.2.weight",
            "decoder.upsamples.0.upsamples.3.time_conv.weight",
            "decoder.upsamples.3.upsamples.2.residual.6.bias",
        },
    }[version]
    assert some <= keys


def test_conversion_of_2_1_matches_the_reference() -> None:
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    state = original("2.1", build("2.1"))
    reference = convert_wan_vae_to_diffusers(dict(state))
    assert {wan_vae.to_diffusers(key) for key in state} == set(reference)
    assert all(torch.equal(reference[wan_vae.to_diffusers(k)], v) for k, v in state.items())


@pytest.mark.parametrize("layout", ["original", "diffusers", "folder"])
def test_layouts_are_exact(tmp_path: Path, vae, layout: str) -> None:
    version, model = vae
    path = tmp_path / "vae.safetensors"
    if layout == "folder":
        path = tmp_path / "pipe"
        model.save_pretrained(path / "vae")
        (path / "model_index.json").write_text("{}")
    else:
        save_tensors(path, original(version, model) if layout == "original" else model.state_dict())
    loaded = load_vae(path, torch.float32)
    # Every weight is exact; the output differs by rounding, since the norm is computed differently.
    state = loaded.state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    latents, expected = encode_video(loaded, movie()), encode_video(model, movie())
    assert (latents - expected).abs().max() <= 1e-4 * expected.abs().max()
    one, two = decode_latents(loaded, latents), decode_latents(model, latents)
    assert np.abs(one.astype(int) - two.astype(int)).max() <= 1
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    facts = describe(path / "vae" if layout == "folder" else path)
    assert (facts["kind"], facts["title"]) == ("vae", f"Wan {version} VAE")
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())


def test_latents_are_normalised(vae) -> None:
    version, model = vae
    video = movie()
    factor, channels = {"2.1": (8, 16), "2.2": (16, 48)}[version]
    latents = encode_video(model, video)
    assert latents.shape == (2, channels, 2, 32 // factor, 48 // factor)
    assert latents.dtype == torch.float32
    x = torch.from_numpy(video).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    z = model.encode(x).latent_dist.mean
    mean = torch.tensor(model.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(model.config.latents_std).view(1, -1, 1, 1, 1)
    assert torch.allclose(latents * std + mean, z, atol=1e-5)
    pixels = model.decode(z).sample
    expected = ((pixels + 1) / 2).clamp(0, 1).mul(255).round().permute(0, 2, 3, 4, 1).numpy()
    decoded = decode_latents(model, latents)
    assert decoded.dtype == np.uint8 and decoded.shape == video.shape
    # The latents made a round trip through the normalisation: at most the last bit differs.
    assert np.abs(decoded.astype(int) - expected.astype(int)).max() <= 1


def test_published_statistics() -> None:
    assert len(wan_vae.MEAN_22) == len(wan_vae.STD_22) == 48
    assert min(wan_vae.STD_22) > 0.3
    assert abs(sum(wan_vae.MEAN_22) - -0.6294) < 0.5


def test_pixels_are_clamped_and_rounded() -> None:
    values = torch.tensor([-9.0, -1.0, -0.5, 0.0, 0.003, 0.005, 0.99, 1.0, 9.0])
    pixels = values.reshape(1, 1, 1, 1, -1).expand(1, 3, 1, 1, -1)
    decoded = to_bytes(pixels)
    assert decoded[0, 0, 0, :, 0].tolist() == [0, 0, 64, 128, 128, 128, 254, 255, 255]


def test_nan_is_an_error_that_names_the_remedy() -> None:
    broken = build("2.1")
    broken.decoder.conv_out.bias.data[0] = float("nan")
    with pytest.raises(FlashGRPOError, match="NaN.*float32, use fp32 or bf16"):
        decode_latents(broken, torch.zeros(1, 16, 1, 4, 4))


def test_shapes_that_do_not_fit() -> None:
    model = build("2.1")
    with pytest.raises(FlashGRPOError, match=r"\[1, 48, 1, 4, 4\] do not fit a VAE with 16"):
        decode_latents(model, torch.zeros(1, 48, 1, 4, 4))
    for shape in ((1, 4, 32, 32, 3), (1, 5, 30, 32, 3)):
        with pytest.raises(FlashGRPOError, match=r"4n\+1 frames and sides that are multiples of 8"):
            encode_video(model, np.zeros(shape, dtype=np.uint8))
    with pytest.raises(FlashGRPOError, match="pass uint8"):
        encode_video(model, np.zeros((1, 5, 32, 32, 3), dtype=np.float32))


def test_16_bit_and_8_bit_weights(tmp_path: Path) -> None:
    model = build("2.1")
    path = tmp_path / "vae.safetensors"
    save_tensors(path, {key: value.bfloat16() for key, value in original("2.1", model).items()})
    loaded = load_vae(path, torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    latents = encode_video(loaded, movie())
    assert latents.dtype == torch.float32
    wanted = encode_video(model, movie())
    assert (latents - wanted).norm() / wanted.norm() < 0.05


def test_failures(tmp_path: Path) -> None:
    path = tmp_path / "vae.safetensors"
    state = original("2.1", build("2.1"))
    save_tensors(path, {k: v for k, v in state.items() if k != "conv1.bias"})
    with pytest.raises(FlashGRPOError, match="missing: quant_conv.bias"):
        load_vae(path, torch.float32)
    save_tensors(path, {**state, "decoder.extra.weight": torch.ones(1)})
    with pytest.raises(FlashGRPOError, match="unknown: decoder.extra.weight"):
        load_vae(path, torch.float32)
    save_tensors(path, {**state, "conv1.bias": torch.ones(3)})
    with pytest.raises(FlashGRPOError, match=r"`conv1.bias` has shape \[3\], expected \[32\]"):
        load_vae(path, torch.float32)
    save_tensors(path, {"blocks.0.self_attn.q.lora_A.weight": torch.ones(1)})
    with pytest.raises(FlashGRPOError, match="this is a LoRA, not a Wan VAE"):
        load_vae(path, torch.float32)
    save_tensors(path, {"decoder.conv_in.weight": torch.ones(1)})
    with pytest.raises(FlashGRPOError, match="this is an image VAE, not a Wan VAE"):
        load_vae(path, torch.float32)
    strange = AutoencoderKLWan(base_dim=4, z_dim=5)
    save_tensors(path, strange.state_dict())
    with pytest.raises(FlashGRPOError, match="no latent statistics are known for 5 channels"):
        load_vae(path, torch.float32)
