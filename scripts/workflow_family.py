"""Workflows 05 to 08: every other Wan model, trained on one card, and its LoRA in stock nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workflow_graph import Graph, Info, Node
from workflow_parts import (
    BLUE,
    CLIP_VISION,
    FIVE,
    FOURTEEN,
    GREEN,
    GREY,
    NEGATIVE,
    PURPLE,
    STARTER_PROMPTS,
    UMT5,
    VAE,
    Size,
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

from flashgrpo_core.experts import switch_step
from flashgrpo_core.presets import preset_tables
from flashgrpo_core.schedule import make_schedule

STOCK_NODES = {
    "UNETLoader",
    "CLIPLoader",
    "CLIPVisionLoader",
    "CLIPVisionEncode",
    "VAELoader",
    "LoadImage",
    "LoraLoaderModelOnly",
    "ModelSamplingSD3",
    "CLIPTextEncode",
    "EmptyHunyuanLatentVideo",
    "Wan22ImageToVideoLatent",
    "WanImageToVideo",
    "KSampler",
    "KSamplerAdvanced",
    "VAEDecode",
    "CreateVideo",
    "SaveVideo",
}

#: Comes with ComfyUI; anyone's own picture takes its place.
START_IMAGE = "example.png"
#: Movements that any picture can begin with.
MOVEMENTS = """\
The camera slowly moves closer while the scene stays calm.
The camera glides slowly to the left, near things pass faster than far ones.
The camera glides slowly to the right and the light shifts softly.
The camera pulls back steadily and shows more of the surroundings.
The camera rises slowly and looks down at the scene.
The camera circles around the main subject in a smooth arc.
A gentle wind moves everything that is light: hair, cloth, leaves, grass.
A strong gust of wind passes through the picture from left to right, then it is still again.
The main subject turns slowly to the left and back.
The main subject turns slowly to the right and stops.
The main subject takes a few steps towards the camera.
The main subject moves away from the camera, unhurried.
The main subject raises itself, pauses and settles again.
The main subject begins to move quickly and leaves the picture to the right.
Clouds drift across the sky and their shadows pass over the ground.
The light changes from noon to the warm light of a late afternoon.
The light dims slowly until only a few bright spots are left.
Snow begins to fall in large slow flakes.
Light rain sets in and surfaces become wet and shiny.
Fog drifts through the scene from behind and thins out again.
Small particles of dust float through a beam of light.
Everything moves in slow motion, each movement clear and steady.
The background comes alive with small movements while the main subject stays still.
The camera is handheld and follows the main subject with slight natural movements."""


@dataclass(frozen=True)
class Family:
    """One model and how its workflow trains it.

    Attributes:
        title: as people call it.
        size: shape of the model.
        files: diffusion model, or high-noise and low-noise expert.
        preset: preset of Video Settings.
        run: name of the run and of its LoRA.
        use: name of the workflow that renders with the LoRA.
        intro: first lines of the note.
        cards: which preset for which card.
        hint: last lines of the second note.
        iterations: iterations of the workflow.
        vae: VAE.
        settings: Advanced Training Settings.
    """

    title: str
    size: Size
    files: tuple[dict[str, str], ...]
    preset: str
    run: str
    use: str
    intro: str
    cards: str
    hint: str
    iterations: int
    vae: dict[str, str] = field(default_factory=lambda: VAE)
    settings: dict[str, Any] = field(
        default_factory=lambda: {
            "group_size": 6,
            "prompts_per_iteration": 4,
            "validation_prompts": 4,
            "validation_seeds": 1,
            "test_prompts": 6,
            "test_seeds": 1,
            "suffix_share": 0.5,
        }
    )

    @property
    def loras(self) -> list[str]:
        """The LoRA that the workflow saves, or one for each expert."""
        marks = ("_high_noise", "_low_noise") if len(self.files) == 2 else ("",)
        return [f"flashgrpo/{self.run}{mark}" for mark in marks]

    def tables(self) -> dict[str, dict[str, Any]]:
        """What the workflow sets besides the preset, for the estimate of its time."""
        s = self.settings
        return {
            "rollout": {
                key: s[key] for key in ("group_size", "prompts_per_iteration", "suffix_share")
            },
            "eval": {
                "every": EVERY,
                "prompts": s["validation_prompts"],
                "seeds": s["validation_seeds"],
                "test_prompts": s["test_prompts"],
                "test_seeds": s["test_seeds"],
            },
            "run": {"iterations": self.iterations},
        }


EVERY = 10

T2V_14B = Family(
    title="Wan 2.1 14B",
    size=FOURTEEN,
    files=(model_file("diffusion_models", "wan2.1_t2v_14B_fp8_scaled.safetensors"),),
    preset="Wan 2.1 14B T2V, 24 GB, 624x352",
    run="wan21_14b",
    use="05b_wan21_14b_use",
    intro="Trains a LoRA for **Wan 2.1 14B** text-to-video. The weights stay in 8 bits and, by the "
    "preset, many blocks wait in main memory: plan for **32 GB of it**.",
    cards="**Other cards:** *Video Settings* has presets for 12, 16, 48 and 80 GB. 12 and 16 GB "
    "mean 416x240; from 48 GB on nothing waits in main memory. The bf16 file works, too.",
    hint="**LoRAs of the 1.3B model do not fit 14B**, nor the other way round: loading one is "
    "refused with the reason.",
    iterations=40,
)
T2V_A14B = Family(
    title="Wan 2.2 A14B",
    size=FOURTEEN,
    files=tuple(
        model_file("diffusion_models", f"wan2.2_t2v_{mark}_14B_fp8_scaled.safetensors", "2.2")
        for mark in ("high_noise", "low_noise")
    ),
    preset="Wan 2.2 A14B T2V, 24 GB, 624x352",
    run="wan22_a14b",
    use="06b_wan22_a14b_use",
    intro="Trains **both experts of Wan 2.2 A14B** in one run and saves **two LoRAs**, *high_noise* "
    "and *low_noise*. One expert is on the card at a time; the other, and many blocks, wait in main "
    "memory: plan for **48 GB of it**.",
    cards="**Other cards:** *Video Settings* has presets for 12, 16, 48 and 80 GB. **Half the "
    "iterations:** *train_experts* = high_noise learns movement and composition only.",
    hint="**Each LoRA belongs to its expert.** On the wrong one it is refused here, and does harm in "
    "loaders that do not check.",
    iterations=40,
)
TI2V_5B = Family(
    title="Wan 2.2 5B",
    size=FIVE,
    files=(model_file("diffusion_models", "wan2.2_ti2v_5B_fp16.safetensors", "2.2"),),
    preset="Wan 2.2 5B, 24 GB, 704x384",
    run="wan22_5b",
    use="07b_wan22_5b_use",
    intro="Trains a LoRA for **Wan 2.2 TI2V 5B**. It has a VAE of its own, **wan2.2_vae**; width and "
    "height are multiples of 32.",
    cards="**Other cards:** *Video Settings* has presets from 12 to 80 GB.",
    hint="**Start images are optional:** connect *Load Image* to *start_image* of Prompts, or name an "
    "image for each prompt in a .jsonl file. With and without can be mixed.",
    iterations=60,
    vae=model_file("vae", "wan2.2_vae.safetensors", "2.2"),
)
I2V_14B = Family(
    title="Wan 2.1 14B image-to-video",
    size=FOURTEEN,
    files=(model_file("diffusion_models", "wan2.1_i2v_480p_14B_fp8_scaled.safetensors"),),
    preset="Wan 2.1 14B I2V, 24 GB, 624x352",
    run="wan21_i2v",
    use="08b_wan21_i2v_use",
    intro="Trains a LoRA for **Wan 2.1 14B image-to-video**, the layers that read the image included "
    "(*lora_targets*). **Choose your picture in Load Image**; the prompts are movements that any "
    "picture can begin with. Plan for **32 GB of main memory**.",
    cards="**Other cards:** *Video Settings* has presets for 12, 16, 48 and 80 GB.",
    hint="**Many pictures** teach more than one: in *input*, a .jsonl file with a line such as "
    '`{"prompt": "she turns round", "image": "a.png"}` for each; choose it as *source* of Prompts.',
    iterations=40,
)


def train_t2v_14b(info: Info, name: str) -> dict[str, Any]:
    """Train Wan 2.1 T2V 14B."""
    return _train(Graph(info, name), T2V_14B)


def train_a14b(info: Info, name: str) -> dict[str, Any]:
    """Train both experts of Wan 2.2 T2V A14B."""
    return _train(Graph(info, name), T2V_A14B)


def train_5b(info: Info, name: str) -> dict[str, Any]:
    """Train Wan 2.2 TI2V 5B."""
    return _train(Graph(info, name), TI2V_5B)


def train_i2v(info: Info, name: str) -> dict[str, Any]:
    """Train Wan 2.1 I2V 14B from a start image."""
    return _train(Graph(info, name), I2V_14B)


def _start(family: Family) -> str:
    """Text of the first note."""
    two = len(family.files) == 2
    return (
        f"{family.intro}\n\n"
        f"**How long?** {cost(family.size, family.preset, family.tables(), two_experts=two)} This is "
        "arithmetic, not a measurement: after its first iteration Train says the time *on your "
        "card* and the memory it needed. A cancelled run goes on with Run, and each evaluation "
        "writes a LoRA that the loaders list.\n\n"
        "**Faster:** a speed LoRA through *Frozen LoRA* into *Load Wan Policy*, with 8 steps and "
        "guidance 1 in *Video Settings*; render with the same one.\n\n"
        f"{family.cards}"
    )


def _train(g: Graph, family: Family) -> dict[str, Any]:
    two, image = len(family.files) == 2, family is I2V_14B
    read_me = g.note(_start(family), width=370, height=470, title=f"Start here: {family.title}")
    video = video_settings(g, family.preset, width=370)
    picture = (
        g.add("LoadImage", image=START_IMAGE, listed=False, height=350, width=370)
        if image
        else None
    )
    policy = _policy(g, family)
    prompts = g.add(
        "FlashGRPOPrompts",
        source="the text below" if image else STARTER_PROMPTS,
        text=MOVEMENTS if image else "",
        text_encoder=UMT5["name"],
        negative=NEGATIVE,
        start_image=picture["IMAGE"] if picture else None,
        models=[UMT5],
        listed=False,
        width=360,
    )
    technical = g.add("FlashGRPORewardTechnical", width=360)
    motion = g.add("FlashGRPORewardMotion", previous=technical["reward"], width=360)
    advanced = g.add(
        "FlashGRPOTrainAdvanced", title="One-card settings", width=360, **family.settings
    )
    advanced.collapsed = True
    train = g.add(
        "FlashGRPOTrain",
        policy=policy["policy"],
        prompts=prompts["prompts"],
        video_settings=video["video_settings"],
        reward=motion["reward"],
        advanced=advanced["advanced"],
        iterations=family.iterations,
        evaluate_every=EVERY,
        picture=True,
        width=430,
    )
    saves = [
        g.add(
            "FlashGRPOSaveLora",
            lora=train[slot],
            name=lora,
            title=f"Save LoRA: {mark} expert" if two else None,
            width=400,
        )
        for slot, mark, lora in zip(
            ("lora", "lora_low_noise"), ("high-noise", "low-noise"), family.loras, strict=False
        )
    ]
    compare = g.add(
        "FlashGRPOCompare",
        trained=train["run"],
        prompts=prompts["prompts"],
        video_settings=video["video_settings"],
        picture=True,
        width=400,
    )
    after = g.note(
        f"**Use the LoRA:** press **R**, then open *{family.use}*. No trigger word; strength 1.0 is "
        "what was trained. **Render at the size, steps, shift and guidance you trained with.**\n\n"
        f"{family.hint}",
        width=360,
        height=210,
        title="Good to know",
    )
    # What flows into the prompts stands left of them.
    x = g.column(0, read_me, None, picture or video)
    x = g.column(x, policy, prompts)
    x = g.column(x, technical, motion, None, video if picture else after)
    x = g.column(x, train, None, advanced)
    g.column(x, *saves, compare, *([None, after] if picture else []))
    g.group("Videos", BLUE, video)
    g.group("Model and prompts", BLUE, policy, prompts)
    g.group("Reward: a chain is a mix", GREEN, technical, motion)
    if picture:
        g.group("Start image", BLUE, picture)
    g.group("Training", GREEN, train)
    g.group("Result", PURPLE, *saves, compare)
    return g.document()


def _policy(g: Graph, family: Family) -> Node:
    """Load Wan Policy with the files and the LoRA shape of the preset."""
    model = preset_tables(family.preset)["model"]
    files = [*family.files, family.vae]
    clip_vision = "none"
    if family is I2V_14B:
        files.append(CLIP_VISION)
        clip_vision = CLIP_VISION["name"]
    return g.add(
        "FlashGRPOLoadPolicy",
        run_name=family.run,
        diffusion_model=family.files[0]["name"],
        low_noise_model=family.files[1]["name"] if len(family.files) == 2 else "none",
        vae=family.vae["name"],
        lora_rank=model["lora_rank"],
        lora_alpha=model["lora_alpha"],
        lora_targets=", ".join(model["lora_targets"]),
        continue_from="none",
        continue_from_low="none",
        clip_vision=clip_vision,
        models=files,
        listed=False,
        width=400 if len(family.files) == 2 else 360,
    )


# --- rendering ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How videos of a preset are sampled, as stock nodes take it."""

    size: tuple[int, int, int]
    fps: float
    steps: int
    shift: float
    guidance: float
    guidance_low: float

    @classmethod
    def of(cls, family: Family) -> Sampling:
        """Of the preset that a family is trained with."""
        tables = preset_tables(family.preset)
        r, s = tables["rollout"], tables["schedule"]
        size = (r["width"], r["height"], r["frames"])
        # 0 is the model's own, which is 3 below 720p.
        shift = s["shift"] or 3.0
        return cls(size, r["fps"], s["steps"], shift, r["guidance"], r["guidance_low"])

    @property
    def fields(self) -> dict[str, int]:
        """Of the nodes that make empty latents."""
        return dict(zip(("width", "height", "length"), self.size, strict=True))


