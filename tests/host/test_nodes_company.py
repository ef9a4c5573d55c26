"""Training in company: after a KSampler, beside another dtype, with CLIP, after an Accelerator.

Each time the policy must come out as it does alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from harness import ComfyServer
from node_graphs import TEXT, Graph, checkpoint_state, live, node, prompts, train_graph

from flashgrpo_core.embedded import TINY_TEXT_ENCODER
from flashgrpo_core.files import open_tensors
from flashgrpo_core.wan.text import load_text_encoder

#: The tiny files as a user has them: copies in ComfyUI's model folders.
FILES = {"diffusion_model": "tiny_wan_t2v.safetensors", "vae": "tiny_wan_vae.safetensors"}


def files_graph(run: str, **policy: Any) -> Graph:
    """One iteration on the copies, without evaluations."""
    graph = train_graph(
        run, policy_inputs={**FILES, "dtype": "fp32", **policy}, iterations=1, evaluate_every=0
    )
    graph["prompts"] = prompts(text_encoder="tiny_wan_umt5.safetensors", text_tokens=32)
    graph["advanced"]["inputs"] |= {"learning_rate": 1e-3, "test_prompts": 0}
    return graph


@pytest.fixture(scope="module")
def alone(probe_server: ComfyServer) -> str:
    """Hash of the LoRA that the run gives in a server that has done nothing else before."""
    return trained(probe_server, files_graph("alone"), "alone")


def trained(server: ComfyServer, graph: Graph, run: str) -> str:
    """Run the graph; returns the hash of its LoRA and checks that no network stays behind."""
    server.queue(graph)
    left = live(server)
    assert left["WanTransformer3DModel"] == left["AutoencoderKLWan"] == left["Resident"] == 0
    return checkpoint_state(server.output, run, 1)["weights"]


def sampler_graph() -> Graph:
    """KSampler and VAEDecode on the same files, with stock nodes except the text."""
    encoder = "tiny_wan_umt5.safetensors"
    return {
        "unet": node("UNETLoader", unet_name=FILES["diffusion_model"], weight_dtype="default"),
        "vae": node("VAELoader", vae_name=FILES["vae"]),
        "text": node("FlashGRPOEncodePrompt", text="a red circle", text_encoder=encoder),
        "latent": node("EmptyHunyuanLatentVideo", width=64, height=64, length=9, batch_size=1),
        "sample": node(
            "KSampler",
            model=["unet", 0],
            seed=1,
            steps=2,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            positive=["text", 0],
            negative=["text", 0],
            latent_image=["latent", 0],
            denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
    }


def test_after_a_ksampler_in_the_same_prompt(probe_server: ComfyServer, alone: str) -> None:
    graph = files_graph("after_sampler") | sampler_graph()
    # The prompts arrive only once the sampler is done.
    graph["order"] = node("TestText", text=TEXT, after=["decode", 0])
    graph["prompts"]["inputs"]["text"] = ["order", 0]
    assert trained(probe_server, graph, "after_sampler") == alone


def test_after_another_packs_accelerator(probe_server: ComfyServer, alone: str) -> None:
    """Mixed precision of a foreign Accelerator is process-wide and none of our business."""
    graph = files_graph("after_accelerator")
    graph["other"] = node("TestAccelerator", text=TEXT)
    graph["prompts"]["inputs"]["text"] = ["other", 0]
    assert trained(probe_server, graph, "after_accelerator") == alone


def test_beside_another_dtype(probe_server: ComfyServer, alone: str) -> None:
    bf16 = trained(probe_server, files_graph("bf16", dtype="bf16"), "bf16")
    assert bf16 != alone
    assert trained(probe_server, files_graph("fp32"), "fp32") == alone
    assert trained(probe_server, files_graph("bf16_again", dtype="bf16"), "bf16_again") == bf16


def test_prompts_encoded_by_clip(probe_server: ComfyServer, alone: str) -> None:
    """A CLIP object of ComfyUI, loaded and used under inference mode, gives usable embeddings."""
    runs = []
    for run in ("clip", "clip_again"):
        graph = files_graph(run)
        graph["clip"] = node("TestClip", file="tiny_wan_umt5.safetensors")
        graph["prompts"]["inputs"] |= {"text_encoder": "the connected CLIP", "clip": ["clip", 0]}
        runs.append(trained(probe_server, graph, run))
    assert runs[0] == runs[1]
    assert runs[0] != alone, "the CLIP was not used: its rounding differs from our encoder's"


def test_both_text_encoders_agree(probe_server: ComfyServer) -> None:
    """The CLIP's embeddings of the run above are those of our own encoder, but for rounding."""
    encoder = load_text_encoder(TINY_TEXT_ENCODER, torch.float32)
    for text in [*TEXT.splitlines(), ""]:
        name = f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"
        (file,) = (probe_server.output / "flashgrpo" / "cache").glob(f"clip-*/{name}")
        clip, own = open_tensors(file).get("embedding"), encoder.embed(text, 32)
        assert clip.shape == own.shape, text
        assert float((clip - own).norm() / own.norm()) < 1e-3, text
