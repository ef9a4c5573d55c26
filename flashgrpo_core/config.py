"""The configuration of a run: one dataclass tree, read from TOML, validated with the fix named.

Every field carries its help text, range and choices as metadata, so that the command line, the
ComfyUI tooltips and the error messages all say the same thing. The defaults are the `recommended`
preset; `paper` replaces the values in `PAPER`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    identity: bool = True,
) -> Any:
    """A dataclass field with help, inclusive range, choices.

    `identity=False` marks settings that do not change what is being trained (how long, how often
    to save): they may differ when a run is resumed.
    """
    meta = {"help": help, "low": low, "high": high, "choices": choices, "identity": identity}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass
class ModelConfig:
    """Which files make up the policy, and the LoRA that is trained on them."""

    transformer: str = option("", "Wan diffusion model: .safetensors file, sharded index, Diffusers folder, or `tiny` for the embedded model.")
    vae: str = option("", "Wan VAE .safetensors file or folder; with `tiny` it may stay empty.")
    text_encoder: str = option("", "UMT5 text encoder .safetensors file (ComfyUI umt5_xxl layout); with `tiny` it may stay empty.")
    dtype: str = option("auto", "Compute type of the frozen weights; auto keeps 16-bit files as they are on a GPU and uses fp32 on the CPU.", choices=("auto", "fp32", "bf16", "fp16"))
    device: str = option("auto", "cuda, cuda:1, cpu, mps, or auto for the best one present.", identity=False)
    lora_rank: int = option(16, "Rank of the trained LoRA.", low=1, high=512)
    lora_alpha: float = option(32.0, "LoRA alpha; the update is scaled by alpha / rank.", low=1e-3, high=4096)
    lora_targets: list[str] = option(["attention"], "attention, ffn, or full module-name endings such as attn1.to_q; each must match.")
    continue_from: str = option("", "LoRA .safetensors whose weights training starts from; it is then the reference policy.")
    frozen_loras: list[dict[str, Any]] = option([], "LoRAs that belong to the base: tables with `file`, `strength` and, for one of two experts, `expert`.")
    gradient_checkpointing: bool = option(True, "Recompute activations in the backward pass: less memory, about a third more time.", identity=False)
    text_tokens: int = option(0, "Length of the text context; 0 = the model's own (512, tiny: 32).", low=0, high=1024)
    offload: bool = option(False, "Keep only the network of the current phase on the device.", identity=False)
    storage: str = option("auto", "How the weights of the blocks rest: fp8 keeps them in 8 bits (rounding 16-bit files row by row), full in the compute type; auto keeps fp8 files as they are on a GPU.", choices=("auto", "full", "fp8"))
    blocks_to_swap: int = option(0, "Transformer blocks, from the last, whose weights rest in host memory and are copied to the GPU while they compute: less GPU memory, more time.", low=0, high=200, identity=False)
    shard: bool = option(False, "Spread the frozen weights over all processes (FSDP2), for models that do not fit one GPU; one process keeps them whole.", identity=False)
    transformer_low: str = option("", "Low-noise expert of Wan 2.2 A14B; `transformer` is then the high-noise one. Empty for every other model.")
    train_experts: str = option("both", "With two experts, which of them get a LoRA; both always sample.", choices=("both", "high_noise", "low_noise"))
    boundary: float = option(0.0, "Sigma at which the low-noise expert takes over; 0 = 0.875 for text-to-video, 0.9 for image-to-video.", low=0.0, high=1.0)
    continue_from_low: str = option("", "Like continue_from, for the low-noise expert.")
    clip_vision: str = option("", "CLIP vision .safetensors file, which Wan 2.1 image-to-video needs: clip_vision_h.safetensors.")
    blocks_to_keep: int = option(0, "With gradient_checkpointing, transformer blocks, from the last, whose activations are kept and not recomputed: less time, more memory.", low=0, high=200, identity=False)
    vae_tile: int = option(0, "Side in pixels of the overlapping tiles that the VAE decodes one by one, a multiple of 64; 0 = whole frames, which is exact. Try 256 when decoding runs out of memory.", low=0, high=4096)


@dataclass
class PromptsConfig:
    """Where prompts come from and which are held out."""

    file: str = option("", "Prompts file: .txt (one a line) or .jsonl; with `tiny` the embedded prompts are used when empty.")
    validation_file: str = option("", "Separate prompts for validation; empty = hold out validation_share of `file`.")
    test_file: str = option("", "Separate prompts for the final test; empty = hold out test_share of `file`.")
    negative: str = option("", "Negative prompt, used when guidance is above 1.")
    validation_share: float = option(0.1, "Share of the prompts held out for validation.", low=0.0, high=0.5)
    sampling: str = option("epochs", "Order of the training prompts: epochs of random permutations, or adaptive, which passes over 3 of 4 turns of prompts whose last videos all had the same reward.", choices=("epochs", "adaptive"))
    test_share: float = option(0.1, "Share of the prompts held out for the final test.", low=0.0, high=0.5)


@dataclass
class ScheduleConfig:
    """Noise levels of the sampler and the stochastic step."""

    kind: str = option("simple", "simple = ComfyUI, unipc-a = diffusers up to 0.35 and the paper, unipc-b = newer diffusers.", choices=("simple", "unipc-a", "unipc-b"))
    steps: int = option(20, "Denoising steps of a rollout.", low=2, high=1000)
    shift: float = option(0.0, "Flow shift; 0 = 5.0 from 720p (921,600 pixels a frame) on, else 3.0. Train with the shift you sample with.", low=0.0, high=100.0)
    sde: str = option("flash", "Standard deviation of the stochastic step: flash (paper), flow (Flow-SDE), dance (DanceGRPO), cps.", choices=("flash", "flow", "dance", "cps"))
    eta: float = option(1.0, "Scale of the injected noise (flash 1.0, flow 0.7, dance 0.3, cps 0.7).", low=0.0, high=10.0)
    window: list[int] = option([], "Half-open range [first, end) of steps that may be stochastic; empty = the first half. Never contains the last step.")
    strategy: str = option("flash", "Which steps are stochastic and trained: flash (one a group), full (all of the window, Flow-GRPO), window (train_steps neighbouring ones, MixGRPO), mixed (one, but each video its own). For comparisons; flash is what this is about.", choices=("flash", "full", "window", "mixed"))
    train_steps: int = option(2, "Trained steps of strategy window.", low=1, high=100)
    place: str = option("random", "Where strategy window trains: start of the window, a random place per group, or progressive along it.", choices=("start", "random", "progressive"))
    place_every: int = option(10, "Iterations after which a progressive place moves on by one step.", low=1, high=100000)
    draw: str = option("stratified", "How prompts get their SDE step: stratified over the window, or uniform with replacement.", choices=("stratified", "uniform"))
    adaptive: bool = option(False, "Draw SDE steps in proportion to the signal-to-noise ratio of their gradient, as measured in past iterations, with importance weights (in place of `draw`); needs loss.freeze_std or loss.advantage_std = none.")
    adaptive_floor: float = option(0.5, "Share of the adaptive draw that is uniform; importance weights stay below its inverse (nearly, with few prompts).", low=0.05, high=1.0)


@dataclass
class RolloutConfig:
    """What is sampled in one iteration."""

    width: int = option(832, "Video width in pixels, a multiple of 16.", low=16, high=4096)
    height: int = option(480, "Video height in pixels, a multiple of 16.", low=16, high=4096)
    frames: int = option(81, "Number of frames, 4n+1.", low=1, high=1025)
    fps: float = option(16.0, "Frames per second of the written videos.", low=1.0, high=240.0)
    guidance: float = option(4.5, "Classifier-free guidance; 1 = none (half the cost).", low=1.0, high=30.0)
    group_size: int = option(8, "Videos per prompt. At least 2; below 4 advantages carry almost no information.", low=2, high=1024)
    prompts_per_iteration: int = option(8, "Prompts (groups) per iteration; at least 2 so that an update sees several noise levels.", low=2, high=4096)
    noise: str = option("shared", "Initial noise: one per group (shared) or one per video (independent, as in the paper).", choices=("shared", "independent"))
    shared_prefix: bool = option(True, "With shared noise, compute the steps before the stochastic one once per group (exact).")
    suffix_share: float = option(1.0, "Share of the steps after the stochastic one that is taken; below 1 a second-order solver takes them (DPM-Solver++ 2M): cheaper videos, an approximate reward, an unchanged gradient.", low=0.05, high=1.0)
    micro_batch: int = option(4, "Videos of one group that go through the transformer together.", low=1, high=1024, identity=False)
    decode_batch: int = option(1, "Videos decoded and scored together.", low=1, high=256, identity=False)
    guidance_low: float = option(0.0, "Guidance of the low-noise expert of Wan 2.2 A14B; 0 = the same as guidance.", low=0.0, high=30.0)
    guidance_interval: list[float] = option([], "Noise levels [low, high] in 0 to 1 at which rollouts are guided; outside they cost half. Empty = all. The trained step follows the same rule; evaluation is guided everywhere: an approximate policy.")
    guidance_batched: str = option("auto", "Both halves of guidance in one forward (batched: more memory, faster for small videos) or one after the other (sequential); auto batches forwards of up to 4096 tokens.", choices=("auto", "batched", "sequential"))
    cache_threshold: float = option(0.0, "Step caching of the steps after the stochastic one: a step whose first block changes by less than this share since the last full step skips the other blocks. 0 = off; 0.05 to 0.2 are usual: cheaper videos, an approximate reward, an unchanged gradient.", low=0.0, high=10.0)
    keep_graph: float = option(1.0, "GiB for the activations of trained forwards that are kept from the rollout, so that the update need not compute them again: same bits, less time. 0 = off; one network that moves (offload, ComfyUI) keeps none.", low=0.0, high=10000.0, identity=False)


@dataclass
class RewardConfig:
    """The reward: a weighted mix of named terms."""

    terms: list[dict[str, Any]] = option([], "Tables with `name`, `weight` and the term's own options; empty = technical + motion (tiny: tiny_world).")
    on_nan: str = option("auto", "A score that is not finite: stop with an error, or mask the video out of its group; auto masks when a term is served by another process, which may fail for a moment, else stops.", choices=("auto", "error", "mask"), identity=False)
    normalise: bool = option(True, "Standardise each term's advantage on its own before weighting, so that no term decides by its scale.")
    overlap: bool = option(False, "Score one micro-batch in a thread while the next is sampled: saves the time of served rewards and of rewards on another device. Same numbers; both networks stay on the device.", identity=False)


@dataclass
class LossConfig:
    """Advantages and the clipped policy-gradient loss."""

    advantage_std: str = option("update", "Divisor of the advantages: update (group-centred rewards of the whole update), group, max_group, none, raw_update (paper).", choices=("update", "group", "max_group", "none", "raw_update"))
    advantage_clamp: float = option(5.0, "Largest absolute advantage.", low=0.1, high=1000.0)
    clip: float = option(1e-3, "Clip range of the probability ratio.", low=1e-8, high=1.0)
    rectification: str = option("pool", "Normaliser of the temporal gradient rectification 1/lambda: pool (mean over the window), update (mean over the update, paper), none (weights 1).", choices=("pool", "update", "none"))
    kl: float = option(0.0, "Weight of the KL divergence to the reference policy.", low=0.0, high=100.0)
    ratio: str = option("plain", "Probability ratio: plain, or guard (normalised as in GRPO-Guard, which clips at about 2e-6); they differ only from the second update of a rollout batch on.", choices=("plain", "guard"))
    mask: str = option("clip", "What holds back a sample whose ratio has moved: clip, or kl (Flow-DPPO: a mask on the step's exact KL divergence from the sampling policy).", choices=("clip", "kl"))
    algorithm: str = option("grpo", "What is done with scored videos: grpo (policy gradient of the stochastic step), or nft (DiffusionNFT: the plain ODE samples, and the velocity is regressed on its noised videos; needs rollout.noise = independent).", choices=("grpo", "nft"))
    nft_beta: float = option(1.0, "How far DiffusionNFT's positive and negative policies lie from the sampling policy; matters from the second update of a rollout batch on.", low=1e-3, high=10.0)
    nft_levels: int = option(2, "Noise levels at which DiffusionNFT trains each video: a forward and backward each.", low=1, high=1000)
    freeze_std: bool = option(False, "Divide advantages by the std of past iterations, so that it does not depend on the rewards that it divides; the first iteration uses its own.")
    kl_on_drop: float = option(0.0, "Weight of the KL divergence from when the validation reward first falls below its best by more than its interval; 0 = never.", low=0.0, high=100.0)
    kl_threshold: float = option(1e-5, "Largest KL divergence per latent element of mask kl.", low=1e-12, high=1.0)


@dataclass
class OptimConfig:
    """AdamW on the LoRA."""

    learning_rate: float = option(3e-5, "AdamW learning rate.", low=1e-9, high=1.0)
    warmup: int = option(5, "Iterations over which the learning rate rises linearly.", low=0, high=100000)
    beta1: float = option(0.9, "AdamW beta 1.", low=0.0, high=0.9999)
    beta2: float = option(0.999, "AdamW beta 2.", low=0.0, high=0.999999)
    eps: float = option(1e-15, "AdamW epsilon; gradients here are about 1e-8, so the usual 1e-8 would throttle them. 0 would divide by zero where a gradient is 0.", low=1e-20, high=1e-2)
    weight_decay: float = option(1e-4, "AdamW weight decay.", low=0.0, high=1.0)
    max_grad_norm: float = option(0.0, "Gradient clip norm; 0 = 0.003 * sqrt(2.1e6 / D), D the latent elements of one video (none with loss.algorithm = nft).", low=0.0, high=1e6)
    spike: float = option(5.0, "Also clip at this many times the median gradient norm of the last 16 steps, so that a single odd batch cannot throw the policy; 0 = off.", low=0.0, high=1e6)
    updates_per_rollout: int = option(1, "Optimizer steps per rollout batch; above 1 the later ones are off-policy.", low=1, high=64)
    ema_decay: float = option(0.9, "Decay of the exponential moving average of the LoRA, per optimizer step; 0 = off.", low=0.0, high=0.99999)
    kind: str = option("adamw", "adamw, or adamw8bit, which keeps AdamW's moments in 8 bits (a quarter of their memory, which matters for large ranks); it comes with pip install 'flashgrpo[adamw8bit]'.", choices=("adamw", "adamw8bit"))


@dataclass
class EvalConfig:
    """Held-out evaluation with the ODE sampler."""

    every: int = option(10, "Iterations between evaluations on the validation prompts; 0 = only the final test.", low=0, high=100000, identity=False)
    prompts: int = option(8, "Validation prompts used at each evaluation (at most those held out).", low=1, high=10000)
    seeds: int = option(2, "Videos per prompt at each evaluation.", low=1, high=1000)
    test_prompts: int = option(16, "Test prompts judged once at the end (at most those held out).", low=0, high=10000)
    test_seeds: int = option(2, "Videos per test prompt.", low=1, high=1000)
    weights: str = option("ema", "Which weights are judged and exported: ema or live.", choices=("ema", "live"))
    patience: int = option(0, "Stop after this many evaluations without a better validation reward; 0 = never.", low=0, high=1000, identity=False)
    terms: list[dict[str, Any]] = option([], "Reward terms used for evaluation; empty = the training reward.")


@dataclass
class RunConfig:
    """The run itself: name, folder, length."""

    name: str = option("run", "Name of the run folder: letters, digits, dot, dash, underscore; at most 64.", identity=False)
    output: str = option("output", "Folder that gets flashgrpo/runs/<name>.", identity=False)
    preset: str = option("recommended", "Defaults: recommended or paper.", choices=("recommended", "paper"))
    iterations: int = option(100, "Iterations to train (one optimizer step each).", low=0, high=1000000, identity=False)
    seed: int = option(0, "Seed of every random draw of the run.", low=0, high=2**63 - 1)
    save_every: int = option(10, "Iterations between checkpoints that are kept; the newest is always kept.", low=1, high=100000, identity=False)
    keep: int = option(3, "Checkpoints kept besides the best one.", low=1, high=1000, identity=False)
    processes: int = option(0, "Expected number of processes; 0 = whatever was launched.", low=0, high=4096, identity=False)
    timeout: int = option(1800, "Seconds that a process waits for the others before it gives up.", low=10, high=86400, identity=False)
    stall: int = option(600, "Seconds without a step forward after which a warning names the process and the phase; 0 = off.", low=0, high=86400, identity=False)
    threads: int = option(0, "CPU threads per process; 0 = torch's choice. Results are bit-identical only at equal threads.", low=0, high=1024, identity=False)
    trackers: list[str] = option([], "Also draw the curves with tensorboard or wandb (offline), into the run folder; they come with pip install 'flashgrpo[trackers]'.", identity=False)
    lora_format: str = option("comfyui", "Key names of exported LoRAs.", choices=("comfyui", "kohya", "diffusers"), identity=False)
    model_preset: str = option("", "Settings for a model on a card, e.g. `Wan 2.1 1.3B, 12 GB, 416x240`; `flashgrpo plan --presets` lists them. What the tables set themselves goes before.", identity=False)


@dataclass
class Config:
    """All settings of a run. Tables as in the TOML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)


