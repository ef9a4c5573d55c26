"""Train: its LoRA in the stock loaders, what a second queue does, the monitor's routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ComfyServer, PromptError, run_in_comfy
from node_graphs import TINY, Graph, node, train_graph
from PIL import Image

#: So strong that three steps change the videos visibly.
STRONG = 2e-2


def strong_graph(run: str, **inputs: Any) -> Graph:
    graph = train_graph(run, **inputs)
    graph["advanced"]["inputs"] |= {"learning_rate": STRONG, "warmup": 0, "ema_decay": 0.0}
    return graph


@pytest.fixture(scope="module")
def trained(probe_server: ComfyServer) -> ComfyServer:
    """A server on which the run `trained` is finished."""
    curve = node("PreviewImage", images=["train", 3])
    result = probe_server.queue({**strong_graph("trained"), "curve": curve})
    assert len(result.outputs["curve"]["images"]) == 1
    return probe_server


@pytest.fixture(scope="module")
def lora_name(trained: ComfyServer) -> str:
    """The run's LoRA as LoraLoaderModelOnly lists it."""
    loader = trained.object_info("LoraLoaderModelOnly")["input"]["required"]["lora_name"]
    names = [name for name in loader[0] if name.startswith("flashgrpo/trained/")]
    assert len(names) == 1, loader
    return names[0]


