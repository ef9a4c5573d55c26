"""What approximate savings do to the rewards, on the embedded tiny Wan with its real reward.

    python benchmarks/suffix_error.py [--out benchmarks/results/suffix_error.json]

12 prompts, 8 videos each, 20 steps of which one of the first 10 is stochastic. The recorded
transitions are the same bits in every row (checked); only the steps after them differ: all of the
schedule's Euler steps, fewer ones of the second-order solver, step caching. Each row is compared
with the fine solution of the same ODE (every step of the schedule cut into 16). `agreement` is the
correlation of the rewards after each group's mean is taken off: it is what advantages are made of.
The rows with guidance, for the guidance interval, have another policy (the interval also holds
before the stochastic step), so they are compared with guidance at every step as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashgrpo_core.build import (  # noqa: E402
    build_prompts,
    build_reward,
    build_schedule,
    embed_prompts,
    latent_layout,
    load_networks,
    rollout_settings,
)
from flashgrpo_core.config_io import build_config  # noqa: E402
from flashgrpo_core.control import Control  # noqa: E402
from flashgrpo_core.rollout import Rollout, RolloutSampler, RolloutSettings  # noqa: E402
from flashgrpo_core.schedule import TRAIN_STEPS  # noqa: E402
from flashgrpo_core.scoring import score_rollouts  # noqa: E402
from flashgrpo_core.solver import multistep  # noqa: E402
from flashgrpo_core.trainer import iteration_groups  # noqa: E402

FINE = 16
GUIDANCE = 3.0


class Bench:
    """The tiny Wan, its prompts and its reward."""

    def __init__(self, cache: Path) -> None:
        torch.set_num_threads(1)
        self.config = build_config(
            {
                "model": {"transformer": "tiny", "device": "cpu"},
                "schedule": {"steps": 20},
                "rollout": {"prompts_per_iteration": 12, "micro_batch": 8},
                "run": {"iterations": 1},
            }
        )
        self.networks = load_networks(self.config)
        prompts = build_prompts(self.config)
        self.groups = iteration_groups(self.config, prompts, 1)
        self.schedule = build_schedule(self.config)
        self.context = embed_prompts(self.config, prompts, cache, Control(), self.networks.device)
        self.reward = build_reward(self.config)
        self.settings = rollout_settings(self.config, *latent_layout(self.networks))
        self.blocks = self.forwards = 0
        transformer: Any = self.networks.policy.transformer
        transformer.register_forward_pre_hook(self._forward, with_kwargs=True)
        transformer.blocks[-1].ffn.register_forward_pre_hook(self._last_block)

    def _forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.forwards += len(kwargs["hidden_states"])

    def _last_block(self, module: Any, args: Any) -> None:
        self.blocks += len(args[0])

    def rollouts(self, settings: RolloutSettings) -> list[Rollout]:
        """All rollouts of the iteration; `forwards` and `blocks` count what they took."""
        negative = self.context("") if settings.guided else None
        sampler = RolloutSampler(
            self.networks.policy, self.schedule, settings, self.context, negative
        )
        self.forwards = self.blocks = 0
        shares = [(g, range(group.size)) for g, group in enumerate(self.groups)]
        return list(sampler.sample_all(self.groups, shares))

    def fine(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The same transitions, finished in steps a sixteenth as long."""
        found = []
        for rollout in rollouts:
            levels = self.schedule.sigmas[rollout.group.sde_step + 1 :]
            pieces = [
                np.linspace(a, b, FINE, endpoint=False)
                for a, b in zip(levels[:-1], levels[1:], strict=True)
            ]
            text = self.context(rollout.group.prompt)

            def velocity(x: torch.Tensor, sigma: float, text: torch.Tensor = text) -> torch.Tensor:
                return self.networks.policy.velocity(x, TRAIN_STEPS * sigma, text)

            sigmas = np.concatenate([*pieces, [0.0]])
            final = multistep(velocity, rollout.latents_next, sigmas)
            found.append(replace(rollout, final=final))
        return found

    def scores(self, rollouts: list[Rollout]) -> np.ndarray:
        """Rewards `[P, G]`."""
        found = score_rollouts(
            self.networks.vae, self.groups, rollouts, self.reward, fps=8.0, decode_batch=8
        )
        return found.total


def compare(got: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """How rewards differ from others of the same videos."""
    a, b = (x - x.mean(1, keepdims=True) for x in (got, wanted))
    return {
        "reward": round(float(got.mean()), 4),
        "mean_error": round(float((got - wanted).mean()), 4),
        "absolute_error": round(float(np.abs(got - wanted).mean()), 4),
        "agreement": round(float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())), 4),
    }


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
    plain = bench.rollouts(bench.settings)
    euler, every = bench.scores(plain), bench.forwards
    fine = bench.scores(bench.fine(plain))
    rows: dict[str, dict[str, float]] = {
        "all steps": compare(euler, fine) | {"forwards": 1.0, "blocks": 1.0}
    }
    variants: dict[str, dict[str, Any]] = {
        f"suffix_share {share}": {"suffix_share": share} for share in (0.7, 0.5, 0.3, 0.2)
    }
    variants |= {f"cache_threshold {t}": {"cache_threshold": t} for t in (0.05, 0.1, 0.2)}
    variants["suffix_share 0.5, cache_threshold 0.1"] = {
        "suffix_share": 0.5, "cache_threshold": 0.1,
    }  # fmt: skip
    for name, options in variants.items():
        rollouts = bench.rollouts(replace(bench.settings, **options))
        for got, wanted in zip(rollouts, plain, strict=True):
            assert torch.equal(got.latents_next, wanted.latents_next), "the transition has changed"
            assert torch.equal(got.old_log_prob, wanted.old_log_prob)
        rows[name] = compare(bench.scores(rollouts), fine) | {
            "forwards": round(bench.forwards / every, 3),
            "blocks": round(bench.blocks / every, 3),
        }
    guided = replace(bench.settings, guidance=GUIDANCE)
    everywhere = bench.scores(bench.rollouts(guided))
    cost = bench.forwards
    intervals = {}
    for interval in ((0.0, 0.9), (0.3, 1.0), (0.3, 0.9), (0.5, 0.9)):
        found = bench.scores(bench.rollouts(replace(guided, guidance_interval=interval)))
        intervals[f"guidance_interval {list(interval)}"] = compare(found, everywhere) | {
            "forwards": round(bench.forwards / cost, 3)
        }
    return {
        "videos": int(euler.size),
        "reward_std_in_group": round(float(fine.std(1).mean()), 4),
        "against_the_fine_solution": rows,
        "guidance": GUIDANCE,
        "guided_reward": round(float(everywhere.mean()), 4),
        "against_guidance_everywhere": intervals,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = json.dumps(measure(), indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
