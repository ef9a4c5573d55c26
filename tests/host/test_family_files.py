"""Every Wan family in the real ComfyUI: the same velocity, the same sampling, LoRAs that match.

One ComfyUI process measures everything; the model files are small, random and in its own layout.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import run_in_comfy

from flashgrpo_core import embedded
from tests.training._family import FAMILIES, write_clip_vision, write_image, write_transformer


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("family")
    files: dict[str, list[str]] = {}
    for family, (changes, count) in FAMILIES.items():
        files[family] = [
            str(write_transformer(folder / f"{family}-{seed}.safetensors", seed, **changes))
            for seed in range(count)
        ]
    return run_in_comfy(
        _SCRIPT,
        folder,
        files=files,
        vae_file=str(embedded.TINY_VAE),
        clip_file=str(write_clip_vision(folder / "clip_vision.safetensors")),
        image_file=str(write_image(folder / "start.png", 1, (97, 61))),
        work=str(folder),
    )


def test_image_conditions_are_those_of_wan_image_to_video(measured: dict[str, Any]) -> None:
    assert measured["channels_shape"] == [20, 2, 4, 4]
    assert measured["channels_difference"] <= 1e-4
    assert measured["mask"] == [1.0, 0.0]
    assert measured["tokens_shape"] == [5, 1280]
    assert measured["tokens_difference"] <= 1e-4


@pytest.mark.parametrize("family", list(FAMILIES))
def test_velocity_is_comfyuis(measured: dict[str, Any], family: str) -> None:
    for expert in measured[family]["experts"]:
        assert expert["velocity_size"] > 1e-2
        assert expert["velocity_difference"] <= 1e-4


@pytest.mark.parametrize("family", list(FAMILIES))
def test_sampling_is_comfyuis(measured: dict[str, Any], family: str) -> None:
    """KSampler, or two KSamplers that split where the experts change, with guidance."""
    assert measured[family]["sample_difference"] <= 1e-3
    if FAMILIES[family][1] == 2:
        # Each expert sees several steps, and the other one in its place would show.
        assert 1 < measured[family]["split"] < 7
        assert measured[family]["split"] == measured[family]["switch"]
        assert measured[family]["swapped_difference"] > 1e-2


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_lora_matches_every_key(measured: dict[str, Any], family: str) -> None:
    for expert in measured[family]["experts"]:
        lora = expert["lora"]
        assert lora["unmatched"] == 0 and lora["patches"] == lora["modules"] > 0
        assert lora["effect"] >= 1e-2
        assert lora["error"] <= 1e-3 * lora["effect"]
    image = measured["wan2.1-i2v"]["experts"][0]["lora"]["modules"]
    assert image == measured["wan2.2-i2v-a14b"]["experts"][0]["lora"]["modules"] + 4


_SCRIPT = """
import logging

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

import comfy.clip_model
import comfy.clip_vision
import comfy.model_management
import comfy.ops
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from comfy_extras.nodes_wan import WanImageToVideo
from flashgrpo_core.conditioning import StartImage
from flashgrpo_core.experts import HIGH, LOW, TwoExperts, switch_step
from flashgrpo_core.files import open_tensors
from flashgrpo_core.policy import WanPolicy, adapter_pairs
from flashgrpo_core.ode import sample_ode
from flashgrpo_core.rollout import RolloutSettings
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.seeds import normal
from flashgrpo_core.wan.clip_vision import clip_vision_config, image_tokens, load_clip_vision
from flashgrpo_core.wan.lora import export_lora
from flashgrpo_core.wan.start_image import encode_channels, fit_image, read_image
from flashgrpo_core.wan.transformer import load_transformer
from flashgrpo_core.wan.vae import load_vae

torch.set_grad_enabled(False)
STEPS, SHIFT, GUIDANCE, GUIDANCE_LOW = 8, 5.0, 2.0, 1.5
draw = torch.Generator().manual_seed(5)
context, negative = (torch.randn(1, 512, 4096, generator=draw) for _ in range(2))


def size(tensor):
    return float(tensor.double().pow(2).mean().sqrt())


def distance(one, other):
    return size(one - other) / size(other)


# The conditions of image-to-video, theirs and ours.
stock_vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(vae_file))
our_vae = load_vae(vae_file, torch.float32, "cpu")
picture = read_image(image_file)
pixels = torch.from_numpy(np.asarray(Image.open(image_file).convert("RGB"))).float()[None] / 255

config = clip_vision_config(open_tensors(clip_file)).to_dict() | {"projection_dim": 16}
stock_clip = comfy.clip_model.CLIPVisionModelProjection(
    config, torch.float32, "cpu", comfy.ops.manual_cast
)
loaded = stock_clip.load_state_dict(comfy.utils.load_torch_file(clip_file), strict=False)
assert not loaded.missing_keys and not loaded.unexpected_keys, loaded
square = comfy.clip_vision.clip_preprocess(pixels, size=config["image_size"], crop=False)
clip_output = comfy.clip_vision.Output()
clip_output["penultimate_hidden_states"] = stock_clip(square, intermediate_output=-2)[1]
tokens = image_tokens(load_clip_vision(clip_file, "cpu", 1280), picture)
clip_theirs = clip_output["penultimate_hidden_states"][0]

empty = [[context, {}]], [[negative, {}]]
conditions = WanImageToVideo.execute(*empty, stock_vae, 32, 32, 5, 1, pixels, clip_output).result
channels = encode_channels(our_vae, fit_image(picture, 32, 32), 5)
image = StartImage(channels, tokens)
report(
    channels_shape=list(channels.shape),
    mask=[float(channels[:4, frame].mean()) for frame in range(2)],
    tokens_shape=list(tokens.shape),
    tokens_difference=distance(tokens, clip_theirs),
)