def _use_note(g: Graph, family: Family, train: str, more: str, height: float = 300) -> Node:
    plural = "s" if len(family.files) == 2 else ""
    return g.note(
        f"The LoRA{plural} from *{train}* in a plain Wan graph: nothing here comes from this pack. "
        f"Choose your LoRA{plural} in **LoraLoaderModelOnly** (press **R** if not listed yet).\n\n"
        "- **No trigger word**; strength 1.0 is what was trained, try **0.5 to 1.5**, 0 is the base "
        "model.\n"
        "- Render at the **size, steps, shift and guidance you trained with**.\n"
        "- Other LoRAs, a speed LoRA too, go into the chain before or after.\n"
        f"{more}",
        width=360,
        height=height,
        title="Use your LoRA" + plural,
    )


def use_t2v_14b(info: Info, name: str) -> dict[str, Any]:
    """Render with the LoRA of 05."""
    g, s = Graph(info, name), Sampling.of(T2V_14B)
    read_me = _use_note(g, T2V_14B, "05_wan21_14b_train", "")
    model, clip, vae = load_model(g, T2V_14B.files[0]), load_clip(g), load_vae(g)
    positive, negative = encode_texts(g, clip)
    latent = g.add("EmptyHunyuanLatentVideo", width=340, title="Size and frames", fields=s.fields)
    return _one_sampler(g, T2V_14B, read_me, [model, clip, vae], [positive, negative], latent)


