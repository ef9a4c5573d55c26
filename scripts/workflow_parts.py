"""What several workflows are made of: model files, colours, the stock nodes of a rendering graph."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from workflow_graph import Graph, Node, Output  # noqa: E402

from flashgrpo_core.build import plan  # noqa: E402
from flashgrpo_core.config_io import build_config  # noqa: E402
from flashgrpo_core.presets import preset_tables  # noqa: E402

# What the pack's lists call the embedded files and prompts.
TINY = "tiny (embedded)"
TINY_PRESET = "tiny Wan, any computer"
TINY_PROMPTS = "tiny world (embedded)"
STARTER_PROMPTS = "starter prompts (embedded)"
STARTER_FILE = ROOT / "flashgrpo_core" / "assets" / "prompts" / "starter.txt"

_REPOSITORIES = {
    "2.1": "https://huggingface.co/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files",
    "2.2": "https://huggingface.co/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files",
}


def model_file(folder: str, name: str, version: str = "2.1") -> dict[str, str]:
    """A file as the missing-models dialog shows it: name, folder, official address."""
    return {"name": name, "url": f"{_REPOSITORIES[version]}/{folder}/{name}", "directory": folder}


UMT5 = model_file("text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
VAE = model_file("vae", "wan_2.1_vae.safetensors")
CLIP_VISION = model_file("clip_vision", "clip_vision_h.safetensors")

BLUE, GREEN, PURPLE, GREY = "#3f789e", "#4a7c59", "#6b5b95", "#5a5a5a"

NEGATIVE = "blurry, distorted, jerky, watermark, text, low quality"
SCENE = (
    "A red fox trots through fresh snow between birch trees, stops, lifts its head and listens, its "
    "breath visible in the cold air."
)

#: What a card such as an RTX 4090 computes (16-bit, attention included; the low end of what is
#: reported for it), and what it copies from host memory, a second.
FLOPS, HOST_BYTES = 60e12, 20e9


@dataclass(frozen=True)
class Size:
    """Shape of a Wan model: width, width of the feed-forward layers, blocks, pixels of a token."""

    dim: int
    ffn: int
    blocks: int
    token: int = 16

    def forward_seconds(self, width: int, height: int, frames: int, swapped: int = 0) -> float:
        """Estimate of one transformer forward of one video, with 8-bit blocks in host memory."""
        n = (width // self.token) * (height // self.token) * ((frames - 1) // 4 + 1)
        weights = 6 * self.dim**2 + 2 * self.dim * self.ffn  # those that every token meets
        # Text attention has 512 keys; its own two projections of the text are left out.
        each = 2 * n * weights + 4 * n * (n + 512) * self.dim
        return self.blocks * each / FLOPS + swapped * weights / HOST_BYTES


SMALL = Size(1536, 8960, 30)
FOURTEEN = Size(5120, 13824, 40)
FIVE = Size(3072, 14336, 30, token=32)


def cost(
    size: Size, preset: str, tables: dict[str, dict[str, Any]], *, two_experts: bool = False
) -> str:
    """The arithmetic of a whole run in one sentence, from the plan that the command line prints.

    Args:
        size: the model.
        preset: preset of Video Settings.
        tables: what the workflow sets besides.
        two_experts: whether it is Wan 2.2 A14B.
    """
    model = {"transformer": "wan", "vae": "vae", "text_encoder": "umt5"}
    if two_experts:
        model |= {"transformer_low": "low", "boundary": 0.875}
    layers = [
        preset_tables(preset),
        {"model": model, "prompts": {"file": str(STARTER_FILE)}},
        tables,
    ]
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for table, values in layer.items():
            merged.setdefault(table, {}).update(values)
    config = build_config(merged)
    r, iterations = config.rollout, config.run.iterations
    total = plan(config).total_forwards
    seconds = size.forward_seconds(r.width, r.height, r.frames, config.model.blocks_to_swap)
    seconds = round(seconds, 1)
    return (
        f"{r.prompts_per_iteration} prompts x {r.group_size} videos x {config.schedule.steps} steps "
        f"with guidance are about {_three(total / iterations):,} transformer forwards per "
        f"iteration, evaluations included. {iterations} iterations are {_three(total):,} "
        f"forwards; at about {seconds} s each (RTX 4090, {r.width}x{r.height}, {r.frames} frames) "
        f"that is **{total * seconds / 3600:.0f} hours**."
    )


def _three(number: float) -> int:
    """Three digits of it."""
    return int(float(f"{number:.3g}"))


def video_settings(g: Graph, preset: str, width: float = 340) -> Node:
    """Video Settings with a preset."""
    return g.add("FlashGRPOVideoSettings", fields={"preset": preset}, width=width)


def load_model(
    g: Graph, file: dict[str, str], title: str | None = None, width: float = 360
) -> Node:
    """Stock loader of a diffusion model."""
    return g.add(
        "UNETLoader",
        unet_name=file["name"],
        weight_dtype="default",
        models=[file],
        listed=False,
        title=title,
        width=width,
    )


def load_clip(g: Graph, width: float = 360) -> Node:
    """Stock loader of the text encoder."""
    return g.add(
        "CLIPLoader",
        clip_name=UMT5["name"],
        type="wan",
        device="default",
        models=[UMT5],
        listed=False,
        width=width,
    )


def load_vae(g: Graph, file: dict[str, str] = VAE, width: float = 360) -> Node:
    """Stock loader of the VAE."""
    return g.add("VAELoader", vae_name=file["name"], models=[file], listed=False, width=width)


def encode_texts(g: Graph, clip: Node, text: str = SCENE) -> tuple[Node, Node]:
    """Positive and negative prompt."""
    positive = g.add(
        "CLIPTextEncode", clip=clip["CLIP"], text=text, title="Prompt", width=400, height=210
    )
    negative = g.add(
        "CLIPTextEncode",
        clip=clip["CLIP"],
        text=NEGATIVE,
        title="Negative prompt",
        width=400,
        height=160,
    )
    return positive, negative


def lora_and_shift(
    g: Graph, model: Node, lora: str, shift: float, mark: str = ""
) -> tuple[Node, Node]:
    """The trained LoRA on a model, and the shift it was trained with."""
    loader = g.add(
        "LoraLoaderModelOnly",
        model=model["MODEL"],
        lora_name=lora,
        strength_model=1.0,
        listed=False,
        title=f"LoraLoaderModelOnly: your {mark}LoRA",
        width=400,
    )
    return loader, g.add("ModelSamplingSD3", model=loader["MODEL"], shift=shift, width=400)


def sample(
    g: Graph,
    model: Node,
    positive: Output,
    negative: Output,
    latent: Output,
    steps: int,
    guidance: float,
) -> Node:
    """KSampler as training samples."""
    return g.add(
        "KSampler",
        model=model["MODEL"],
        positive=positive,
        negative=negative,
        latent_image=latent,
        seed=0,
        steps=steps,
        cfg=guidance,
        sampler_name="euler",
        scheduler="simple",
        width=340,
    )


def decode_and_save(
    g: Graph, latent: Output, vae: Node, size: tuple[int, int, int], fps: float
) -> tuple[Node, Node, Node]:
    """From latents to a saved video."""
    decode = g.add("VAEDecode", samples=latent, vae=vae["VAE"], width=340)
    video = g.add("CreateVideo", images=decode["IMAGE"], fps=fps, width=420)
    save = g.add(
        "SaveVideo",
        video=video["VIDEO"],
        filename_prefix="video/flashgrpo",
        format="auto",
        codec="auto",
        # Widgets, and the video at the node's full width.
        height=140 + 420 * size[1] / size[0],
        width=420,
    )
    return decode, video, save


def output(node: Node) -> Output:
    """The only output of a node."""
    assert node.info is not None
    (name,) = node.info["output_name"]
    return node[name]
