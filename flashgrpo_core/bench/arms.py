"""What is compared: arms that differ in one thing each, and the cells of the matrix.

An arm is a handful of settings over a common base. Model, reward, prompts, group size, optimizer,
schedule and window are the same for all; so is the grid of learning rates, from which each arm
takes its best on seeds that the comparison does not use.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    name: str
    title: str
    what: str
    tables: Tables


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
        ),
        Arm(
            "flash_paper",
            "Flash, paper",
            "One stochastic step per group, an initial noise for each video.",
            {"rollout": _INDEPENDENT},
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
        ),
        Arm(
            "full_shared",
            "Full, shared noise",
            "As full trajectory, with one initial noise per group.",
            {"schedule": {"strategy": "full"}},
        ),
    )
}

#: Arms of a run without `--arms`.
DEFAULT_ARMS = ("flash", "flash_paper", "flash_unrectified", "mixed", "window", "full")

#: Learning rates that every arm tries.
LEARNING_RATES = (3e-4, 1e-3, 3e-3)

#: First seed of the runs that choose a learning rate; those of the comparison count from 0.
TUNING_SEED = 1000

#: Held-out rewards that count as reached, fixed before any run of the comparison.
LEVELS = (0.90, 0.95)

#: A run has collapsed when its last held-out reward is this far below its best, or below its start.
COLLAPSE = 0.1

#: Transformer forwards of a run; a training forward and backward counts as 3.
BUDGET = 60_000

#: Evaluations of a run besides that of the start.
EVALUATIONS = 15


@dataclass(frozen=True)
class Sizes:
    """How large the runs are; `quick` only shows that everything works.

    Attributes:
        budget: transformer forwards per run of the comparison.
        tuning_budget: those of a run that tries a learning rate.
        evaluations: evaluations per run.
        prompts: held-out prompts of an evaluation.
        prompt_seeds: videos per held-out prompt.
        rollout: settings of the rollout over the tiny model's own.
    """

    budget: int = BUDGET
    tuning_budget: int = BUDGET // 3
    evaluations: int = EVALUATIONS
    prompts: int = 12
    prompt_seeds: int = 2
    rollout: tuple[tuple[str, int], ...] = ()


QUICK = Sizes(
    budget=150,
    tuning_budget=60,
    evaluations=2,
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
        return f"{self.arm}-lr{self.learning_rate:g}-seed{self.seed}"


def cell_config(cell: Cell, output: str, sizes: Sizes) -> Config:
    """The configuration of a run: as many iterations as come nearest to its budget."""
    tables: Tables = {
        "model": {"transformer": TINY},
        # An average that follows closely: what is compared is learning, not averaging.
        "optim": {"learning_rate": cell.learning_rate, "warmup": 3, "ema_decay": 0.8},
        "eval": {
            "every": 1,
            "prompts": sizes.prompts,
            "seeds": sizes.prompt_seeds,
            "test_prompts": 0,
        },
        "rollout": dict(sizes.rollout),
        "run": {
            "name": cell.name,
            "output": output,
            "seed": cell.seed,
            "iterations": 1,
            "save_every": 100000,
            "keep": 1,
            "threads": 1,
        },
    }
    for table, values in ARMS[cell.arm].tables.items():
        tables.setdefault(table, {}).update(values)
    per_iteration = iteration_forwards(build_config(tables))
    budget = sizes.tuning_budget if cell.tuning else sizes.budget
    iterations = max(2, round(budget / per_iteration))
    tables["run"]["iterations"] = iterations
    tables["eval"]["every"] = max(1, round(iterations / sizes.evaluations))
    return build_config(tables)


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
