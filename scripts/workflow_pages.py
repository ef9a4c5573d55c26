"""The five workflows that come with the pack: nodes, places, titles and notes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from workflow_graph import Graph, Info, Node  # noqa: E402

from flashgrpo_core.build import plan  # noqa: E402
from flashgrpo_core.config import Config  # noqa: E402
from flashgrpo_core.embedded import demo_tables  # noqa: E402

STOCK_NODES = {
    "UNETLoader",
    "CLIPLoader",
    "VAELoader",
    "LoraLoaderModelOnly",
    "ModelSamplingSD3",
    "CLIPTextEncode",
    "EmptyHunyuanLatentVideo",
    "KSampler",
    "VAEDecode",
    "CreateVideo",
    "SaveVideo",
}

# What the pack's lists call the embedded files and prompts.
TINY = "tiny (embedded)"
TINY_PRESET = "tiny Wan, any computer"
TINY_PROMPTS = "tiny world (embedded)"
STARTER_PROMPTS = "starter prompts (embedded)"
WAN_PRESET = "Wan 2.1 1.3B, 24 GB, 416x240"

# The same seed of the tiny demo's run and of the video that shows its LoRA.
TINY_RUN = "tiny_demo"
TINY_LORA = f"flashgrpo/{TINY_RUN}.safetensors"
WAN_RUN = "wan21_1.3b"
WAN_LORA = f"flashgrpo/{WAN_RUN}.safetensors"

_REPACKAGED = "https://huggingface.co/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"


def _file(folder: str, name: str) -> dict[str, str]:
    return {"name": name, "url": f"{_REPACKAGED}/{folder}/{name}", "directory": folder}


WAN = _file("diffusion_models", "wan2.1_t2v_1.3B_bf16.safetensors")
UMT5 = _file("text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
VAE = _file("vae", "wan_2.1_vae.safetensors")

BLUE, GREEN, PURPLE, GREY = "#3f789e", "#4a7c59", "#6b5b95", "#5a5a5a"

#: Seconds of one transformer forward of Wan 1.3B at 416x240x33 on an RTX 4090: 11 TFLOP at the
#: 60 to 120 TFLOP/s that such a card reaches with attention.
FORWARD_SECONDS = 0.2
WAN_ITERATIONS = 60


def tiny_demo(info: Info, name: str) -> dict[str, Any]:
    """Train the embedded tiny Wan; runs anywhere in minutes."""
    g = Graph(info, name)
    read_me = g.note(
        "Press **Run**. A tiny Wan that comes with the pack learns by reinforcement to do what its "
        "prompts say, such as *a red circle moving left*. No download, no GPU needed, a few "
        "minutes.\n\n"
        "Watch the monitor on **Train**: the blue curve is the reward of the videos it trains on, "
        "the orange points are prompts it never trains on. **Finish now** ends early, and "
        "*Cancel* stops: press Run again and it goes on where it was.\n\n"
        "When it is finished, **Compare** plays a video: left before, right after training.\n\n"
        "Another **run_name** in *Load Wan Policy* starts a new run. More **iterations** in "
        "*Train* go on with this one.",
        width=340,
        height=340,
        title="Start here",
    )
    video = _video_settings(g, TINY_PRESET)
    policy = g.add(
        "FlashGRPOLoadPolicy",
        run_name=TINY_RUN,
        diffusion_model=TINY,
        low_noise_model="none",
        vae=TINY,
        continue_from="none",
        width=340,
    )
    prompts = g.add("FlashGRPOPrompts", source=TINY_PROMPTS, text_encoder=TINY, width=340)
    reward = g.add("FlashGRPORewardTinyWorld", width=430)
    demo = demo_tables()
    optim = demo["optim"]
    advanced = g.add(
        "FlashGRPOTrainAdvanced",
        learning_rate=optim["learning_rate"],
        warmup=optim["warmup"],
        ema_decay=optim["ema_decay"],
        title="Demo settings",
        width=340,
    )
    advanced.collapsed = True  # most of its many settings are the preset's
    train = g.add(
        "FlashGRPOTrain",
        policy=policy["policy"],
        prompts=prompts["prompts"],
        video_settings=video["video_settings"],
        reward=reward["reward"],
        advanced=advanced["advanced"],
        iterations=demo["run"]["iterations"],
        evaluate_every=demo["eval"]["every"],
        picture=True,
        width=430,
    )
    save = g.add("FlashGRPOSaveLora", lora=train["lora"], name=f"flashgrpo/{TINY_RUN}", width=400)
    compare = g.add(
        "FlashGRPOCompare",
        trained=train["run"],
        prompts=prompts["prompts"],
        video_settings=video["video_settings"],
        picture=True,
        width=400,
    )
    after = g.note(
        "**Use the LoRA.** Press **R** to refresh the lists, then open *04b_use_lora_tiny*. "
        "There the stock LoRA loader has it.\n\n"
        "**Your own model:** *03_wan21_1.3b_train* is this graph with Wan 2.1 1.3B.\n\n"
        "**See the loop from inside:** *02_step_by_step*.",
        width=400,
        height=160,
        title="What next",
    )
    # The collapsed node last: where it unfolds, nothing is covered.
    x = g.column(0, read_me, None, video, None, advanced)
    x = g.column(x, policy, prompts)
    x = g.column(x, reward, train)
    g.column(x, save, compare, None, after)
    g.group("Videos", BLUE, video)
    g.group("Model and prompts", BLUE, policy, prompts)
    g.group("Reward and training", GREEN, reward, train)
    g.group("Result", PURPLE, save, compare)
    return g.document()


def step_by_step(info: Info, name: str) -> dict[str, Any]:
    """The five verbs as separate nodes; every queue is one iteration."""
    g = Graph(info, name)
    read_me = g.note(
        "**Every press of Run is one iteration** of the training loop, from left to right:\n\n"
        "1. **group**: choose prompts, and for each one the noise level (sigma) at which its "
        "videos get their noise\n"
        "2. **rollout**: sample the videos\n"
        "3. **score**: rewards, and how much better each video is than the others of its prompt "
        "(the advantage)\n"
        "4. **step**: make the better ones more likely\n\n"
        "The policy is kept in the run folder, so the next Run goes on with it. For 10 iterations "
        "set the number beside Run to 10.\n\n"
        "*Train* in *01_tiny_demo* is this loop in one node.",
        width=330,
        height=410,
        title="Start here",
    )
    video = _video_settings(g, TINY_PRESET, width=330)
    policy = g.add(
        "FlashGRPOLoadPolicy",
        run_name="step_by_step",
        diffusion_model=TINY,
        low_noise_model="none",
        vae=TINY,
        continue_from="none",
        width=320,
    )
    prompts = g.add("FlashGRPOPrompts", source=TINY_PROMPTS, text_encoder=TINY, width=320)
    groups = g.add(
        "FlashGRPOGroups",
        policy=policy["policy"],
        prompts=prompts["prompts"],
        video_settings=video["video_settings"],
        group_size=8,
        prompts_per_iteration=6,
        title="1  group",
        picture=True,
        width=390,
    )
    reward = g.add("FlashGRPORewardTinyWorld", width=390)
    rollout = g.add(
        "FlashGRPORollout",
        policy=policy["policy"],
        groups=groups["groups"],
        title="2  rollout",
        picture=True,
        width=430,
    )
    score = g.add(
        "FlashGRPOScore",
        rollouts=rollout["rollouts"],
        reward=reward["reward"],
        title="3  score, advantage",
        height=490,
        width=430,
    )
    step = g.add(
        "FlashGRPOTrainStep",
        policy=policy["policy"],
        scored=score["scored"],
        learning_rate=3e-4,
        title="4  step",
        picture=True,
        width=390,
    )
    save = g.add(
        "FlashGRPOSaveLora",
        lora=step["policy"],
        name="flashgrpo/step_by_step",
        mode=4,
        title="Save LoRA (off: Ctrl+B switches it on)",
        width=390,
    )
    x = g.column(0, read_me, None, video)
    x = g.column(x, policy, prompts)
    x = g.column(x, groups, reward)
    x = g.column(x, rollout, score)
    g.column(x, step, save)
    g.group("Videos", BLUE, video)
    g.group("Model and prompts", BLUE, policy, prompts)
    g.group("Group and reward", GREEN, groups, reward)
    g.group("Sample and compare", GREEN, rollout, score)
    g.group("Learn", PURPLE, step, save)
    return g.document()


def wan_train(info: Info, name: str) -> dict[str, Any]:
    """Train Wan 2.1 1.3B over one night on a 24 GB card."""
    g = Graph(info, name)
    cost = _cost()
    read_me = g.note(
        "Trains a LoRA for **Wan 2.1 1.3B** with rewards for technical quality and movement. "
        "Missing files are listed when this opens; the dialog says where each one goes.\n\n"
        "**How long?** " + cost + "\n\n"
        "After its first iteration, Train says how long the rest takes *on your card* and how much "
        "memory it needed. Each evaluation writes a LoRA that the loaders list, so a cancelled "
        "night is not lost; Run goes on from there.\n\n"
        "**Faster:** fewer iterations, or *Advanced Training Settings* with a smaller group_size. "
        "**Better:** your own prompts, and more iterations.\n\n"
        "**12 GB card:** choose the 12 GB preset in *Video Settings*.",
        width=350,
        height=450,
        title="Start here: one night on a 24 GB card",
    )
    video = _video_settings(g, WAN_PRESET, width=350)
    policy = g.add(
        "FlashGRPOLoadPolicy",
        run_name=WAN_RUN,
        diffusion_model=WAN["name"],
        low_noise_model="none",
        vae=VAE["name"],
        continue_from="none",
        models=[WAN, VAE],
        listed=False,
        width=360,
    )
    prompts = g.add(
        "FlashGRPOPrompts",
        source=STARTER_PROMPTS,
        text_encoder=UMT5["name"],
        negative="blurry, distorted, jerky, watermark, text, low quality",
        models=[UMT5],
        listed=False,
        width=360,
    )
    technical = g.add("FlashGRPORewardTechnical", width=360)
    motion = g.add("FlashGRPORewardMotion", previous=technical["reward"], width=360)
    train = g.add(
        "FlashGRPOTrain",
        policy=policy["policy"],
        prompts=prompts["prompts"],
        video_settings=video["video_settings"],
        reward=motion["reward"],
        iterations=WAN_ITERATIONS,
        evaluate_every=10,
        picture=True,
        width=430,
    )
    save = g.add("FlashGRPOSaveLora", lora=train["lora"], name=f"flashgrpo/{WAN_RUN}", width=400)
    compare = g.add(
        "FlashGRPOCompare",
        trained=train["run"],
        prompts=prompts["prompts"],
        video_settings=video["video_settings"],
        picture=True,
        width=400,
    )
    after = g.note(
        "**Use the LoRA:** press **R**, then open *04_use_lora*. It needs no trigger word; try "
        "strengths from 0.5 to 1.5.\n\n"
        "**Train at the size you render**, with the same steps, shift and guidance. 832x480 costs "
        "about five times the time of 416x240.\n\n"
        "**Look at the videos, not only at the curve.** A reward can be cheated; the help page of "
        "each reward says how.",
        width=360,
        height=260,
        title="Good to know",
    )
    x = g.column(0, read_me, None, video)
    x = g.column(x, policy, prompts)
    x = g.column(x, technical, motion, None, after)
    x = g.column(x, train)
    g.column(x, save, compare)
    g.group("Videos", BLUE, video)
    g.group("Model and prompts", BLUE, policy, prompts)
    g.group("Reward: a chain is a mix", GREEN, technical, motion)
    g.group("Training", GREEN, train)
    g.group("Result", PURPLE, save, compare)
    return g.document()


def use_lora(info: Info, name: str) -> dict[str, Any]:
    """Render with the trained LoRA, stock nodes only."""
    g = Graph(info, name)
    model = g.add(
        "UNETLoader",
        unet_name=WAN["name"],
        weight_dtype="default",
        models=[WAN],
        listed=False,
        width=360,
    )
    clip = g.add(
        "CLIPLoader",
        clip_name=UMT5["name"],
        type="wan",
        device="default",
        models=[UMT5],
        listed=False,
        width=360,
    )
    vae = g.add("VAELoader", vae_name=VAE["name"], models=[VAE], listed=False, width=360)
    positive = g.add(
        "CLIPTextEncode",
        clip=clip["CLIP"],
        text="A red fox trots through fresh snow between birch trees, stops, lifts its head and "
        "listens, its breath visible in the cold air.",
        title="Prompt",
        width=400,
        height=210,
    )
    negative = g.add(
        "CLIPTextEncode",
        clip=clip["CLIP"],
        text="blurry, distorted, jerky, watermark, text, low quality",
        title="Negative prompt",
        width=400,
        height=160,
    )
    read_me = g.note(
        "The LoRA from *03_wan21_1.3b_train* in a plain Wan graph: nothing here comes from this "
        "pack. Choose your LoRA in **LoraLoaderModelOnly** (press **R** if it is not listed yet).\n\n"
        "- It needs **no trigger word**.\n"
        "- Strength 1.0 is what was trained; try **0.5 to 1.5**. Strength 0 is the base model.\n"
        "- Render at the **size, steps, shift and guidance you trained with**.\n"
        "- Other LoRAs can follow in the chain.",
        width=360,
        height=300,
        title="Use your LoRA",
    )
    return _render(
        g,
        read_me=read_me,
        model=model,
        loaders=[model, clip, vae],
        vae=vae,
        prompts=[positive, negative],
        lora=WAN_LORA,
        size=(416, 240, 33),
        steps=20,
        guidance=4.5,
        fps=16.0,
    )


def use_lora_tiny(info: Info, name: str) -> dict[str, Any]:
    """Render with the LoRA of the tiny demo."""
    g = Graph(info, name)
    model = g.add(
        "UNETLoader",
        unet_name="flashgrpo/tiny_wan_t2v.safetensors",
        weight_dtype="default",
        listed=False,
        width=360,
    )
    vae = g.add("VAELoader", vae_name="flashgrpo/tiny_wan_vae.safetensors", listed=False, width=360)
    positive = g.add(
        "FlashGRPOEncodePrompt",
        text="a red circle moving left",
        text_encoder=TINY,
        title="Encode Prompt",
        width=400,
    )
    negative = g.add(
        "FlashGRPOEncodePrompt",
        text="",
        text_encoder=TINY,
        title="Negative prompt (not used at cfg 1)",
        width=400,
    )
    read_me = g.note(
        "**First run 01_tiny_demo, then press R** to refresh the lists: the run puts its LoRA and "
        "the tiny model files where the stock loaders find them.\n\n"
        "This is how the LoRA of a real training is used, too: stock loaders, stock sampler. Only "
        "*Encode Prompt* is ours, because no stock node loads the tiny text encoder.\n\n"
        "Try strength **0** (the model before training), 0.5, 1 and 1.5. Colours: red, green, "
        "blue, yellow, magenta, cyan. Shapes: circle, square, triangle. Directions: left, right, "
        "up, down.",
        width=360,
        height=320,
        title="Run 01 first",
    )
    return _render(
        g,
        read_me=read_me,
        model=model,
        loaders=[model, vae],
        vae=vae,
        prompts=[positive, negative],
        lora=TINY_LORA,
        size=(64, 64, 9),
        steps=10,
        guidance=1.0,
        fps=8.0,
    )


def _render(
    g: Graph,
    *,
    read_me: Node,
    model: Node,
    loaders: list[Node],
    vae: Node,
    prompts: list[Node],
    lora: str,
    size: tuple[int, int, int],
    steps: int,
    guidance: float,
    fps: float,
) -> dict[str, Any]:
    """The part that both LoRA workflows share: LoRA, shift, sampler, video."""
    loader = g.add(
        "LoraLoaderModelOnly",
        model=model["MODEL"],
        lora_name=lora,
        strength_model=1.0,
        listed=False,
        title="LoraLoaderModelOnly: your LoRA",
        width=400,
    )
    shift = g.add("ModelSamplingSD3", model=loader["MODEL"], shift=3.0, width=400)
    latent = g.add(
        "EmptyHunyuanLatentVideo",
        width=340,
        title="Size and frames",
        fields={"width": size[0], "height": size[1], "length": size[2]},
    )
    sampler = g.add(
        "KSampler",
        model=shift["MODEL"],
        positive=prompts[0][prompts[0].info["output_name"][0]],
        negative=prompts[1][prompts[1].info["output_name"][0]],
        latent_image=latent["LATENT"],
        seed=0,
        steps=steps,
        cfg=guidance,
        sampler_name="euler",
        scheduler="simple",
        width=340,
    )
    decode = g.add("VAEDecode", samples=sampler["LATENT"], vae=vae["VAE"], width=340)
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
    x = g.column(0, read_me, None, *loaders)
    x = g.column(x, loader, shift, *prompts)
    x = g.column(x, latent, sampler, decode)
    g.column(x, video, save)
    g.group("Files", BLUE, *loaders)
    g.group("LoRA and prompt", GREEN, loader, shift, *prompts)
    g.group("Sampling", GREY, latent, sampler, decode)
    g.group("Video", PURPLE, video, save)
    return g.document()


def _video_settings(g: Graph, preset: str, width: float = 340) -> Node:
    return g.add("FlashGRPOVideoSettings", fields={"preset": preset}, width=width)


def _cost() -> str:
    """The arithmetic of the night, from the same plan that the command line prints."""
    config = Config()
    config.model.transformer, config.model.vae = WAN["name"], VAE["name"]
    config.model.text_encoder = UMT5["name"]
    config.prompts.file = str(ROOT / "flashgrpo_core/assets/prompts/starter.txt")
    r = config.rollout
    r.width, r.height, r.frames = 416, 240, 33
    config.schedule.steps, r.guidance = 20, 4.5
    config.run.iterations, config.eval.every = WAN_ITERATIONS, 10
    counted = plan(config)
    total = counted.total_forwards
    hours = total * FORWARD_SECONDS / 3600
    return (
        f"{r.prompts_per_iteration} prompts x {r.group_size} videos x {config.schedule.steps} steps "
        f"with guidance are about {round(total / WAN_ITERATIONS, -1):,.0f} transformer forwards per "
        f"iteration, evaluations included. {WAN_ITERATIONS} iterations are {round(total, -3):,.0f} "
        f"forwards; at about {FORWARD_SECONDS} s each (RTX 4090, 416x240, 33 frames) that is "
        f"**{hours:.0f} hours**."
    )


PAGES = {
    "01_tiny_demo": tiny_demo,
    "02_step_by_step": step_by_step,
    "03_wan21_1.3b_train": wan_train,
    "04_use_lora": use_lora,
    "04b_use_lora_tiny": use_lora_tiny,
}
