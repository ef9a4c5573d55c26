"""LoRA files: exported ones give the trained policy at strength 1.0, foreign ones are understood."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from peft import LoraConfig
from safetensors.torch import save_file

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.files import save_tensors
from flashgrpo_core.wan import names
from flashgrpo_core.wan.detect import WanSpec
from flashgrpo_core.wan.lora import (
    LORA_FORMATS,
    LoraPair,
    describe,
    export_lora,
    export_metadata,
    lora_metadata,
    merge_lora,
    read_lora,
    target_modules,
)

RANK, ALPHA = 4, 8.0
Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]


def tiny(**changes) -> WanTransformer3DModel:
    torch.manual_seed(0)
    settings = {"num_attention_heads": 1, "text_dim": 32, "ffn_dim": 64, "num_layers": 2}
    model = WanTransformer3DModel(**{**settings, **changes}).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.requires_grad_(False)


@torch.no_grad()
def output(model: WanTransformer3DModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 3, 8, 8, generator=generator)
    text = torch.randn(2, 7, 32, generator=generator)
    return model(x, torch.tensor([700.0, 250.0]), text).sample


def trained(
    model: WanTransformer3DModel, targets: list[str]
) -> tuple[WanTransformer3DModel, Weights]:
    """The model with a PEFT adapter that does something, and the adapter's weights."""
    policy = copy.deepcopy(model)
    modules = target_modules(policy, targets)
    policy.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules), "policy")
    generator = torch.Generator().manual_seed(2)
    weights: Weights = {}
    for name in modules:
        layer = policy.get_submodule(name)
        pair = layer.lora_A["policy"].weight, layer.lora_B["policy"].weight
        for weight in pair:
            weight.data = 0.15 * torch.randn(weight.shape, generator=generator)
        weights[name] = pair
    return policy, weights


@pytest.fixture(scope="module")
def base() -> WanTransformer3DModel:
    return tiny()


@pytest.fixture(scope="module")
def policy(base) -> tuple[torch.Tensor, torch.Tensor, Weights]:
    """Output of the base, output of the trained policy, and its adapter."""
    network, weights = trained(base, ["attention", "ffn"])
    return output(base), output(network), weights


