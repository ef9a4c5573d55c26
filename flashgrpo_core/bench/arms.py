"""What is compared: arms that differ in one thing each, and the cells of the matrix.

An arm is a handful of settings over a common base. Model, reward, prompts, group size, optimizer,
schedule and window are the same for all; so is the grid of learning rates, from which each arm
takes its best on seeds that the comparison does not use.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from ..build import plan
from ..config import Config
from ..config_io import build_config
from ..embedded import TINY
from ..errors import FlashGRPOError

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Arm:
    """One curve of the comparison.

    Attributes:
        name: key in files and on the command line.
        title: name in charts.
        what: one sentence for the report.
        tables: settings over the base.
        extended: whether a run goes on until the highest level is reached, up to the budget; the
            others spend what is compared at equal cost, and no more.
    """

    name: str
    title: str
    what: str
    tables: Tables
    extended: bool = False


_INDEPENDENT = {"noise": "independent", "shared_prefix": False}

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(
            "flash",
            "Flash, shared noise",
            "One stochastic step per group, one initial noise per group, prefix computed once: "
            "the `recommended` preset.",
            {},
            extended=True,
        ),
        Arm(
            "flash_paper",
            "Flash, paper",
            "One stochastic step per group, an initial noise for each video.",
            {"rollout": _INDEPENDENT},
            extended=True,
        ),
        Arm(
            "flash_unrectified",
            "Flash, no rectification",
            "As Flash with shared noise, all weights 1.",
            {"loss": {"rectification": "none"}},
        ),
        Arm(
            "mixed",
            "Mixed",
            "One stochastic step per video, each its own: the confounded case.",
            {"schedule": {"strategy": "mixed"}, "rollout": _INDEPENDENT},
        ),
        Arm(
            "window",
            "Window of 2",
            "Two neighbouring stochastic steps at a random place (Flow-GRPO-Fast, MixGRPO).",
            {"schedule": {"strategy": "window", "train_steps": 2}, "rollout": _INDEPENDENT},
        ),
        Arm(
            "full",
            "Full trajectory",
            "All steps of the window stochastic and trained (Flow-GRPO).",
            {"schedule": {"strategy": "full"}, "rollout": _INDEPENDENT},
            extended=True,
        ),
        Arm(
            "full_shared",
            "Full, shared noise",
            "As full trajectory, with one initial noise per group.",
            {"schedule": {"strategy": "full"}},
        ),
        Arm(
            "flash_adaptive",
            "Flash, adaptive steps",
            "As Flash with shared noise, steps drawn by their measured signal-to-noise ratio.",
            {"schedule": {"adaptive": True}, "loss": {"freeze_std": True}},
        ),
        Arm(
            "flash_cheap",
            "Flash, short suffix",
            "As Flash with shared noise, half of the steps after the stochastic one, second order: "
            "an approximate reward.",
            {"rollout": {"suffix_share": 0.5}},
        ),
        Arm(
            "nft",
            "DiffusionNFT",
            "No stochastic step; the velocity is regressed on the noised videos.",
            {"loss": {"algorithm": "nft"}, "rollout": _INDEPENDENT},
        ),
    )
}

#: Arms of a run without `--arms`.
DEFAULT_ARMS = ("flash", "flash_paper", "flash_unrectified", "mixed", "window", "full")

#: Learning rates that every arm tries.
LEARNING_RATES = (3e-4, 1e-3, 3e-3)

#: First seed of the runs that choose a learning rate; those of the comparison count from 0.
TUNING_SEED = 1000

#: Steps of the ten that may be stochastic, for every arm: the first half.
WINDOW = (0, 5)

#: Held-out rewards that count as reached, fixed before any run of the comparison.
LEVELS = (0.95, 0.97)

#: A run has collapsed when its last held-out reward is this far below its best, or below its start.
COLLAPSE = 0.1


@dataclass(frozen=True)
class Sizes:
    """How large the runs are, in transformer forwards; a training forward and backward counts as 3.

    Attributes:
        common: what every run of the comparison spends.
        budget: what a run spends at most to reach the highest level.
        tuning: what a run that tries a learning rate spends.
        between: forwards between evaluations.
        prompts: held-out prompts of an evaluation.
        prompt_seeds: videos per held-out prompt.
        rollout: settings of the rollout over the tiny model's own.
    """

    common: int = 24_000
    budget: int = 80_000
    tuning: int = 18_000
    between: int = 2_000
    prompts: int = 12
    prompt_seeds: int = 2
    rollout: tuple[tuple[str, int], ...] = ()


#: Only shows that everything works.
QUICK = Sizes(
    common=150,
    budget=300,
    tuning=60,
    between=100,
    prompts=2,
    prompt_seeds=1,
    rollout=(("prompts_per_iteration", 2), ("group_size", 4)),
)


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        arm: key of `ARMS`.
        learning_rate: AdamW learning rate.
        seed: run seed.
        tuning: whether it only helps to choose the learning rate.
    """

    arm: str
    learning_rate: float
    seed: int
    tuning: bool = False

    @property
    def name(self) -> str:
        """Name of its run folder."""
        rate = f"{self.learning_rate:g}".replace("+", "")  # not a letter of a run's name
        return f"{self.arm}-lr{rate}-seed{self.seed}"


