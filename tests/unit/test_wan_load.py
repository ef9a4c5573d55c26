"""Loading Wan diffusion models: layouts, number formats, strictness, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.files import open_tensors, save_tensors
from flashgrpo_core.wan import names
from flashgrpo_core.wan.detect import detect_transformer
from flashgrpo_core.wan.lora import describe
from flashgrpo_core.wan.transformer import load_transformer

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "num_attention_heads": 1,
    "attention_head_dim": 128,
    "text_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
}
ISLANDS = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")


def tiny(**changes) -> WanTransformer3DModel:
    """A random Wan of lively weights: norms, biases and modulations too, so that mix-ups show."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(**{**TINY, **changes}).eval()
    for name, parameter in model.named_parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
        torch.nn.init.normal_(parameter, std=fan_in**-0.5)
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1.0
        if name.endswith("scale_shift_table"):
            parameter.data.normal_(std=0.5)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> WanTransformer3DModel:
    return tiny()


def original(model: WanTransformer3DModel, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + names.to_original(key): value for key, value in model.state_dict().items()}


@torch.no_grad()
def output(model: WanTransformer3DModel, image_tokens: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    config = model.config
    dtype = model.patch_embedding.weight.dtype
    x = torch.randn(2, config.in_channels, 3, 8, 8, generator=generator).to(dtype)
    text = torch.randn(2, 512 if image_tokens else 7, config.text_dim, generator=generator)
    image = None
    if image_tokens:
        # First-last-frame models take the two images of a video as two batch entries.
        pair = 2 if config.pos_embed_seq_len else 1
        shape = (2 * pair, image_tokens // pair, config.image_dim)
        image = torch.randn(shape, generator=generator).to(dtype)
    timestep = torch.tensor([700.0, 250.0])
    return model(x, timestep, text.to(dtype), encoder_hidden_states_image=image).sample.float()


def relative(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


# ----------------------------------------------------------------------------- names, layouts


def test_names_map_both_ways_and_match_the_reference_conversion(model) -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    for network in (model, tiny(in_channels=36, image_dim=64, added_kv_proj_dim=128)):
        state = network.state_dict()
        turned = original(network)
        assert len(turned) == len(state)
        assert {names.to_diffusers(key) for key in turned} == set(state)
        reference = convert_wan_transformer_to_diffusers(dict(turned))
        assert all(torch.equal(reference[key], value) for key, value in state.items())
    assert names.to_original("blocks.0.norm2.weight") == "blocks.0.norm3.weight"
    assert names.to_diffusers("blocks.7.norm2") == "blocks.7.norm3"
    assert names.to_diffusers("blocks.0.ffn.20.weight") is None
    assert names.to_diffusers("blocks.0.self_attn.qq.weight") is None
    assert names.unflatten("blocks_12_cross_attn_k_img") == "blocks.12.attn2.add_k_proj"
    assert names.unflatten("blocks_0_attn1_to_out_0") == "blocks.0.attn1.to_out.0"
    assert names.unflatten("double_blocks_0_img_attn_qkv") is None


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_comfyui_layouts_are_exact(tmp_path, model, prefix: str) -> None:
    path = tmp_path / "wan.safetensors"
    save_tensors(path, original(model, prefix))
    loaded, spec = load_transformer(path, torch.float32)
    assert torch.equal(output(loaded), output(model))
    assert all(torch.equal(model.state_dict()[k], v) for k, v in loaded.state_dict().items())
    assert (spec.layout, spec.prefix) == ("original", prefix)
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert {t.device.type for t in [*loaded.parameters(), *loaded.buffers()]} == {"cpu"}


def test_diffusers_file_folder_shards_and_pipeline(tmp_path, model) -> None:
    single = tmp_path / "single.safetensors"
    save_tensors(single, model.state_dict())
    folder = tmp_path / "pipe" / "transformer"
    model.save_pretrained(folder)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="600KB")
    index = next(sharded.glob("*.index.json"))
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    for path in (single, folder, sharded, index, tmp_path / "pipe"):
        loaded, spec = load_transformer(path, torch.float32)
        assert torch.equal(output(loaded), output(model)), path
        assert spec.layout == "diffusers"
    (tmp_path / "pipe" / "transformer_2").mkdir()
    save_tensors(tmp_path / "pipe" / "transformer_2" / "x.safetensors", model.state_dict())
    with pytest.raises(FlashGRPOError, match="two experts.*high noise.*low noise"):
        load_transformer(tmp_path / "pipe", torch.float32)


def test_settings_that_only_the_folder_knows(tmp_path) -> None:
    """A head size other than 128 and an epsilon cannot be read from weights."""
    small = tiny(num_attention_heads=2, attention_head_dim=24, eps=1e-3)
    small.save_pretrained(tmp_path)
    loaded, spec = load_transformer(tmp_path, torch.float32)
    assert (spec.dim, spec.num_heads) == (48, 2)
    assert torch.equal(output(loaded), output(small))
    (tmp_path / "config.json").unlink()
    with pytest.raises(FlashGRPOError, match="width 48 is not a multiple of the head size 128"):
        load_transformer(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text('{"_class_name": "WanVACETransformer3DModel"}')
    with pytest.raises(FlashGRPOError, match="holds a WanVACETransformer3DModel"):
        load_transformer(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FlashGRPOError, match="not readable"):
        load_transformer(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("changes", "family", "image_tokens"),
    [
        ({"in_channels": 36, "image_dim": 64, "added_kv_proj_dim": 128}, "wan2.1-i2v", 5),
        ({"in_channels": 36}, "wan2.2-i2v-a14b", 0),
        ({"in_channels": 48, "out_channels": 48}, "wan2.2-ti2v-5b", 0),
        (
            {
                "in_channels": 36,
                "image_dim": 64,
                "added_kv_proj_dim": 128,
                "pos_embed_seq_len": 10,
            },
            "wan2.1-i2v",
            10,
        ),
    ],
)
def test_families(tmp_path, changes, family: str, image_tokens: int) -> None:
    network = tiny(**changes)
    path = tmp_path / "wan.safetensors"
    save_tensors(path, original(network))
    loaded, spec = load_transformer(path, torch.float32)
    assert spec.family == family
    assert torch.equal(output(loaded, image_tokens), output(network, image_tokens))


@pytest.mark.parametrize(
    ("sizes", "label"),
    [((12, 8960, 30), "1.3B"), ((40, 13824, 40), "14B"), ((24, 14336, 30), "5B")],
)
def test_published_sizes_are_recognised(tmp_path, sizes, label: str) -> None:
    """Only headers are read here, so the file is all shapes and no bytes on the disk."""
    heads, ffn, layers = sizes
    with torch.device("meta"):
        network = WanTransformer3DModel(
            num_attention_heads=heads, ffn_dim=ffn, num_layers=layers, text_dim=4096
        )
    header, offset = {}, 0
    for key, tensor in original(network).items():
        end = offset + 2 * tensor.numel()
        header[key] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    path = tmp_path / "wan.safetensors"
    with open(path, "wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + offset)  # sparse
    spec = detect_transformer(open_tensors(path))
    assert (spec.size, spec.num_heads, spec.text_dim) == (label, heads, 4096)
    assert (spec.weight_dtype, spec.quantisation) == ("bf16", "none")


# ------------------------------------------------------------------------------ number formats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_keep_their_fp32_islands(tmp_path, model, dtype) -> None:
    path = tmp_path / "wan.safetensors"
    save_tensors(path, {key: value.to(dtype) for key, value in original(model).items()})
    loaded, spec = load_transformer(path, dtype)
    for key, parameter in loaded.named_parameters():
        island = any(part in ISLANDS for part in key.split("."))
        assert parameter.dtype == (torch.float32 if island else dtype), key
    assert relative(output(loaded), output(model)) < 0.03
    widened, _ = load_transformer(path, torch.float32)
    assert {p.dtype for p in widened.parameters()} == {torch.float32}
    assert relative(output(widened), output(model)) < 0.01
    assert spec.weight_dtype == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def test_islands_are_those_of_diffusers(tmp_path, model) -> None:
    """The library's own loader gives every parameter the same dtype."""
    model.save_pretrained(tmp_path)
    theirs = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    ours, _ = load_transformer(tmp_path, torch.bfloat16)
    expected = {key: tensor.dtype for key, tensor in theirs.state_dict().items()}
    assert {key: tensor.dtype for key, tensor in ours.state_dict().items()} == expected
    assert torch.equal(output(ours), output(theirs))


def quantise(
    state: dict[str, torch.Tensor], style: str, dtype=torch.float8_e4m3fn, rows: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """An 8-bit file of a state dict as ComfyUI users have it, and the exact weights it stands for."""
    stored, exact = {}, {}
    for key, value in state.items():
        layer = key.startswith("blocks.") and value.ndim == 2 and "modulation" not in key
        if not layer:
            stored[key] = exact[key] = value
            continue
        if style == "plain":
            stored[key] = value.to(dtype)
            exact[key] = stored[key].float()
            continue
        largest = value.abs().amax(1, keepdim=True) if rows else value.abs().max()
        scale = largest / torch.finfo(dtype).max
        stored[key] = (value / scale).to(dtype)
        exact[key] = stored[key].float() * scale
        module = key.removesuffix(".weight")
        mark = json.dumps({"format": str(dtype).removeprefix("torch.")}).encode()
        if style == "old":
            stored[f"{module}.scale_weight"] = scale
            stored[f"{module}.scale_input"] = torch.tensor(1.0)
        else:
            stored[f"{module}.weight_scale"] = scale
            stored[f"{module}.input_scale"] = torch.tensor(1.0)
            stored[f"{module}.comfy_quant"] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
    if style == "old":
        stored["scaled_fp8"] = torch.empty(2, dtype=dtype)
    return stored, exact


def test_a_scaled_file_without_scales_is_refused(tmp_path, model) -> None:
    stored, _ = quantise(original(model, ""), "old", torch.float8_e4m3fn, False)
    path = tmp_path / "wan.safetensors"
    save_tensors(path, {k: v for k, v in stored.items() if not k.endswith("scale_weight")})
    with pytest.raises(FlashGRPOError, match="marked as scaled_fp8, but no weight has a scale"):
        load_transformer(path, torch.float32)


@pytest.mark.parametrize("style", ["plain", "old", "new"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rows", [False, True])
def test_8_bit_files(tmp_path, model, style: str, dtype, rows: bool) -> None:
    path = tmp_path / "wan.safetensors"
    stored, exact = quantise(original(model, ""), style, dtype, rows)
    save_tensors(path, {f"model.diffusion_model.{k}": v for k, v in stored.items()})
    loaded, spec = load_transformer(path, torch.float32)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, exact[names.to_original(key)]), key
    assert spec.quantisation == ("fp8" if style == "plain" else "fp8_scaled")
    assert (
        spec.weight_dtype
        == {
            torch.float8_e4m3fn: "fp8_e4m3fn",
            torch.float8_e5m2: "fp8_e5m2",
        }[dtype]
    )
    assert spec.parameters == sum(p.numel() for p in model.parameters())  # without scales
    bound = 0.06 if dtype == torch.float8_e4m3fn else 0.12
    assert relative(output(loaded), output(model)) < bound


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("marked", ["in each layer", "in the header"])
def test_int8_files_are_exact_and_stay_in_8_bits(tmp_path, model, rows: bool, marked: str) -> None:
    stored, exact, layers = {}, {}, {}
    for key, value in original(model).items():
        stored[key] = exact[key] = value
        if not key.startswith("blocks.") or value.ndim != 2 or "modulation" in key:
            continue
        scale = (value.abs().amax(1, keepdim=True) if rows else value.abs().max()) / 127
        stored[key] = (value / scale).round().to(torch.int8)
        exact[key] = stored[key].float() * scale
        module = key.removesuffix(".weight")
        stored[f"{module}.weight_scale"] = scale
        layers[module] = {"format": "int8_tensorwise", "convrot": False, "convrot_groupsize": 256}
        if marked == "in each layer":
            stored[f"{module}.comfy_quant"] = bytes_tensor(json.dumps(layers[module]))
    header = {} if marked == "in each layer" else {"layers": layers}
    path = tmp_path / "wan.safetensors"
    save_tensors(path, stored, {"_quantization_metadata": json.dumps(header)} if header else {})
    loaded, spec = load_transformer(path, torch.float32)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, exact[names.to_original(key)]), key
    assert (spec.quantisation, spec.weight_dtype) == ("int8_scaled", "int8")
    kept, _ = load_transformer(path, torch.float32, storage="fp8")
    assert kept.blocks[0].attn1.to_q.weight.dtype == torch.int8
    assert torch.equal(output(kept), output(loaded))
    assert relative(output(loaded), output(model)) < 0.03


def test_ignoring_the_scales_would_be_noticed(tmp_path, model) -> None:
    """The bound of the test above fails for the garbage that a naive loader produces."""
    stored, _ = quantise(original(model), "old")
    naive = {key: value for key, value in stored.items() if "scale" not in key}
    save_tensors(tmp_path / "wan.safetensors", naive)
    loaded, _ = load_transformer(tmp_path / "wan.safetensors", torch.float32)
    assert relative(output(loaded), output(model)) > 0.5


def test_format_named_in_the_header(tmp_path, model) -> None:
    stored, exact = quantise(original(model), "new")
    plain = {key: value for key, value in stored.items() if not key.endswith(".comfy_quant")}
    modules = [key.removesuffix(".weight_scale") for key in plain if key.endswith("weight_scale")]
    path = tmp_path / "wan.safetensors"

    def save(kind: str, tensors: dict[str, torch.Tensor]) -> None:
        layers = {"layers": {module: {"format": kind} for module in modules}}
        save_tensors(path, tensors, {"_quantization_metadata": json.dumps(layers)})

    save("float8_e4m3fn", plain)
    loaded, spec = load_transformer(path, torch.float32)
    key = "blocks.0.attn1.to_q.weight"
    assert torch.equal(loaded.state_dict()[key], exact[names.to_original(key)])
    assert spec.quantisation == "fp8_scaled"
    save("nvfp4", plain)
    with pytest.raises(FlashGRPOError, match="quantised as nvfp4 .*use the bf16"):
        load_transformer(path, torch.float32)
    unscaled = {key: value for key, value in plain.items() if not key.endswith("weight_scale")}
    save("float8_e4m3fn", unscaled)
    with pytest.raises(FlashGRPOError, match="announced as float8_e4m3fn but has no weight_scale"):
        load_transformer(path, torch.float32)
    save_tensors(path, plain, {"_quantization_metadata": "{"})
    with pytest.raises(FlashGRPOError, match="unreadable _quantization_metadata"):
        load_transformer(path, torch.float32)


def bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def test_other_quantisations_are_refused_by_name(tmp_path, model) -> None:
    path = tmp_path / "wan.safetensors"
    state = original(model)
    layer = "blocks.0.self_attn.q"
    int8 = torch.ones(128, 128, dtype=torch.int8)
    fp8 = torch.ones(128, 128).to(torch.float8_e4m3fn)

    def eight_bit(weight: torch.Tensor, mark: str) -> dict[str, torch.Tensor]:
        return {
            f"{layer}.weight": weight,
            f"{layer}.weight_scale": torch.tensor(0.1),
            f"{layer}.comfy_quant": bytes_tensor(mark),
        }

    cases = {
        "nvfp4": {f"{layer}.comfy_quant": bytes_tensor('{"format": "nvfp4"}')},
        "mxfp8": {f"{layer}.comfy_quant": bytes_tensor('{"format": "mxfp8"}')},
        "int8_tensorwise with convrot": {
            **eight_bit(int8, '{"format": "int8_tensorwise", "convrot": true}')
        },
        "float8_e4m3fn with novel_option": {
            **eight_bit(fp8, '{"format": "float8_e4m3fn", "novel_option": 1}')
        },
        "float8_e4m3fn in I8 tensors": {**eight_bit(int8, '{"format": "float8_e4m3fn"}')},
        "scales of type U8": {
            f"{layer}.weight": fp8,
            f"{layer}.weight_scale": torch.ones(1, dtype=torch.uint8),
        },
        "I8": {f"{layer}.weight": int8, f"{layer}.weight_scale": torch.tensor(0.1)},
        "block-wise scales": {f"{layer}.weight_scale": torch.ones(2, 2)},
        "bitsandbytes 4-bit": {f"{layer}.weight.absmax": torch.ones(4)},
    }
    for kind, change in cases.items():
        save_tensors(path, {**state, **change})
        with pytest.raises(FlashGRPOError, match=f"quantised as {kind}.*cannot be trained"):
            load_transformer(path, torch.float32)
    broken = {
        "unreadable quantisation mark": {f"{layer}.comfy_quant": bytes_tensor("{")},
        "a scale without its weight": {"blocks.9.self_attn.q.scale_weight": torch.tensor(1.0)},
        "is not finite": {f"{layer}.scale_weight": torch.tensor(float("nan"))},
    }
    for message, change in broken.items():
        save_tensors(path, {**state, **change})
        with pytest.raises(FlashGRPOError, match=message):
            load_transformer(path, torch.float32)


# ----------------------------------------------------------------------------------- failures


def test_missing_extra_and_misshapen_keys_are_listed(tmp_path, model) -> None:
    path = tmp_path / "wan.safetensors"
    state = original(model)
    without = {k: v for k, v in state.items() if k != "blocks.1.cross_attn.v.bias"}
    save_tensors(path, without)
    with pytest.raises(FlashGRPOError, match=r"missing: blocks\.1\.attn2\.to_v\.bias"):
        load_transformer(path, torch.float32)
    save_tensors(path, {**state, "blocks.0.lora_patch.weight": torch.ones(1)})
    with pytest.raises(FlashGRPOError, match=r"unknown: blocks\.0\.lora_patch\.weight"):
        load_transformer(path, torch.float32)
    save_tensors(path, {**state, "blocks.1.ffn.0.weight": torch.ones(63, 128)})
    with pytest.raises(FlashGRPOError, match=r"shape \[63, 128\], expected \[64, 128\]"):
        load_transformer(path, torch.float32)
    gap = {k.replace("blocks.1.", "blocks.2."): v for k, v in state.items()}
    save_tensors(path, gap)
    with pytest.raises(FlashGRPOError, match="not numbered without gaps"):
        load_transformer(path, torch.float32)
    save_tensors(path, {k: v for k, v in state.items() if "text_embedding" not in k})
    with pytest.raises(FlashGRPOError, match="`text_embedding.0.weight` is missing"):
        load_transformer(path, torch.float32)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (["decoder.middle.0.residual.0.gamma", "decoder.head.0.gamma"], "a Wan VAE"),
        (["encoder.block.0.layer.0.SelfAttention.q.weight"], "T5/UMT5 text encoder"),
        (["token_embedding.weight", "blocks.0.attn.q.weight"], "UMT5 text encoder in the original"),
        (["diffusion_model.blocks.0.self_attn.q.lora_A.weight"], "a LoRA"),
        (["lora_unet_blocks_0_self_attn_q.lora_down.weight"], "a LoRA"),
        (["double_blocks.0.img_attn.qkv.weight"], "Flux or HunyuanVideo"),
        (["model.diffusion_model.input_blocks.0.0.weight"], "Stable Diffusion"),
        (["vision_model.embeddings.x.weight"], "CLIP vision"),
        (["something.weight"], "an unknown model"),
    ],
)
def test_wrong_families_are_named(tmp_path, keys: list[str], kind: str) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {key: torch.ones(2, 2) for key in keys})
    with pytest.raises(FlashGRPOError, match=f"this is .*{kind}.*not a Wan diffusion model"):
        load_transformer(path, torch.float32)


def test_wan_variants_are_refused(tmp_path, model) -> None:
    path = tmp_path / "x.safetensors"
    variants = {
        "vace_patch_embedding.weight": "VACE",
        "control_adapter.conv.weight": "camera-control",
        "face_adapter.x.weight": "Animate",
    }
    for key, name in variants.items():
        save_tensors(path, {**original(model), key: torch.ones(2)})
        with pytest.raises(FlashGRPOError, match=f"Wan.*{name}.*not supported"):
            load_transformer(path, torch.float32)
    save_tensors(path, original(tiny(in_channels=52, out_channels=16)))
    with pytest.raises(FlashGRPOError, match="52 input and 16 output channels"):
        load_transformer(path, torch.float32)


def test_broken_containers(tmp_path, model) -> None:
    path = tmp_path / "wan.safetensors"
    save_file({k: v.contiguous() for k, v in original(model).items()}, path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(FlashGRPOError, match="truncated"):
        load_transformer(path, torch.float32)
    (tmp_path / "wan.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(FlashGRPOError, match="inference only"):
        load_transformer(tmp_path / "wan.gguf", torch.float32)
    torch.save(original(model), tmp_path / "wan.pt")
    with pytest.raises(FlashGRPOError, match="pickled"):
        load_transformer(tmp_path / "wan.pt", torch.float32)


# -------------------------------------------------------------------------------- description


def test_describe(tmp_path, model) -> None:
    path = tmp_path / "wan.safetensors"
    save_tensors(path, quantise(original(model), "old")[0], {"b": "2", "a": "1"})
    facts = describe(path)
    assert (facts["kind"], facts["title"]) == ("transformer", "Wan diffusion model (wan2.1-t2v)")
    assert (facts["dtype"], facts["quantisation"]) == ("fp8_e4m3fn", "fp8_scaled")
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["architecture"]["num_layers"] == 2
    assert facts["architecture"]["patch_size"] == [1, 2, 2]
    assert list(facts["metadata"].items()) == [("a", "1"), ("b", "2")]
    json.dumps(facts)
    small = tiny(num_attention_heads=2, attention_head_dim=24)
    small.save_pretrained(tmp_path / "pipe" / "transformer")
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    assert describe(tmp_path / "pipe")["architecture"]["num_heads"] == 2
    save_tensors(path, {"double_blocks.0.img_attn.qkv.weight": torch.ones(3, 2).half()})
    facts = describe(path)
    assert (facts["kind"], facts["dtype"], facts["parameters"]) == ("other", "fp16", 6)
    assert "Flux" in facts["title"]
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(FlashGRPOError, match="inference only"):
        describe(path)


# -------------------------------------------------------------------------- memory and imports


def test_peak_memory_and_no_comfyui_in_a_fresh_process(tmp_path) -> None:
    """Loading peaks at the model plus one tensor; the core imports nothing of ComfyUI.

    One process for both, because starting one takes seconds.
    """
    network = tiny(num_attention_heads=4, ffn_dim=4096, num_layers=6, text_dim=512)
    path = tmp_path / "wan.safetensors"
    save_tensors(path, {key: value.bfloat16() for key, value in original(network).items()})
    code = (
        "import sys, resource, torch\n"
        "import flashgrpo_core.wan.lora, flashgrpo_core.wan.text, flashgrpo_core.wan.vae\n"
        "from flashgrpo_core.wan.transformer import load_transformer\n"
        "torch.ones(64, 64) @ torch.ones(64, 64)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\n"
        "model, _ = load_transformer(sys.argv[1], torch.bfloat16)\n"
        "print(peak() - before)\n"
        "host = {'comfy', 'comfy_api', 'comfy_extras', 'folder_paths', 'nodes', 'server'}\n"
        "print(sorted(host & {name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    peak, host = done.stdout.splitlines()
    size = path.stat().st_size
    assert size > 60e6
    assert float(peak) < 1.25 * size + 8e6
    assert host == "[]"