def sampling(server: ComfyServer, *, model: list[Any], extra: Graph, seed: int = 5) -> np.ndarray:
    """Frames that stock nodes sample, uint8 `[T, H, W, 3]`."""
    graph = {
        **extra,
        "vae": node("VAELoader", vae_name="tiny_wan_vae.safetensors"),
        "shift": node("ModelSamplingSD3", model=model, shift=3.0),
        "text": node("FlashGRPOEncodePrompt", text="a red circle moving left", text_encoder=TINY),
        "latent": node("EmptyHunyuanLatentVideo", width=64, height=64, length=9, batch_size=1),
        "sample": node(
            "KSampler",
            model=["shift", 0],
            seed=seed,
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
    images = server.queue(graph).outputs["save"]["images"]
    return np.stack([np.asarray(Image.open(server.output / i["filename"])) for i in images])


def unet() -> dict[str, Any]:
    return node("UNETLoader", unet_name="tiny_wan_t2v.safetensors", weight_dtype="default")


def with_file(name: str, strength: float) -> dict[str, Any]:
    return node("LoraLoaderModelOnly", model=["base", 0], lora_name=name, strength_model=strength)


def test_stock_loaders_take_the_lora(trained: ComfyServer, lora_name: str) -> None:
    """File, LORA_MODEL and core's own SaveLoRA give one and the same video; strength 0 the base."""
    before = len(trained.log())
    base = sampling(trained, model=["base", 0], extra={"base": unet()})
    off = {"base": unet(), "lora": with_file(lora_name, 0.0)}
    assert np.array_equal(sampling(trained, model=["lora", 0], extra=off), base)
    on = {"base": unet(), "lora": with_file(lora_name, 1.0)}
    changed = sampling(trained, model=["lora", 0], extra=on)
    assert np.abs(changed.astype(float) - base).mean() > 1.0
    direct = {
        **strong_graph("trained"),
        "base": unet(),
        "lora": node("LoraModelLoader", model=["base", 0], lora=["train", 0], strength_model=1.0),
        "keep": node("SaveLoRA", lora=["train", 0], prefix="loras/core_saved"),
    }
    assert np.array_equal(sampling(trained, model=["lora", 0], extra=direct), changed)
    names = trained.object_info("LoraLoaderModelOnly")["input"]["required"]["lora_name"][0]
    core = [name for name in names if name.startswith("core_saved")]
    assert len(core) == 1
    saved = {"base": unet(), "lora": with_file(core[0], 1.0)}
    assert np.array_equal(sampling(trained, model=["lora", 0], extra=saved), changed)
    assert "lora key not loaded" not in trained.log()[before:]


def test_the_patched_model_is_the_trained_policy(
    trained: ComfyServer, lora_name: str, tmp_path: Path
) -> None:
    answer = run_in_comfy(
        _SAME_POLICY,
        tmp_path,
        run_folder=str(trained.output / "flashgrpo" / "runs" / "trained"),
        lora_file=str(trained.output / "loras" / lora_name),
    )
    assert answer["unmatched"] == 0
    assert answer["patches"] == answer["modules"] > 0
    assert answer["effect"] >= 1e-2, "the LoRA changes nothing measurable"
    assert answer["error"] <= 1e-3 * answer["effect"]


@pytest.mark.parametrize("fmt", ["kohya", "diffusers"])
def test_save_lora_in_other_key_formats(trained: ComfyServer, fmt: str) -> None:
    graph = strong_graph("trained")
    inputs = {"lora": ["train", 0], "name": f"formats/{fmt}", "key_format": fmt, "weights": "live"}
    graph["save"] = node("FlashGRPOSaveLora", **inputs)
    name = trained.queue(graph).outputs["save"]["text"][0]
    assert name == f"formats/{fmt}.safetensors"
    names = trained.object_info("LoraLoaderModelOnly")["input"]["required"]["lora_name"][0]
    assert name in names
    from flashgrpo_core.wan.lora import read_lora

    one, other = (
        read_lora(trained.output / "loras" / name),
        read_lora(
            next((trained.output / "flashgrpo" / "runs" / "trained" / "lora").glob("*.safetensors"))
        ),
    )
    assert one.keys() == other.keys()
    for module, pair in one.items():
        assert pair.delta().allclose(other[module].delta(), rtol=1e-5, atol=1e-8)


def test_a_lora_is_never_overwritten(trained: ComfyServer) -> None:
    """ComfyUI may have the old file mapped: another content gets another name."""
    listed = []
    for run in ("trained", "other"):
        graph = strong_graph(run)
        if run == "other":
            graph["train"]["inputs"]["seed"] = 4
        inputs = {"lora": ["train", 0], "name": "same", "key_format": "comfyui", "weights": "live"}
        graph["save"] = node("FlashGRPOSaveLora", **inputs)
        listed.append(trained.queue(graph).outputs["save"]["text"][0])
    assert listed == ["same.safetensors", "same-2.safetensors"]
    (exported,) = (trained.output / "flashgrpo" / "runs" / "trained" / "lora").glob("*.safetensors")
    saved = trained.output / "loras" / "same.safetensors"
    assert saved.read_bytes() == exported.read_bytes(), "the header is lost on the link"


def test_a_finished_run_returns_its_result(trained: ComfyServer) -> None:
    """Nothing is loaded and nothing is trained again, also after a restart of the server."""
    events = trained.output / "flashgrpo" / "runs" / "trained" / "events.jsonl"
    before, log = events.read_bytes(), len(trained.log())
    trained.free()
    trained.queue(strong_graph("trained"))
    assert events.read_bytes() == before
    assert "Requested to load" not in trained.log()[log:]


def test_more_iterations_go_on(trained: ComfyServer, lora_name: str) -> None:
    trained.queue(strong_graph("trained", iterations=4, evaluate_every=2))
    run = trained.get("/flashgrpo/runs/trained")
    assert [iteration for iteration, _ in run["rewards"]] == [1, 2, 3, 4]
    assert run["status"] == "finished" and run["iterations"] == 4
    names = trained.object_info("LoraLoaderModelOnly")["input"]["required"]["lora_name"][0]
    assert lora_name in names, "the earlier LoRA has gone"
    assert "flashgrpo/trained/trained_000004.safetensors" in names


@pytest.mark.parametrize("way", ["continued", "frozen"])
def test_a_lora_as_the_start(trained: ComfyServer, lora_name: str, way: str) -> None:
    """What a run starts from is its baseline: a continued LoRA, or base plus frozen LoRAs."""
    graph = strong_graph(way, iterations=1, evaluate_every=1)
    if way == "continued":
        graph["policy"]["inputs"]["continue_from"] = lora_name
    else:
        graph["frozen"] = node("FlashGRPOFrozenLora", lora=lora_name, strength=1.0)
        graph["policy"]["inputs"]["frozen_loras"] = ["frozen", 0]
    trained.queue(graph)
    judged = {row[0]: row[1] for row in trained.get("/flashgrpo/runs/trained")["validation"]}
    row = trained.get(f"/flashgrpo/runs/{way}")["validation"][0]
    assert row[0] == 0
    assert abs(row[1] - judged[3]) < 2e-3 < abs(judged[0] - judged[3])


def test_other_settings_under_the_same_name_are_listed(trained: ComfyServer) -> None:
    graph = strong_graph("trained")
    graph["advanced"]["inputs"]["group_size"] = 3
    with pytest.raises(PromptError) as failure:
        trained.queue(graph)
    message = failure.value.details["exception_message"]
    assert "rollout.group_size: 4 -> 3" in message
    assert "free name 'trained-2'" in message


def test_another_model_under_the_same_name_is_refused_at_once(trained: ComfyServer) -> None:
    graph = strong_graph("trained")
    graph["policy"]["inputs"]["lora_rank"] = 8
    with pytest.raises(PromptError) as failure:
        trained.queue(graph)
    assert failure.value.details["node_type"] == "FlashGRPOLoadPolicy"
    assert "model.lora_rank: 4 -> 8" in failure.value.details["exception_message"]


def test_load_run_and_compare(trained: ComfyServer) -> None:
    graph = {
        **{key: value for key, value in strong_graph("trained").items() if key != "train"},
        "load": node("FlashGRPOLoadRun", run_name="trained"),
        "base": unet(),
        "lora": node("LoraModelLoader", model=["base", 0], lora=["load", 1], strength_model=1.0),
        "files": node(
            "SaveVideo", video=["load", 3], filename_prefix="seen", format="auto", codec="auto"
        ),
        "compare": node(
            "FlashGRPOCompare",
            trained=["load", 0],
            prompts=["prompts", 0],
            video_settings=["video", 0],
            prompt_count=2,
            seeds_per_prompt=1,
            seed=1,
            reward=["reward", 0],
        ),
    }
    result = trained.queue(graph)
    assert len(result.outputs["compare"]["images"]) == 1
    shown = result.outputs["compare"]["images"][0]
    path = trained.output / shown["subfolder"] / shown["filename"]
    from flashgrpo_core.video import read_video

    video, fps = read_video(path)
    assert len(video) == 2 * 9 and fps == 8.0
    assert len(list(trained.output.glob("seen*.mp4"))) >= 1


def test_the_monitor_reads_the_run_folder(trained: ComfyServer) -> None:
    run = trained.get("/flashgrpo/runs/trained")
    assert run["training"] is False and run["node_id"] is None
    assert len(run["validation"]) >= 2 and all(len(row) == 5 for row in run["validation"])
    status, jpeg = trained.request("GET", run["filmstrip"])
    assert status == 200 and jpeg[:3] == b"\xff\xd8\xff"
    status, answer = trained.request("GET", "/api/flashgrpo/runs")
    assert status == 200
    assert trained.request("POST", "/flashgrpo/runs/trained/finish")[0] == 404
    for name in ("nothing", "..", "%2e%2e%2f%2e%2e", "trained%00", "C:%5C"):
        for route in (name, f"{name}/filmstrip"):
            assert trained.request("GET", f"/flashgrpo/runs/{route}")[0] in (400, 403, 404), name


_SAME_POLICY = """
from pathlib import Path

import torch

import comfy.model_management
import comfy.sd
import comfy.utils
from flashgrpo_core.build import load_networks, with_embedded_files
from flashgrpo_core.config_io import load_config
from flashgrpo_core.runs.checkpoint import load_checkpoint

torch.set_grad_enabled(False)
folder = Path(run_folder)
config = load_config(folder / "config.toml")
networks = load_networks(config, torch.device("cpu"))
iteration = int(Path(lora_file).stem.split("_")[-1])
tensors, _ = load_checkpoint(folder / "checkpoints" / f"{iteration:06d}")
draw = torch.Generator().manual_seed(11)
x = torch.randn(1, 16, 3, 8, 8, generator=draw)
context = torch.randn(1, 32, 4096, generator=draw)
timestep = torch.tensor([731.0])


def policy():
    return networks.policy.transformer(x, timestep, context, return_dict=False)[0]


def size(tensor):
    return float(tensor.double().pow(2).mean().sqrt())


networks.policy.load(tensors["adapter"])
trained = policy()
messages = []


class Collect(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


logging.getLogger().addHandler(Collect())
file = with_embedded_files(config).model.transformer
patcher = comfy.sd.load_diffusion_model(file, model_options={"dtype": torch.float32})


def stock(model):
    comfy.model_management.load_models_gpu([model], force_full_load=True)
    return model.model.diffusion_model(x, timestep, context=context)


base = stock(patcher)
lora = comfy.utils.load_torch_file(lora_file, safe_load=True)
patched, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
changed = stock(patched)
report(
    unmatched=len([text for text in messages if "not loaded" in text]),
    patches=len(patched.patches),
    modules=len(networks.policy.targets),
    effect=size(changed - base) / size(base),
    error=size(changed - trained) / size(base),
)
"""