def cell_config(cell: Cell, output: str, sizes: Sizes, forwards: float) -> Config:
    """The configuration of a run that spends about so many forwards."""
    tables = cell_tables(cell, sizes)
    per_iteration = iteration_forwards(build_config(tables))
    tables["run"]["output"] = output
    tables["run"]["iterations"] = max(2, round(forwards / per_iteration))
    tables["eval"]["every"] = max(1, round(sizes.between / per_iteration))
    return build_config(tables)


def cell_key(cell: Cell, sizes: Sizes) -> str:
    """What a finished run must have been made with to count: a hash of all that is set.

    Settings that are left at their defaults are not in it, so that a new option with a neutral
    default does not throw finished runs away.
    """
    text = json.dumps([cell_tables(cell, sizes), asdict(sizes)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cell_tables(cell: Cell, sizes: Sizes) -> Tables:
    """The settings of a run but for its length."""
    tables: Tables = {
        "model": {"transformer": TINY},
        # An average that follows closely: what is compared is learning, not averaging.
        "optim": {"learning_rate": cell.learning_rate, "warmup": 3, "ema_decay": 0.8},
        "eval": {
            "prompts": sizes.prompts,
            "seeds": sizes.prompt_seeds,
            "test_prompts": 0,
        },
        # A training forward and backward counts as 3, so none is saved by a kept graph.
        "rollout": {"keep_graph": 0.0, **dict(sizes.rollout)},
        "schedule": {"window": list(WINDOW)},
        "run": {
            "name": cell.name,
            "seed": cell.seed,
            "save_every": 100000,
            "keep": 1,
            "threads": 1,
        },
    }
    for table, values in ARMS[cell.arm].tables.items():
        tables[table] = {**tables.get(table, {}), **values}
    return tables


def iteration_forwards(config: Config) -> float:
    """Mean transformer forwards of an iteration, a training forward and backward counted as 3."""
    counts = plan(config)
    return counts.forwards_per_iteration + 3 * counts.train_forwards_per_iteration


def chosen_arms(names: str) -> list[str]:
    """Arms named on the command line, separated by commas; empty is the default.

    Raises:
        FlashGRPOError: one is unknown or named twice.
    """
    if not names:
        return list(DEFAULT_ARMS)
    found = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in found if name not in ARMS]
    if unknown or len(set(found)) < len(found) or not found:
        wrong = unknown[0] if unknown else names
        raise FlashGRPOError(
            f"--arms {wrong!r}: choose each of {', '.join(ARMS)} at most once, separated by commas"
        )
    return found
