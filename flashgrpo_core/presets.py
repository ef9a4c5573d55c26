"""Settings by model and card: size, sampling, LoRA, and how the weights rest.

Each keeps every phase of a run inside the named card; `memory.py` predicts it, and a test holds
them to it. The sizes are near those that Wan was trained at.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import FlashGRPOError

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Preset:
    """Settings for one model on one card.

    Attributes:
        model: the model, as it is usually named; empty for the embedded tiny one.
        card_gb: memory of the card in 10^9 bytes; 0 runs on any computer.
        tables: tables of the configuration.
    """

    model: str
    card_gb: int
    tables: Tables


@dataclass(frozen=True)
class _Model:
    """What all presets of a model share: how its makers sample it, and the LoRA on it."""

    fps: float = 16.0
    steps: int = 20
    shift: float = 0.0
    guidance: float = 4.5
    guidance_low: float = 0.0
    targets: tuple[str, ...] = ("attention",)
    rank: int = 16
    alpha: float = 32.0

    def tables(
        self,
        width: int,
        height: int,
        frames: int = 33,
        *,
        micro_batch: int = 1,
        decode_batch: int = 1,
        checkpointing: bool = True,
        offload: bool = True,
        storage: str = "auto",
        swap: int = 0,
    ) -> Tables:
        """The tables of one preset."""
        return {
            "rollout": {
                "width": width,
                "height": height,
                "frames": frames,
                "fps": self.fps,
                "guidance": self.guidance,
                "micro_batch": micro_batch,
                "decode_batch": decode_batch,
                "guidance_low": self.guidance_low,
            },
            "schedule": {"steps": self.steps, "shift": self.shift},
            "model": {
                "gradient_checkpointing": checkpointing,
                "offload": offload,
                "storage": storage,
                "blocks_to_swap": swap,
                "lora_rank": self.rank,
                "lora_alpha": self.alpha,
                "lora_targets": list(self.targets),
            },
        }


_TINY = _Model(fps=8.0, steps=10, shift=3.0, guidance=1.0)
_SMALL = _Model()
_T2V = _Model()
# Image-to-video of 2.1 reads the start image in layers of its own.
_I2V = _Model(guidance=5.0, targets=("attention", "add_k_proj", "add_v_proj"))
_A14B_T2V = _Model(shift=5.0, guidance=4.0, guidance_low=3.0)
_A14B_I2V = _Model(shift=5.0, guidance=3.5, guidance_low=3.5)
_5B = _Model(fps=24.0, shift=5.0, guidance=5.0)


def _by_card(model: str, cards: Mapping[tuple[int, str], Tables]) -> dict[str, Preset]:
    return {
        f"{model}, {card} GB, {size}": Preset(model, card, tables)
        for (card, size), tables in cards.items()
    }


def _fourteen(model: _Model, name: str) -> dict[str, Preset]:
    """The 14B models: the same shapes but for the start image."""
    return _by_card(
        name,
        {
            (12, "416x240"): model.tables(416, 240, storage="fp8", swap=32),
            (16, "416x240"): model.tables(416, 240, storage="fp8", swap=22),
            (24, "624x352"): model.tables(624, 352, storage="fp8", swap=20),
            (48, "832x480"): model.tables(832, 480, storage="fp8"),
            (80, "832x480"): model.tables(832, 480, micro_batch=2),
        },
    )


#: Name -> preset. Saved workflows hold these names.
PRESETS: dict[str, Preset] = {
    "tiny Wan, any computer": Preset(
        "",
        0,
        _TINY.tables(64, 64, 9, micro_batch=8, decode_batch=8, checkpointing=False, offload=False),
    ),
    **_by_card(
        "Wan 2.1 1.3B",
        {
            (12, "416x240"): _SMALL.tables(416, 240, micro_batch=2),
            (16, "624x352"): _SMALL.tables(624, 352, micro_batch=2),
            (24, "416x240"): _SMALL.tables(416, 240, micro_batch=4, offload=False),
            (24, "832x480"): _SMALL.tables(832, 480, micro_batch=2),
            (48, "832x480"): _SMALL.tables(832, 480, 81, micro_batch=2),
        },
    ),
    **_by_card(
        "Wan 2.2 5B",
        {
            (12, "704x384"): _5B.tables(704, 384, storage="fp8"),
            (16, "704x384"): _5B.tables(704, 384),
            (24, "704x384"): _5B.tables(704, 384, 49),
            (48, "704x384"): _5B.tables(704, 384, micro_batch=2),
            (80, "1280x704"): _5B.tables(1280, 704, 49),
        },
    ),
    **_fourteen(_T2V, "Wan 2.1 14B T2V"),
    **_fourteen(_I2V, "Wan 2.1 14B I2V"),
    **_fourteen(_A14B_T2V, "Wan 2.2 A14B T2V"),
    **_fourteen(_A14B_I2V, "Wan 2.2 A14B I2V"),
}

#: Names of earlier versions, which saved workflows may hold -> the present one.
FORMER: dict[str, str] = {"Wan 14B, 80 GB, 832x480": "Wan 2.1 14B T2V, 80 GB, 832x480"}


def find_preset(name: str) -> Preset:
    """The preset of a name, present or former.

    Raises:
        FlashGRPOError: there is none.
    """
    name = FORMER.get(name, name)
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise FlashGRPOError(
            f"run.model_preset {name!r} is unknown: {hint}`flashgrpo plan --presets` lists them"
        )
    return PRESETS[name]


def preset_tables(name: str, values: Mapping[str, float] | None = None) -> Tables:
    """A copy of the tables of a preset; each value above 0 replaces the preset's.

    Args:
        name: name of the preset.
        values: keys of the `schedule` (`steps`, `shift`) and `rollout` tables.

    Raises:
        FlashGRPOError: there is no such preset.
    """
    tables = {table: dict(own) for table, own in find_preset(name).tables.items()}
    for key, value in (values or {}).items():
        table = "schedule" if key in ("steps", "shift") else "rollout"
        if value:
            tables[table][key] = value
    return tables


def names_for(model: str) -> list[str]:
    """Names of the presets of a model, smallest card first."""
    found = [name for name, preset in PRESETS.items() if preset.model == model]
    return sorted(found, key=lambda name: PRESETS[name].card_gb)