def use_5b(info: Info, name: str) -> dict[str, Any]:
    """Render with the LoRA of 07."""
    g, s = Graph(info, name), Sampling.of(TI2V_5B)
    more = "- For image-to-video connect *Load Image* to **start_image** of *Size and frames*."
    read_me = _use_note(g, TI2V_5B, "07_wan22_5b_train", more, height=330)
    model, clip = load_model(g, TI2V_5B.files[0]), load_clip(g)
    vae = load_vae(g, TI2V_5B.vae)
    positive, negative = encode_texts(g, clip)
    latent = g.add(
        "Wan22ImageToVideoLatent",
        vae=vae["VAE"],
        width=340,
        title="Size and frames",
        fields=s.fields,
    )
    return _one_sampler(g, TI2V_5B, read_me, [model, clip, vae], [positive, negative], latent)


def _one_sampler(
    g: Graph, family: Family, read_me: Node, loaders: list[Node], prompts: list[Node], latent: Node
) -> dict[str, Any]:
    s = Sampling.of(family)
    loader, shift = lora_and_shift(g, loaders[0], f"{family.loras[0]}.safetensors", s.shift)
    positive, negative = (output(prompt) for prompt in prompts)
    sampler = sample(g, shift, positive, negative, output(latent), s.steps, s.guidance)
    decode, video, save = decode_and_save(g, output(sampler), loaders[-1], s.size, s.fps)
    x = g.column(0, read_me, None, *loaders)
    x = g.column(x, loader, shift, *prompts)
    x = g.column(x, latent, sampler, decode)
    g.column(x, video, save)
    g.group("Files", BLUE, *loaders)
    g.group("LoRA and prompt", GREEN, loader, shift, *prompts)
    g.group("Sampling", GREY, latent, sampler, decode)
    g.group("Video", PURPLE, video, save)
    return g.document()