def effect_error(got: torch.Tensor, base: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error relative to the largest effect of the adapter."""
    return float((got - wanted).abs().max() / (wanted - base).abs().max())


# ------------------------------------------------------------------------------------ targets


def test_targets(base) -> None:
    attention = target_modules(base, ["attention"])
    assert len(attention) == 2 * 8 and attention[0] == "blocks.0.attn1.to_q"
    assert len(target_modules(base, ["ffn"])) == 2 * 2
    both = target_modules(base, ["ffn", "attention", "attn1.to_q"])
    assert len(both) == len(set(both)) == 2 * 10
    assert target_modules(base, ["attn1.to_q"]) == [f"blocks.{i}.attn1.to_q" for i in (0, 1)]
    assert target_modules(base, ["self_attn.q"]) == target_modules(base, ["attn1.to_q"])
    assert target_modules(base, ["blocks.1.ffn.net.2"]) == ["blocks.1.ffn.net.2"]
    assert target_modules(base, ["proj_out"]) == ["proj_out"]
    image = tiny(in_channels=36, image_dim=64, added_kv_proj_dim=128)
    assert len(target_modules(image, ["attention", "add_k_proj", "add_v_proj"])) == 2 * 10


@pytest.mark.parametrize("target", ["add_q_proj", "to_add_out", "o_q", "to_", "norm2", "ATTENTION"])
def test_a_target_without_a_match_is_an_error_with_examples(base, target: str) -> None:
    with pytest.raises(FlashGRPOError, match=f"`{target}` matches no linear module.*attn1.to_q"):
        target_modules(base, ["attention", target])


def test_no_targets(base) -> None:
    with pytest.raises(FlashGRPOError, match="lora_targets is empty"):
        target_modules(base, [])


def test_targets_are_the_same_with_adapters_attached(base) -> None:
    network, weights = trained(base, ["attention"])
    assert target_modules(network, ["attention"]) == list(weights)


# ------------------------------------------------------------------- export, checked by diffusers


def load_in_diffusers(base: WanTransformer3DModel, path: Path) -> torch.Tensor:
    """Output of the base with the file loaded as a diffusers user loads it."""
    network = copy.deepcopy(base)
    state, metadata = WanLoraLoaderMixin.lora_state_dict(str(path), return_lora_metadata=True)
    WanLoraLoaderMixin.load_lora_into_transformer(state, transformer=network, metadata=metadata)
    assert any("lora_A" in name for name, _ in network.named_parameters())
    return output(network)


def write(path: Path, weights: Weights, fmt: str) -> Path:
    save_tensors(path, export_lora(weights, ALPHA, fmt), export_metadata(weights, ALPHA, fmt))
    return path


@pytest.mark.parametrize("fmt", LORA_FORMATS)
def test_export_is_the_policy_in_diffusers(tmp_path, base, policy, fmt: str) -> None:
    without, wanted, weights = policy
    assert (wanted - without).abs().max() >= 1e-2 * without.abs().max()
    path = write(tmp_path / "lora.safetensors", weights, fmt)
    assert effect_error(load_in_diffusers(base, path), without, wanted) < 1e-3


@pytest.mark.parametrize("fmt", LORA_FORMATS)
def test_export_is_the_policy_when_merged(tmp_path, base, policy, fmt: str) -> None:
    without, wanted, weights = policy
    network = copy.deepcopy(base)
    path = write(tmp_path / "lora.safetensors", weights, fmt)
    assert merge_lora(network, read_lora(path)) == len(weights)
    assert effect_error(output(network), without, wanted) < 1e-3


@pytest.mark.parametrize("fmt", ["comfyui", "kohya"])
def test_the_check_fails_when_alpha_is_halved(tmp_path, base, policy, fmt: str) -> None:
    without, wanted, weights = policy
    tensors = export_lora(weights, ALPHA, fmt)
    wrong = {k: v / 2 if k.endswith(".alpha") else v for k, v in tensors.items()}
    save_tensors(tmp_path / "lora.safetensors", wrong)
    assert (
        effect_error(load_in_diffusers(base, tmp_path / "lora.safetensors"), without, wanted) > 0.1
    )


def test_the_check_fails_without_the_alpha_of_the_header(tmp_path, base, policy) -> None:
    without, wanted, weights = policy
    save_tensors(tmp_path / "lora.safetensors", export_lora(weights, ALPHA, "diffusers"))
    assert (
        effect_error(load_in_diffusers(base, tmp_path / "lora.safetensors"), without, wanted) > 0.1
    )


def test_the_check_fails_when_keys_are_renamed(tmp_path, base, policy) -> None:
    without, wanted, weights = policy
    tensors = export_lora(weights, ALPHA, "comfyui")
    swapped = {key.replace("self_attn.q", "self_attn.k_"): v for key, v in tensors.items()}
    swapped = {key.replace("self_attn.k.", "self_attn.q."): v for key, v in swapped.items()}
    swapped = {key.replace("self_attn.k_", "self_attn.k"): v for key, v in swapped.items()}
    save_tensors(tmp_path / "lora.safetensors", swapped)
    assert (
        effect_error(load_in_diffusers(base, tmp_path / "lora.safetensors"), without, wanted) > 0.05
    )


def test_attention_only_comfyui_loads_and_kohya_warns(tmp_path, base, caplog) -> None:
    """Attention is the default target; diffusers reads it in the default format only."""
    network, weights = trained(base, ["attention"])
    without, wanted = output(base), output(network)
    path = write(tmp_path / "a.safetensors", weights, "comfyui")
    assert effect_error(load_in_diffusers(base, path), without, wanted) < 1e-3
    assert not caplog.records
    path = write(tmp_path / "b.safetensors", weights, "kohya")
    assert "diffusers does not" in caplog.text
    with pytest.raises(KeyError):
        load_in_diffusers(base, path)


def test_modules_outside_the_blocks_are_exported_with_the_scale_inside(tmp_path, base) -> None:
    targets = ["attention", "ffn", "time_projection.1", "proj_out", "text_embedding.0"]
    targets += ["text_embedding.2"]
    network, weights = trained(base, targets)
    without, wanted = output(base), output(network)
    path = write(tmp_path / "a.safetensors", weights, "comfyui")
    assert effect_error(load_in_diffusers(base, path), without, wanted) < 1e-3
    merged = copy.deepcopy(base)
    merge_lora(merged, read_lora(path))
    assert effect_error(output(merged), without, wanted) < 1e-3


def test_mixed_ranks_in_diffusers_format(tmp_path, base) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = {
        f"blocks.{i}.attn1.to_{part}": (
            0.2 * torch.randn(rank, 128, generator=generator),
            0.2 * torch.randn(128, rank, generator=generator),
        )
        for i, part, rank in ((0, "q", 2), (1, "q", 4), (0, "k", 4))
    }
    merged = copy.deepcopy(base)
    pairs = read_lora(write(tmp_path / "a.safetensors", weights, "diffusers"))
    merge_lora(merged, pairs)
    assert [pair.scale for pair in pairs.values()] == [ALPHA / 4, ALPHA / 2, ALPHA / 4]
    got = load_in_diffusers(base, tmp_path / "a.safetensors")
    assert effect_error(got, output(base), output(merged)) < 1e-3


def test_exported_keys_and_dtypes(policy) -> None:
    _, _, weights = policy
    half = {name: (a.bfloat16(), b.bfloat16()) for name, (a, b) in weights.items()}
    tensors = export_lora(half, ALPHA, "comfyui")
    key = "diffusion_model.blocks.0.self_attn.q"
    assert tensors[f"{key}.alpha"].shape == () and tensors[f"{key}.alpha"] == ALPHA
    assert tensors[f"{key}.lora_A.weight"].dtype == torch.bfloat16
    assert len(tensors) == 3 * len(weights)
    kohya = export_lora(weights, ALPHA, "kohya")
    assert "lora_unet_blocks_1_ffn_2.lora_up.weight" in kohya
    assert all(not t.requires_grad for t in kohya.values())


def test_what_cannot_be_exported(policy) -> None:
    _, _, weights = policy
    good = weights["blocks.0.attn1.to_q"]
    cases = [
        (weights, ALPHA, "safetensors", "unknown; use comfyui, kohya, diffusers"),
        ({}, ALPHA, "comfyui", "no modules"),
        (weights, 0.0, "comfyui", "not positive"),
        (weights, math.nan, "comfyui", "not positive"),
        ({"attn1.to_q": good}, ALPHA, "comfyui", "no module of Wan"),
        ({"blocks.0.attn1.to_q": (good[0], good[0])}, ALPHA, "comfyui", "do not multiply"),
    ]
    for tensors, alpha, fmt, message in cases:
        with pytest.raises(FlashGRPOError, match=message):
            export_lora(tensors, alpha, fmt)


# ------------------------------------------------------------------------------------ reading


def spelled(weights: Weights, spell) -> dict[str, torch.Tensor]:
    """A state dict of the weights; `spell(diffusers, original)` gives the keys of A, B, alpha."""
    state = {}
    for name, (a, b) in weights.items():
        keys = spell(name, names.to_original(name))
        state[keys[0]], state[keys[1]] = a.detach(), b.detach()
        if len(keys) > 2:
            state[keys[2]] = torch.tensor(ALPHA)
    return state


SPELLINGS = {
    "comfyui": lambda d, o: [
        f"diffusion_model.{o}.{x}" for x in ("lora_A.weight", "lora_B.weight", "alpha")
    ],
    "comfyui down/up": lambda d, o: [
        f"diffusion_model.{o}.{x}" for x in ("lora_down.weight", "lora_up.weight", "alpha")
    ],
    "bare A": lambda d, o: [f"diffusion_model.{o}.{x}" for x in ("lora_A", "lora_B", "alpha")],
    "kohya": lambda d, o: [
        f"lora_unet_{o.replace('.', '_')}.{x}"
        for x in ("lora_down.weight", "lora_up.weight", "alpha")
    ],
    "wan-fun": lambda d, o: [
        f"lora_unet__{o.replace('.', '_')}.{x}"
        for x in ("lora_down.weight", "lora_up.weight", "alpha")
    ],
    "lycoris": lambda d, o: [
        f"lycoris_{o.replace('.', '_')}.{x}"
        for x in ("lora_down.weight", "lora_up.weight", "alpha")
    ],
    "diffusers": lambda d, o: [
        f"transformer.{d}.{x}" for x in ("lora_A.weight", "lora_B.weight", "alpha")
    ],
    "older diffusers": lambda d, o: [
        f"transformer.{d}.{x}" for x in ("lora.down.weight", "lora.up.weight", "alpha")
    ],
    "musubi from diffusers": lambda d, o: [
        f"transformer.{o}.{x}" for x in ("lora_A.weight", "lora_B.weight", "alpha")
    ],
    "peft": lambda d, o: [
        f"base_model.model.{d}.{x}" for x in ("lora_A.weight", "lora_B.weight", "alpha")
    ],
    "live peft": lambda d, o: [
        f"{d}.{x}" for x in ("lora_A.policy.weight", "lora_B.policy.weight", "alpha")
    ],
    "diffsynth": lambda d, o: [
        f"{o}.{x}" for x in ("lora_A.default.weight", "lora_B.default.weight", "alpha")
    ],
    "diffsynth pipe": lambda d, o: [
        f"pipe.dit.{o}.{x}" for x in ("lora_A.default.weight", "lora_B.default.weight", "alpha")
    ],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_read(policy, spelling: str) -> None:
    _, _, weights = policy
    pairs = read_lora(spelled(weights, SPELLINGS[spelling]))
    assert list(pairs) == sorted(weights)
    for name, (a, b) in weights.items():
        assert torch.equal(pairs[name].A, a) and torch.equal(pairs[name].B, b)
        assert pairs[name].scale == ALPHA / RANK
    without_alpha = spelled(weights, lambda d, o: SPELLINGS[spelling](d, o)[:2])
    assert {pair.scale for pair in read_lora(without_alpha).values()} == {1.0}


def test_peft_folder_gives_alpha_and_rslora(tmp_path, base) -> None:
    for rslora, scale in ((False, ALPHA / RANK), (True, ALPHA / math.sqrt(RANK))):
        network = copy.deepcopy(base)
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["to_q"], use_rslora=rslora)
        from peft import get_peft_model

        wrapped = get_peft_model(network, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        folder = tmp_path / str(rslora)
        wrapped.save_pretrained(folder)
        pairs = read_lora(folder)
        assert len(pairs) == 4
        assert all(math.isclose(pair.scale, scale) for pair in pairs.values())
        merged = copy.deepcopy(base)
        merge_lora(merged, read_lora(folder / "adapter_model.safetensors"))
        assert effect_error(output(merged), output(base), output(network)) < 1e-3


def test_foreign_checks(policy) -> None:
    _, _, weights = policy
    good = spelled(weights, SPELLINGS["comfyui"])
    key = "diffusion_model.blocks.0.self_attn.q"
    cases = {
        "1 of 61 keys name no Wan module": {
            "diffusion_model.blocks.0.self_attn.w.lora_A.weight": 0
        },
        "DoRA adapter": {f"{key}.dora_scale": torch.ones(128)},
        "LoHa adapter": {f"{key}.hada_w1_a": torch.ones(4, 4)},
        "LoKr adapter": {f"{key}.lokr_w1": torch.ones(4, 4)},
        "middle matrix": {f"{key}.lora_mid.weight": torch.ones(4, 4)},
        "two `A` entries": {f"{key}.lora_down.weight": torch.ones(4, 128)},
        "not finite": {f"{key}.lora_A.weight": torch.full((4, 128), math.nan)},
        "ranks differ": {f"{key}.lora_A.weight": torch.ones(3, 128)},
        "alpha of .* has 2 values": {f"{key}.alpha": torch.ones(2)},
        "lacks its lora_B": {"diffusion_model.head.head.lora_A.weight": torch.ones(4, 128)},
        "lacks its lora_A": {"diffusion_model.head.head.lora_B.weight": torch.ones(64, 4)},
        "has an alpha but no weights": {"diffusion_model.head.head.alpha": torch.ones(())},
    }
    for message, change in cases.items():
        change = {
            k: v if isinstance(v, torch.Tensor) else torch.ones(4, 4) for k, v in change.items()
        }
        with pytest.raises(FlashGRPOError, match=message):
            read_lora({**good, **change})
    with pytest.raises(FlashGRPOError, match="LoRA that was trained on Wan"):
        read_lora({"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": torch.ones(4, 4)})
    with pytest.raises(FlashGRPOError, match="no tensors"):
        read_lora({})


def test_damaged_settings(tmp_path, policy) -> None:
    _, _, weights = policy
    tensors = export_lora(weights, ALPHA, "diffusers")
    path = tmp_path / "x.safetensors"
    for text in ("{", "[1]", '{"transformer.lora_alpha": "x"}'):
        save_tensors(path, tensors, {"lora_adapter_metadata": text})
        with pytest.raises(FlashGRPOError, match="unreadable LoRA settings"):
            read_lora(path)
    save_tensors(path, tensors, {"lora_adapter_metadata": '{"transformer.use_dora": true}'})
    with pytest.raises(FlashGRPOError, match="a DoRA adapter"):
        read_lora(path)


# -------------------------------------------------------------------------------------- merging


def test_merge_is_the_sum_in_fp32_rounded_once(base) -> None:
    network = copy.deepcopy(base).bfloat16()
    before = network.blocks[0].attn1.to_q.weight.clone()
    pair = LoraPair(torch.randn(4, 128), torch.randn(128, 4), alpha=8.0)
    merge_lora(network, {"blocks.0.attn1.to_q": pair}, strength=0.5)
    wanted = (before.float() + 0.5 * 2.0 * pair.B @ pair.A).bfloat16()
    assert torch.equal(network.blocks[0].attn1.to_q.weight, wanted)


def test_merge_of_plain_differences(base) -> None:
    """`.diff` and `.diff_b`: norms, biases, the patch convolution and modulation tables."""
    network = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(4)
    changes = {
        "blocks.0.self_attn.q.diff": network.blocks[0].attn1.to_q.weight,
        "blocks.0.self_attn.q.diff_b": network.blocks[0].attn1.to_q.bias,
        "blocks.0.norm3.diff": network.blocks[0].norm2.weight,
        "blocks.1.modulation.diff": network.blocks[1].scale_shift_table,
        "patch_embedding.diff": network.patch_embedding.weight,
        "head.modulation.diff": network.scale_shift_table,
    }
    before = {key: parameter.clone() for key, parameter in changes.items()}
    state = {
        f"diffusion_model.{key}": torch.randn(p.shape, generator=generator)
        for key, p in changes.items()
    }
    merge_lora(network, read_lora(state), strength=2.0)
    for key, parameter in changes.items():
        wanted = before[key] + 2.0 * state[f"diffusion_model.{key}"]
        assert torch.allclose(parameter, wanted), key


def test_merge_of_a_convolution_pair(base) -> None:
    network = copy.deepcopy(base)
    before = network.patch_embedding.weight.clone()
    a, b = torch.randn(4, 16, 1, 2, 2), torch.randn(128, 4, 1, 1, 1)
    state = {
        "diffusion_model.patch_embedding.lora_down.weight": a,
        "diffusion_model.patch_embedding.lora_up.weight": b,
    }
    merge_lora(network, read_lora(state))
    delta = torch.einsum("or,richw->oichw", b[:, :, 0, 0, 0], a)
    assert torch.allclose(network.patch_embedding.weight, before + delta, atol=1e-5)


def test_merge_below_an_adapter_changes_the_base_only(base) -> None:
    network, weights = trained(base, ["attention"])
    name = "blocks.0.attn1.to_q"
    before = network.get_submodule(name).base_layer.weight.clone()
    pair = LoraPair(torch.randn(4, 128), torch.randn(128, 4), alpha=4.0)
    merge_lora(network, {name: pair})
    after = network.get_submodule(name).base_layer.weight
    assert torch.allclose(after, before + pair.B @ pair.A, atol=1e-5)


def test_a_lora_of_another_model_changes_nothing(base) -> None:
    network = copy.deepcopy(base)
    good = LoraPair(torch.ones(4, 128), torch.ones(128, 4), alpha=4.0)
    wide = LoraPair(torch.ones(4, 256), torch.ones(256, 4), alpha=4.0)
    cases = {
        "made for a model of another size": {"blocks.1.attn1.to_q": wide},
        r"1 entries that this model lacks \(blocks\.7": {"blocks.7.attn1.to_q": good},
        "image layers exist in Wan 2.1 image-to-video only": {"blocks.0.attn2.add_k_proj": good},
    }
    for message, entry in cases.items():
        with pytest.raises(FlashGRPOError, match=message):
            merge_lora(network, {"blocks.0.attn1.to_q": good, **entry})
        assert torch.equal(network.blocks[0].attn1.to_q.weight, base.blocks[0].attn1.to_q.weight)


# --------------------------------------------------------------------------- header, description


SPEC = WanSpec(
    family="wan2.1-t2v",
    size="1.3B",
    layout="original",
    prefix="",
    dim=1536,
    ffn_dim=8960,
    num_layers=30,
    num_heads=12,
    in_channels=16,
    out_channels=16,
    text_dim=4096,
    freq_dim=256,
    patch_size=(1, 2, 2),
    image_dim=None,
    added_kv_proj_dim=None,
    pos_embed_seq_len=None,
    cross_attn_norm=True,
    weight_dtype="bf16",
    quantisation="none",
    parameters=1,
)


def test_header() -> None:
    header = lora_metadata(
        name="kittens",
        spec=SPEC,
        rank=16,
        alpha=32,
        base_file="/home/someone/models/wan2.1_t2v_1.3B_bf16.safetensors",
        iteration=40,
        trained_sigmas=(1.0, 0.8),
        rewards={"motion": 0.5, "technical": 1.0},
        extra={"lora_adapter_metadata": "{}"},
    )
    assert list(header) == sorted(header)
    assert all(isinstance(value, str) and value for value in header.values())
    assert header["ss_network_module"] == "networks.lora"
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("16", "32.0")
    assert header["ss_sd_model_name"] == "wan2.1_t2v_1.3B_bf16.safetensors"
    assert header["modelspec.architecture"] == "wan2.1/lora"
    assert json.loads(header["flashgrpo.rewards"]) == {"motion": 0.5, "technical": 1.0}
    assert "/home" not in str(header) and "time" not in str(list(header))
    with pytest.raises(FlashGRPOError, match="expert 'high' is unknown"):
        lora_metadata(name="x", spec=SPEC, rank=1, alpha=1, base_file="x", expert="high")


def test_describe_loras(tmp_path, policy) -> None:
    _, _, weights = policy
    path = tmp_path / "lora.safetensors"
    for fmt in LORA_FORMATS:
        write(path, weights, fmt)
        facts = describe(path)
        assert (facts["kind"], facts["format"], facts["modules"]) == ("lora", fmt, len(weights))
        assert (facts["ranks"], facts["alphas"]) == ([RANK], [ALPHA])
        assert facts["effective_scales"] == [ALPHA / RANK]
        assert facts["unmatched"] == [] and facts["matched"] == facts["keys"]
        json.dumps(facts)
    tensors = {**export_lora(weights, ALPHA), "lora_te_text_model.lora_down.weight": torch.ones(2)}
    save_file(tensors, path, {"ss_tag": "x"})
    facts = describe(path)
    assert facts["unmatched"] == ["lora_te_text_model.lora_down.weight"]
    assert facts["matched"] == facts["keys"] - 1
    assert facts["metadata"] == {"ss_tag": "x"}