messages = []


class Collect(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


logging.getLogger().addHandler(Collect())


def velocity(patcher, x, timestep, known):
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    model, extra = patcher.model, {}
    t = torch.tensor([timestep])
    if known is not None:  # the given first frame of the 5B
        mask = torch.ones(1, 1, *x.shape[2:])
        mask[:, :, :1] = 0.0
        x = known * (1 - mask) + x * mask
        t = model.process_timestep(t, x, denoise_mask=mask)
    values = {k: v for k, v in conditions[0][0][1].items() if k.startswith("concat")}
    beside = model.concat_cond(noise=x, device="cpu", **values)
    if beside is not None:
        report(channels_difference=distance(channels, beside[0]))
        x = torch.cat([x, beside], 1)
    if model.diffusion_model.img_emb is not None:
        extra["clip_fea"] = clip_output["penultimate_hidden_states"]
    return model.diffusion_model(x, t, context=context, **extra)


def lora_of(policy, patcher, name, compare):
    policy.initialise(3)
    for key, parameter in policy.parameters().items():
        if key.endswith("lora_B"):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    pairs = adapter_pairs(policy.snapshot())
    path = os.path.join(work, name + "_lora.safetensors")
    save_file(export_lora(pairs, policy.alpha), path)
    base = compare(patcher)
    messages.clear()
    file = comfy.utils.load_torch_file(path, safe_load=True)
    with_lora, _ = comfy.sd.load_lora_for_models(patcher, None, file, 1.0, 0.0)
    theirs, ours = compare(with_lora), compare(None)
    with_lora.unpatch_model()
    policy.initialise(3)  # B is zero again
    return {
        "modules": len(pairs),
        "patches": len(with_lora.patches),
        "unmatched": len([text for text in messages if "not loaded" in text.lower()]),
        "effect": distance(theirs, base),
        "error": size(theirs - ours) / size(base),
    }


def sampled(patcher, noise, latent, guidance, first, last, mask, continued):
    # What KSamplerAdvanced does, without its random noise.
    shifted = ModelSamplingSD3().patch(patcher, SHIFT)[0]
    return comfy.sample.sample(
        shifted, torch.zeros_like(noise) if continued else noise, STEPS, guidance, "euler",
        "simple", *positive_negative, latent, disable_noise=continued, start_step=first,
        last_step=last, force_full_denoise=last >= STEPS, noise_mask=mask, disable_pbar=True,
    )


for family, paths in files.items():
    wide = family == "wan2.2-ti2v-5b"
    channel_count = 48 if wide else 16
    shape = (channel_count, 2, 4, 4)
    x = torch.randn(1, *shape, generator=draw)
    known = torch.randn(1, channel_count, 1, 4, 4, generator=draw) if wide else None
    start = StartImage(first=known[0]) if wide else image if "i2v" in family else None
    if family == "wan2.2-i2v-a14b":
        start = StartImage(channels)
    positive_negative = conditions[:2] if "i2v" in family else empty
    patchers, policies, experts = [], [], []
    for path, name in zip(paths, (HIGH, LOW) if len(paths) == 2 else ("",)):
        patcher = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float32})
        network, spec = load_transformer(path, torch.float32)
        targets = ["attention", "ffn"]
        targets += ["add_k_proj", "add_v_proj"] if spec.image_dim else []
        policy = WanPolicy(network, rank=4, alpha=8.0, targets=targets, name=name)

        def compare(patcher, policy=policy):
            if patcher is not None:
                return velocity(patcher, x, 731.0, known)[:, :, wide:]
            return policy.velocity(x, 731.0, context[0], image=start)[:, :, wide:]

        theirs = compare(patcher)
        experts.append({
            "velocity_difference": distance(compare(None), theirs),
            "velocity_size": size(theirs),
            "lora": lora_of(policy, patcher, os.path.basename(path), compare),
        })
        patchers.append(patcher)
        policies.append(policy)
    result = {"experts": experts}

    # Whole sampling, by the stock sampler and by ours.
    noise = normal(shape, 4)[None]
    latent, mask = torch.zeros(1, *shape), None
    model = patchers[0].model
    if wide:
        mask = torch.ones(1, 1, *shape[1:])
        mask[:, :, :1] = 0.0
        latent[:, :, :1] = model.process_latent_out(known)
        latent[:, :, 1:] = model.process_latent_out(latent[:, :, 1:])
    boundary = 0.9 if "i2v" in family else 0.875
    schedule = make_schedule("simple", STEPS, SHIFT)
    settings = RolloutSettings(shape, guidance=GUIDANCE)
    policy = policies[0]
    if len(paths) == 1:
        theirs = sampled(patchers[0], noise, latent, GUIDANCE, 0, STEPS, mask, False)
    else:
        sampling = ModelSamplingSD3().patch(patchers[0], SHIFT)[0].get_model_object("model_sampling")
        sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", STEPS)
        split = int((sigmas >= boundary).sum())

        def both(one, other):
            half = sampled(one, noise, latent, GUIDANCE, 0, split, mask, False)
            return sampled(other, noise, half, GUIDANCE_LOW, split, STEPS, mask, True)

        theirs, swapped = both(*patchers), both(*patchers[::-1])
        policy = TwoExperts(*policies, boundary)
        settings = RolloutSettings(shape, guidance=GUIDANCE, guidance_low=GUIDANCE_LOW)
        result |= {"split": split, "switch": switch_step(schedule, boundary)}
        result["swapped_difference"] = distance(swapped, theirs)
    ours = sample_ode(policy, [4], schedule, settings, context[0], negative[0], image=start)
    result["sample_difference"] = distance(ours, model.process_latent_in(theirs))
    report(**{family: result})
"""