def use_a14b(info: Info, name: str) -> dict[str, Any]:
    """Render with both LoRAs of 06: two samplers that change where training changes."""
    g, family = Graph(info, name), T2V_A14B
    s = Sampling.of(family)
    switch = _switch(s.steps, s.shift)
    others = ", ".join(f"{_switch(s.steps, shift)} at shift {shift:g}" for shift in (3.0, 8.0))
    read_me = _use_note(
        g,
        family,
        "06_wan22_a14b_train",
        f"- The samplers change experts at **step {switch} of {s.steps}**, where training does: the "
        f"first sigma below 0.875 at shift {s.shift:g}. It would be step {others}.",
        height=370,
    )
    models = [
        load_model(g, file, f"Load Diffusion Model: {mark} noise", width=420)
        for file, mark in zip(family.files, ("high", "low"), strict=True)
    ]
    clip, vae = load_clip(g, width=420), load_vae(g, width=420)
    chains = [
        lora_and_shift(g, model, f"{lora}.safetensors", s.shift, f"{mark}-noise ")
        for model, lora, mark in zip(models, family.loras, ("high", "low"), strict=True)
    ]
    positive, negative = encode_texts(g, clip)
    latent = g.add("EmptyHunyuanLatentVideo", width=340, title="Size and frames", fields=s.fields)
    common: dict[str, Any] = {
        "positive": output(positive),
        "negative": output(negative),
        "noise_seed": 0,
        "steps": s.steps,
        "sampler_name": "euler",
        "scheduler": "simple",
        "width": 340,
    }
    high = g.add(
        "KSamplerAdvanced",
        model=chains[0][1]["MODEL"],
        latent_image=output(latent),
        add_noise="enable",
        cfg=s.guidance,
        start_at_step=0,
        end_at_step=switch,
        return_with_leftover_noise="enable",
        title=f"KSampler: high noise, steps 0 to {switch}",
        **common,
    )
    low = g.add(
        "KSamplerAdvanced",
        model=chains[1][1]["MODEL"],
        latent_image=output(high),
        add_noise="disable",
        cfg=s.guidance_low,
        start_at_step=switch,
        end_at_step=10000,
        return_with_leftover_noise="disable",
        title=f"KSampler: low noise, step {switch} to the end",
        **common,
    )
    decode, video, save = decode_and_save(g, output(low), vae, s.size, s.fps)
    nodes = [node for chain in chains for node in chain]
    x = g.column(0, read_me, None, *models, clip, vae)
    x = g.column(x, *nodes, positive, negative)
    x = g.column(x, latent, high, low)
    g.column(x, decode, video, save)
    g.group("Files", BLUE, *models, clip, vae)
    g.group("LoRAs and prompt", GREEN, *nodes, positive, negative)
    g.group("Sampling", GREY, latent, high, low)
    g.group("Video", PURPLE, decode, video, save)
    return g.document()


