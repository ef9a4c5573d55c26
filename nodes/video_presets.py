"""Video sizes and sampling by model and card.

The memory of a training step grows with the number of latent tokens (width / 16 x height / 16 x
(frames + 3) / 4), its time a little faster. The presets keep one training step of the model inside
the named card with gradient checkpointing; all of them are sizes that Wan was trained near.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tables = dict[str, dict[str, Any]]


def _preset(
    width: int,
    height: int,
    frames: int,
    *,
    fps: float = 16.0,
    steps: int = 20,
    shift: float = 0.0,
    guidance: float = 4.5,
    micro_batch: int = 4,
    decode_batch: int = 1,
    checkpointing: bool = True,
    offload: bool = False,
    guidance_low: float = 0.0,
) -> Tables:
    return {
        "rollout": {
            "width": width,
            "height": height,
            "frames": frames,
            "fps": fps,
            "guidance": guidance,
            "micro_batch": micro_batch,
            "decode_batch": decode_batch,
            "guidance_low": guidance_low,
        },
        "schedule": {"steps": steps, "shift": shift},
        "model": {"gradient_checkpointing": checkpointing, "offload": offload},
    }


PRESETS: dict[str, Tables] = {
    "tiny Wan, any computer": _preset(
        64,
        64,
        9,
        fps=8.0,
        steps=10,
        shift=3.0,
        guidance=1.0,
        micro_batch=8,
        decode_batch=8,
        checkpointing=False,
    ),
    "Wan 2.1 1.3B, 12 GB, 416x240": _preset(416, 240, 33, micro_batch=2, offload=True),
    "Wan 2.1 1.3B, 24 GB, 416x240": _preset(416, 240, 33),
    "Wan 2.1 1.3B, 24 GB, 832x480": _preset(832, 480, 33, micro_batch=2, offload=True),
    "Wan 2.2 5B, 48 GB, 704x384": _preset(704, 384, 33, fps=24.0, micro_batch=2, offload=True),
    "Wan 14B, 80 GB, 832x480": _preset(832, 480, 33, micro_batch=2, offload=True),
    "Wan 2.1 14B I2V, 80 GB, 832x480": _preset(
        832, 480, 33, guidance=5.0, micro_batch=2, offload=True
    ),
    "Wan 2.2 A14B T2V, 80 GB, 832x480": _preset(
        832, 480, 33, shift=5.0, guidance=4.0, guidance_low=3.0, micro_batch=2, offload=True
    ),
    "Wan 2.2 A14B I2V, 80 GB, 832x480": _preset(
        832, 480, 33, shift=5.0, guidance=3.5, guidance_low=3.5, micro_batch=2, offload=True
    ),
}


def preset_tables(preset: str, values: Mapping[str, float]) -> Tables:
    """The tables of a preset; each value above 0 replaces the preset's."""
    tables = {name: dict(table) for name, table in PRESETS[preset].items()}
    for key, value in values.items():
        table = "schedule" if key in ("steps", "shift") else "rollout"
        if value:
            tables[table][key] = value
    return tables
