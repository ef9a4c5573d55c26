"""Flash-GRPO: align Wan video models by reinforcement learning and export a LoRA."""

__version__ = "0.1.0"
