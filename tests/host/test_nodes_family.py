"""Two experts and start images through the nodes, in the real server, on small random files."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from harness import ComfyServer, PromptError
from node_graphs import Graph, node, policy, prompts, step_graph, train_graph, video
from wan_files import copy_models

from flashgrpo_core.files import open_tensors
from flashgrpo_core.runs.checkpoint import load_checkpoint
from tests.training._family import FAMILIES, write_image, write_transformer

FAMILY = "wan2.2-i2v-a14b"


@pytest.fixture(scope="module")
def experts(probe_server: ComfyServer, tmp_path_factory: pytest.TempPathFactory) -> ComfyServer:
    """The server with a small A14B image-to-video pair and a start image."""
    folder = tmp_path_factory.mktemp("experts")
    for seed, mark in enumerate(("high_noise", "low_noise")):
        path = folder / f"small_i2v_{mark}.safetensors"
        copy_models(
            {"transformer": write_transformer(path, seed, **FAMILIES[FAMILY][0])},
            probe_server.models,
        )
    write_image(probe_server.input / "start.png", 1)
    return probe_server


def of_experts(graph: Graph) -> Graph:
    """A graph of the tiny Wan with the pair in its place."""
    graph["policy"] = policy(
        graph["policy"]["inputs"]["run_name"],
        diffusion_model="small_i2v_high_noise.safetensors",
        low_noise_model="small_i2v_low_noise.safetensors",
        vae="tiny_wan_vae.safetensors",
        dtype="fp32",
    )
    graph["image"] = node("LoadImage", image="start.png")
    graph["prompts"] = prompts(
        text_encoder="tiny_wan_umt5.safetensors", text_tokens=32, start_image=["image", 0]
    )
    graph["video"] = video(width=32, height=32, frames=5, steps=8, shift=5.0, guidance_low=1.5)
    faults = dict.fromkeys(("blur", "noise", "exposure", "flicker", "freeze"), 1.0)
    graph["reward"] = node("FlashGRPORewardTechnical", weight=1.0, short_side=512, **faults)
    return graph


def loras(server: ComfyServer) -> list[str]:
    listed = server.object_info("LoraLoaderModelOnly")["input"]["required"]["lora_name"][0]
    return [name.replace("\\", "/") for name in listed]


def test_train_gives_a_lora_for_each_expert(experts: ComfyServer) -> None:
    graph = of_experts(train_graph("pair", iterations=2, evaluate_every=0))
    graph["advanced"]["inputs"] |= {"prompts_per_iteration": 4, "group_size": 2, "warmup": 0}
    for output, name in enumerate(("high", "low")):
        graph[name] = node(
            "FlashGRPOSaveLora",
            lora=["train", output],
            name=f"pair/{name}",
            key_format="comfyui",
            weights="live",
        )
    graph["compare"] = node(
        "FlashGRPOCompare",
        trained=["train", 2],
        prompts=["prompts", 0],
        video_settings=["video", 0],
        prompt_count=1,
        seeds_per_prompt=1,
        seed=0,
    )
    result = experts.queue(graph)
    assert len(result.outputs["compare"]["images"]) == 1
    names = loras(experts)
    files = {}
    for name, expert in (("high", "high_noise"), ("low", "low_noise")):
        assert f"pair/{name}.safetensors" in names
        assert f"flashgrpo/pair/pair_{expert}_000002.safetensors" in names
        path = experts.output / "loras" / "flashgrpo" / "pair" / f"pair_{expert}_000002.safetensors"
        header = open_tensors(path).metadata
        assert header["flashgrpo.expert"] == expert
        assert header["flashgrpo.base_family"] == FAMILY
        files[name] = open_tensors(experts.output / "loras" / "pair" / f"{name}.safetensors")
    key = next(key for key in files["high"].keys() if key.endswith("lora_B.weight"))
    assert not files["high"].get(key).equal(files["low"].get(key))
    # The run on disk says the same, without training again.
    load = {"load": node("FlashGRPOLoadRun", run_name="pair")}
    for output, name in ((1, "high"), (4, "low")):
        load[name] = node(
            "FlashGRPOSaveLora",
            lora=["load", output],
            name=f"pair/{name}",
            key_format="comfyui",
            weights="live",
        )
    again = experts.queue(load)
    assert again.outputs["high"]["text"] == ["pair/high.safetensors"]
    assert again.outputs["low"]["text"] == ["pair/low.safetensors"]


def test_the_five_steps_take_both_experts(experts: ComfyServer) -> None:
    """With the weights in 8 bits, and some of them in host memory."""
    graph = of_experts(step_graph("pair_steps"))
    graph["groups"]["inputs"] |= {"prompts_per_iteration": 4, "group_size": 2}
    graph["policy"]["inputs"] |= {"storage": "fp8", "blocks_to_swap": 1}
    graph["save"] = node(
        "FlashGRPOSaveLora",
        lora=["step", 0],
        name="pair/steps",
        key_format="comfyui",
        weights="live",
    )
    result = experts.queue(graph)
    assert sorted(result.outputs["save"]["text"]) == [
        "pair/steps_high_noise.safetensors",
        "pair/steps_low_noise.safetensors",
    ]
    folder = experts.output / "flashgrpo" / "runs" / "pair_steps" / "checkpoints" / "000001"
    tensors, _ = load_checkpoint(Path(folder))
    assert {key.partition(".")[0] for key in tensors["adapter"]} == {"high_noise", "low_noise"}
    model = tomllib.loads((folder.parents[1] / "config.toml").read_text(encoding="utf-8"))["model"]
    assert (model["storage"], model["blocks_to_swap"]) == ("fp8", 1)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("prompts", {"start_image": None}, "have no start image"),
        (
            "policy",
            {
                "diffusion_model": "small_i2v_low_noise.safetensors",
                "low_noise_model": "small_i2v_high_noise.safetensors",
            },
            "experts are swapped",
        ),
        ("policy", {"low_noise_model": "none"}, "guidance_low"),
    ],
)
def test_what_does_not_go_together_is_said(
    experts: ComfyServer, part: str, changes: dict[str, Any], words: str
) -> None:
    graph = of_experts(train_graph("pair_wrong", iterations=1, evaluate_every=0))
    graph["advanced"]["inputs"] |= {"prompts_per_iteration": 4, "group_size": 2}
    for key, value in changes.items():
        if value is None:
            del graph[part]["inputs"][key]
        else:
            graph[part]["inputs"][key] = value
    with pytest.raises(PromptError, match=words):
        experts.queue(graph)
    run = experts.output / "flashgrpo" / "runs" / "pair_wrong"
    assert not list(run.glob("checkpoints/0*"))
