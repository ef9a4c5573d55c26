"""8-bit storage and weights in host memory: same numbers, all gradients, less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.files import save_tensors
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.wan import names
from flashgrpo_core.wan.lora import LoraPair, merge_lora
from flashgrpo_core.wan.recompute import checkpoint_blocks
from flashgrpo_core.wan.storage import StoredLinear, quantise, resident_bytes
from flashgrpo_core.wan.transformer import load_transformer
from tests.unit._memory import peak_bytes

LINEARS = 2 * 10  # two blocks with four projections in each attention and two layers of the ffn


@pytest.fixture(scope="module")
def base() -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, text_dim=32, ffn_dim=256, num_layers=2
    )
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
        torch.nn.init.normal_(parameter, std=fan_in**-0.5)
    return model.eval().requires_grad_(False)


def file_of(model: WanTransformer3DModel, path: Path, kind: str) -> Path:
    """The model as ComfyUI files have it: fp32, plain fp8, or scaled fp8."""
    tensors = {}
    for key, value in model.state_dict().items():
        name = names.to_original(key)
        if kind == "fp32" or value.ndim != 2 or not key.startswith("blocks."):
            tensors[name] = value
        elif kind == "fp8":
            tensors[name] = value.to(torch.float8_e4m3fn)
        else:
            scale = value.abs().max() / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale_weight"] = scale
    if kind == "fp8_scaled":
        tensors["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    save_tensors(path, tensors)
    return path


def velocity(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 3, 8, 8, generator=generator)
    text = torch.randn(2, 7, 32, generator=generator)
    dtype = model.patch_embedding.weight.dtype
    return model(x.to(dtype), torch.tensor([700.0, 250.0]), text.to(dtype)).sample.float()


def stored(model: torch.nn.Module) -> list[StoredLinear]:
    return [module for module in model.modules() if isinstance(module, StoredLinear)]


@pytest.mark.parametrize("kind", ["fp8", "fp8_scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_files_stay_so_and_compute_the_same(base, tmp_path, kind, dtype) -> None:
    path = file_of(base, tmp_path / "w.safetensors", kind)
    full, _ = load_transformer(path, dtype)
    kept, spec = load_transformer(path, dtype, storage="fp8")
    assert spec.quantisation == kind
    assert len(stored(kept)) == LINEARS
    assert {layer.weight.dtype for layer in stored(kept)} == {torch.float8_e4m3fn}
    with torch.no_grad():
        assert torch.equal(velocity(kept), velocity(full))


def test_other_files_are_rounded_row_by_row(base, tmp_path) -> None:
    path = file_of(base, tmp_path / "w.safetensors", "fp32")
    full, _ = load_transformer(path, torch.float32)
    kept, _ = load_transformer(path, torch.float32, storage="fp8")
    with torch.no_grad():
        error = (velocity(kept) - velocity(full)).norm() / velocity(full).norm()
    assert 1e-3 < error < 0.05  # 3 bits of mantissa: 3.6 % at most per weight
    weight = torch.tensor([[448.0, 1.0], [0.0, 0.0], [-1e-3, 5e-4]])
    rounded, scale = quantise(weight)
    assert scale.tolist() == pytest.approx([1.0, 1.0, 1e-3 / 448])
    assert (rounded.float() * scale[:, None]).tolist()[0] == [448.0, 1.0]


@pytest.mark.parametrize("storage", ["full", "fp8"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_the_full_model(base, tmp_path, storage, checkpointing) -> None:
    """Swapped, in 8 bits and recomputed: each LoRA matrix gets the same gradient."""
    path = file_of(base, tmp_path / "w.safetensors", "fp8_scaled")

    def gradients(**options) -> dict[str, torch.Tensor]:
        checkpoint = options.pop("checkpointing", False)
        model, _ = load_transformer(path, torch.float32, **options)
        policy = WanPolicy(
            model, rank=4, targets=["attention", "ffn"], gradient_checkpointing=checkpoint
        )
        with torch.no_grad():
            for name, parameter in policy.parameters().items():
                assert parameter.dtype == torch.float32, name
                if name.endswith("lora_B"):
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
        velocity(model).square().sum().backward()
        return {name: p.grad for name, p in policy.parameters().items()}

    wanted = gradients()
    got = gradients(storage=storage, blocks_to_swap=1, checkpointing=checkpointing)
    assert len(wanted) == 2 * LINEARS
    total = sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
    for name, gradient in wanted.items():
        assert float(gradient.norm()) > 0, name
        assert float((got[name] - gradient).norm()) <= 1e-5 * total, name


def test_the_graph_keeps_no_weights(base, tmp_path) -> None:
    """Tensors that a forward keeps for its backward pass hold no weight in the compute type."""
    path = file_of(base, tmp_path / "w.safetensors", "fp8_scaled")
    shapes = {(128, 128), (256, 128), (128, 256)}

    def kept(storage: str) -> int:
        model, _ = load_transformer(path, torch.float32, storage=storage)
        WanPolicy(model, rank=4, targets=["attention"])
        seen: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if (
                tuple(tensor.shape) in shapes
                or tuple(tensor.t().shape if tensor.ndim == 2 else ()) in shapes
            ):
                seen.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            velocity(model)
        return len(seen)

    assert kept("full") > 0
    assert kept("fp8") == 0


def test_swapped_weights_stay_in_host_memory(base, tmp_path) -> None:
    path = file_of(base, tmp_path / "w.safetensors", "fp32")
    model, _ = load_transformer(path, torch.float32, blocks_to_swap=1)
    assert len(stored(model)) == LINEARS // 2
    assert all(
        name.startswith("blocks.1.") for name, m in model.named_modules() if m in stored(model)
    )
    before = [layer.weight.data_ptr() for layer in stored(model)]
    model.to("meta")  # stands for any other device
    assert all(not layer.weight.is_meta and layer.bias.is_meta for layer in stored(model))
    assert [layer.weight.data_ptr() for layer in stored(model)] == before
    assert model.blocks[0].attn1.to_q.weight.is_meta


def test_frozen_loras_are_exact_beside_eight_bit_weights(base, tmp_path) -> None:
    path = file_of(base, tmp_path / "w.safetensors", "fp8_scaled")
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    lora = {
        "blocks.0.attn1.to_q": LoraPair(draw(4, 128), draw(128, 4), 8.0, diff_b=draw(128)),
        "blocks.1.ffn.net.2": LoraPair(draw(4, 256), draw(128, 4), 4.0),
        "blocks.1.attn2.to_k": LoraPair(None, None, 0.0, diff=draw(128, 128)),
    }
    plain, _ = load_transformer(path, torch.float32)
    full, _ = load_transformer(path, torch.float32)
    kept, _ = load_transformer(path, torch.float32, storage="fp8")
    for model in (full, kept):
        assert merge_lora(model, lora, 0.7) == 3
    with torch.no_grad():
        effect = (velocity(full) - velocity(plain)).norm()
        error = (velocity(full) - velocity(kept)).norm()
    assert effect > 1e-2 * velocity(plain).norm()
    assert error <= 1e-5 * effect
    assert kept.blocks[0].attn1.to_q.weight.dtype == torch.float8_e4m3fn


def test_bad_values_are_named(base, tmp_path) -> None:
    path = file_of(base, tmp_path / "w.safetensors", "fp32")
    with pytest.raises(FlashGRPOError, match="model.storage 'int4' is unknown"):
        load_transformer(path, torch.float32, storage="int4")
    with pytest.raises(FlashGRPOError, match="blocks_to_swap = 3, but this model has 2 blocks"):
        load_transformer(path, torch.float32, blocks_to_swap=3)


def test_swapped_weights_take_no_room_on_the_device(
    base: WanTransformer3DModel, tmp_path: Path
) -> None:
    path = file_of(base, tmp_path / "wan.safetensors", "fp32")
    whole, _ = load_transformer(path, torch.float32)
    half, _ = load_transformer(path, torch.float32, blocks_to_swap=1)
    linears = [m for m in whole.blocks[1].modules() if isinstance(m, torch.nn.Linear)]
    expected = sum(m.weight.nbytes for m in linears)
    assert resident_bytes(whole) >= sum(t.nbytes for t in whole.state_dict().values())
    assert resident_bytes(whole) - resident_bytes(half) == expected > 0


def test_kept_blocks_give_the_same_gradient_and_peak_between_off_and_full() -> None:
    """Recomputing all blocks, half of them, or none: one gradient, and memory in that order."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, text_dim=32, ffn_dim=256, num_layers=6
    )
    policy = WanPolicy(transformer, rank=4, targets=["attention", "ffn"])
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    draw = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 16, 3, 16, 16, generator=draw), torch.randn(7, 32, generator=draw)

    def backward() -> dict[str, torch.Tensor]:
        policy.velocity(x, 700.0, text).square().sum().backward()
        found = {name: p.grad for name, p in policy.parameters().items()}
        for parameter in policy.parameters().values():
            parameter.grad = None
        return found

    gradients: dict[str, dict[str, torch.Tensor]] = {}
    peaks = {}
    for case, keep in (("off", None), ("half", 3), ("full", 0)):
        if keep is None:
            transformer.disable_gradient_checkpointing()
        else:
            checkpoint_blocks(transformer, keep)
        gradients[case] = backward()
        peaks[case] = peak_bytes(backward)
    assert len(gradients["off"]) == 6 * LINEARS
    for name, wanted in gradients["off"].items():
        for case in ("half", "full"):
            assert float((gradients[case][name] - wanted).norm()) <= 1e-5 * float(wanted.norm())
    assert peaks["full"] <= 0.75 * peaks["half"]
    assert peaks["half"] <= 0.75 * peaks["off"]
    with pytest.raises(FlashGRPOError, match="blocks_to_keep = 7, but this model has 6 blocks"):
        checkpoint_blocks(transformer, 7)


def test_swapped_and_stored_weights_lower_the_peak(base: WanTransformer3DModel, tmp_path) -> None:
    """The weights themselves: what is loaded, and the most that lives during forward and backward."""
    path = file_of(base, tmp_path / "w.safetensors", "fp8_scaled")
    rests, works = {}, {}
    for storage in ("full", "fp8"):
        model, _ = load_transformer(path, torch.float32, storage=storage)
        rests[storage] = resident_bytes(model)
        policy = WanPolicy(model, rank=4, gradient_checkpointing=True)
        works[storage] = peak_bytes(lambda p=policy: gradient_norm(p))
    linears = sum(layer.weight.numel() for layer in stored(model))
    assert rests["full"] - rests["fp8"] >= 2.9 * linears  # 4 bytes against 1, and the scales
    # At work one layer at a time is dequantised: never as much as the blocks' weights in fp32.
    assert works["fp8"] - works["full"] <= 4 * linears / 4


def gradient_norm(policy: WanPolicy) -> float:
    draw = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 16, 2, 8, 8, generator=draw), torch.randn(7, 32, generator=draw)
    policy.velocity(x, 700.0, text).square().sum().backward()
    return float(sum(p.grad.square().sum() for p in policy.parameters().values()))
