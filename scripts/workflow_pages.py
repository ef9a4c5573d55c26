"""The workflows that come with the pack: nodes, places, titles and notes of 01 to 04."""

from __future__ import annotations

from typing import Any

import workflow_family
from workflow_graph import Graph, Info, Node
from workflow_parts import (
    BLUE,
    GREEN,
    GREY,
    NEGATIVE,
    PURPLE,
    SMALL,
    STARTER_PROMPTS,
    TINY,
    TINY_PRESET,
    TINY_PROMPTS,
    UMT5,
    VAE,
    cost,
    decode_and_save,
    encode_texts,
    load_clip,
    load_model,
    load_vae,
    lora_and_shift,
    model_file,
    output,
    sample,
    video_settings,
)

from flashgrpo_core.embedded import demo_tables

STOCK_NODES = workflow_family.STOCK_NODES

# The same name for the tiny demo's run and for the LoRA that 04b loads.
TINY_RUN = "tiny_demo"
TINY_LORA = f"flashgrpo/{TINY_RUN}.safetensors"
WAN_PRESET = "Wan 2.1 1.3B, 24 GB, 416x240"
WAN_RUN = "wan21_1.3b"
WAN_LORA = f"flashgrpo/{WAN_RUN}.safetensors"
WAN = model_file("diffusion_models", "wan2.1_t2v_1.3B_bf16.safetensors")
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
    video = video_settings(g, TINY_PRESET)
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
    video = video_settings(g, TINY_PRESET, width=330)
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
    hours = cost(SMALL, WAN_PRESET, {"run": {"iterations": WAN_ITERATIONS}, "eval": {"every": 10}})
    read_me = g.note(
        "Trains a LoRA for **Wan 2.1 1.3B** with rewards for technical quality and movement. "
        "Missing files are listed when this opens; the dialog says where each one goes.\n\n"
        "**How long?** " + hours + "\n\n"
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
    video = video_settings(g, WAN_PRESET, width=350)
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
        negative=NEGATIVE,
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
    model, clip, vae = load_model(g, WAN), load_clip(g), load_vae(g)
    positive, negative = encode_texts(g, clip)
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
    loader, shift = lora_and_shift(g, model, lora, 3.0)
    latent = g.add(
        "EmptyHunyuanLatentVideo",
        width=340,
        title="Size and frames",
        fields={"width": size[0], "height": size[1], "length": size[2]},
    )
    sampler = sample(
        g, shift, output(prompts[0]), output(prompts[1]), output(latent), steps, guidance
    )
    decode, video, save = decode_and_save(g, output(sampler), vae, size, fps)
    x = g.column(0, read_me, None, *loaders)
    x = g.column(x, loader, shift, *prompts)
    x = g.column(x, latent, sampler, decode)
    g.column(x, video, save)
    g.group("Files", BLUE, *loaders)
    g.group("LoRA and prompt", GREEN, loader, shift, *prompts)
    g.group("Sampling", GREY, latent, sampler, decode)
    g.group("Video", PURPLE, video, save)
    return g.document()


PAGES = {
    "01_tiny_demo": tiny_demo,
    "02_step_by_step": step_by_step,
    "03_wan21_1.3b_train": wan_train,
    "04_use_lora": use_lora,
    "04b_use_lora_tiny": use_lora_tiny,
    **workflow_family.PAGES,
}