def _switch(steps: int, shift: float) -> int:
    """First step of the low-noise expert of A14B text-to-video."""
    return switch_step(make_schedule("simple", steps, shift), 0.875)


def use_i2v(info: Info, name: str) -> dict[str, Any]:
    """Render with the LoRA of 08 from a start image."""
    g, family = Graph(info, name), I2V_14B
    s = Sampling.of(family)
    more = "- **Choose your picture in Load Image**; crop *none* is what training does."
    read_me = _use_note(g, family, "08_wan21_i2v_train", more, height=330)
    model, clip, vae = load_model(g, family.files[0]), load_clip(g), load_vae(g)
    vision = g.add(
        "CLIPVisionLoader",
        clip_name=CLIP_VISION["name"],
        models=[CLIP_VISION],
        listed=False,
        width=360,
    )
    loader, shift = lora_and_shift(g, model, f"{family.loras[0]}.safetensors", s.shift)
    positive, negative = encode_texts(g, clip, MOVEMENTS.splitlines()[6])
    picture = g.add("LoadImage", image=START_IMAGE, listed=False, height=350, width=340)
    seen = g.add(
        "CLIPVisionEncode",
        clip_vision=vision["CLIP_VISION"],
        image=picture["IMAGE"],
        crop="none",
        width=340,
    )
    start = g.add(
        "WanImageToVideo",
        positive=output(positive),
        negative=output(negative),
        vae=vae["VAE"],
        clip_vision_output=output(seen),
        start_image=picture["IMAGE"],
        title="Start image, size and frames",
        width=340,
        fields=s.fields,
    )
    sampler = sample(
        g, shift, start["positive"], start["negative"], start["latent"], s.steps, s.guidance
    )
    decode, video, save = decode_and_save(g, output(sampler), vae, s.size, s.fps)
    x = g.column(0, read_me, None, model, clip, vision, vae)
    x = g.column(x, loader, shift, positive, negative)
    x = g.column(x, picture, seen, start)
    x = g.column(x, sampler, decode)
    g.column(x, video, save)
    g.group("Files", BLUE, model, clip, vision, vae)
    g.group("LoRA and prompt", GREEN, loader, shift, positive, negative)
    g.group("Start image", BLUE, picture, seen, start)
    g.group("Sampling", GREY, sampler, decode)
    g.group("Video", PURPLE, video, save)
    return g.document()


#: Workflow that trains -> the family and the workflow that renders with its LoRA.
FAMILIES = {
    "05_wan21_14b_train": T2V_14B,
    "06_wan22_a14b_train": T2V_A14B,
    "07_wan22_5b_train": TI2V_5B,
    "08_wan21_i2v_train": I2V_14B,
}
PAGES = {
    "05_wan21_14b_train": train_t2v_14b,
    "05b_wan21_14b_use": use_t2v_14b,
    "06_wan22_a14b_train": train_a14b,
    "06b_wan22_a14b_use": use_a14b,
    "07_wan22_5b_train": train_5b,
    "07b_wan22_5b_use": use_5b,
    "08_wan21_i2v_train": train_i2v,
    "08b_wan21_i2v_use": use_i2v,
}
