"""English names of inputs, outputs, link types, and the texts of the monitor."""

from __future__ import annotations

#: Where the id with spaces for underscores would not read well.
INPUT_NAMES = {
    "vae": "VAE",
    "clip": "clip range",
    "FlashGRPOPrompts.clip": "CLIP",
    "dtype": "compute type",
    "lora_rank": "LoRA rank",
    "lora_alpha": "LoRA alpha",
    "lora_targets": "LoRA targets",
    "lora": "LoRA",
    "frozen_loras": "frozen LoRAs",
    "speed_loras": "speed LoRAs",
    "negative": "negative prompt",
    "kl": "KL weight",
    "sde": "SDE",
    "ema_decay": "EMA decay",
    "on_nan": "when not finite",
    "fps": "frames per second",
    "evaluate_every": "evaluate every",
}
OUTPUT_NAMES = {
    "lora": "LoRA",
    "lora_low_noise": "LoRA low noise",
    "lora_name": "LoRA name",
    "frozen_loras": "frozen LoRAs",
}
TYPE_NAMES = {
    "FLASHGRPO_POLICY": "policy",
    "FLASHGRPO_FROZEN_LORAS": "frozen LoRAs",
    "FLASHGRPO_VIDEO_SETTINGS": "video settings",
    "FLASHGRPO_PROMPTS": "prompts",
    "FLASHGRPO_GROUPS": "groups",
    "FLASHGRPO_ROLLOUTS": "rollouts",
    "FLASHGRPO_REWARD": "reward",
    "FLASHGRPO_SCORED": "scored rollouts",
    "FLASHGRPO_ADVANCED": "advanced settings",
    "FLASHGRPO_RUN": "run",
}
#: The same as TEXT in web/flashgrpo.js, which has them for servers without locales.
MONITOR = {
    "waiting": "The reward curve appears here while this node trains.",
    "no_run_name": "Link a policy with a run name to see its training here.",
    "offline": "No answer from the server, trying again.",
    "training": "training",
    "unfinished": "stopped, can be resumed",
    "finished": "finished",
    "failed": "failed",
    "iteration": "iteration",
    "time_left": "about {time} left",
    "finish": "Finish now",
    "finish_help": "Stop after this iteration, judge the result and return the LoRA.",
    "finishing": "Finishing after this iteration",
    "finish_failed": "The run is not training here any more.",
    "legend_reward": "training reward",
    "legend_validation": "validation (95 %)",
    "legend_baseline": "before training",
    "newest": "newest video",
    "hours": "h",
    "minutes": "min",
    "seconds": "s",
    "phase_load": "loading the model",
    "phase_encode": "encoding prompts",
    "phase_rollout": "sampling videos",
    "phase_decode": "decoding videos",
    "phase_score": "scoring videos",
    "phase_update": "updating the LoRA",
    "phase_evaluate": "judging on held-out prompts",
    "phase_save": "saving",
    "phase_wait": "waiting for a worker",
}