#: The paper's settings where they differ from the defaults (method of arXiv 2605.15980 and its
#: reference code); everything else keeps the recommended value.
PAPER: dict[str, dict[str, Any]] = {
    "schedule": {"kind": "unipc-a", "shift": 3.0, "draw": "uniform"},
    "rollout": {"fps": 15.0, "prompts_per_iteration": 24, "noise": "independent", "shared_prefix": False},
    "loss": {"advantage_std": "raw_update", "rectification": "update"},
    "reward": {"normalise": False},
    "optim": {"learning_rate": 1e-4, "warmup": 0, "eps": 1e-8, "max_grad_norm": 1.0, "spike": 0.0},
}

#: What changes when the embedded tiny Wan is trained and the user did not say otherwise.
TINY: dict[str, dict[str, Any]] = {
    "model": {"dtype": "fp32", "gradient_checkpointing": False},
    "schedule": {"steps": 10, "shift": 3.0},
    "rollout": {
        "width": 64,
        "height": 64,
        "frames": 9,
        "fps": 8.0,
        "guidance": 1.0,
        "prompts_per_iteration": 6,
        "micro_batch": 8,
        "decode_batch": 8,
    },
    "optim": {"learning_rate": 3e-4},
}

#: Programs that can draw the curves of a run.
TRACKERS = ("tensorboard", "wandb")

PRESETS: dict[str, dict[str, dict[str, Any]]] = {"recommended": {}, "paper": PAPER}
