"""The size of the LoRA gradient at every noise level, with and without rectification.

    python benchmarks/gradient_scales.py [--prompts 4] [--videos 8] [--steps 10 20]

The embedded tiny Wan, its LoRA moved off zero. For each step of the schedule: videos on the way from
fixed initial noise (the same for every step), the stochastic step with fixed noise, unit advantages,
and the gradient of the step's loss through the real train step, root mean square over the prompts.
Without rectification (weights 1) the gradient grows towards low noise with lambda = |d log p / d v|;
divided by lambda what is left is how strongly the network answers at that noise level. The last step,
which is never trained, is left out of max/min. With guidance (4.5) the velocity is the guided one; the
tiny model never saw an empty prompt in training, so its guided answer at high noise is not typical.

Prints both and writes `benchmarks/results/gradient_scales.json`; exits with 1 unless without guidance
the rectification makes max/min at least 4 times smaller.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashgrpo_core.build import (  # noqa: E402
    build_prompts,
    build_schedule,
    embed_prompts,
    latent_layout,
    rollout_settings,
)
from flashgrpo_core.config import LossConfig  # noqa: E402
from flashgrpo_core.config_io import build_config  # noqa: E402
from flashgrpo_core.control import Control  # noqa: E402
from flashgrpo_core.groups import make_groups  # noqa: E402
from flashgrpo_core.networks import load_networks  # noqa: E402
from flashgrpo_core.rollout import RolloutSampler  # noqa: E402
from flashgrpo_core.seeds import generator  # noqa: E402
from flashgrpo_core.update import Unit, policy_gradient  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gradient_scales.json"
NEEDED = 4.0
GUIDANCE = (1.0, 4.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4, help="at least 2")
    parser.add_argument("--videos", type=int, default=8, help="videos per prompt and noise level")
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 20])
    args = parser.parse_args()
    rows = [measure(steps, g, args.prompts, args.videos) for steps in args.steps for g in GUIDANCE]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print("steps  guidance  max/min raw  rectified  falls by  lambda's own  with the last step")
    for r in rows:
        print(
            f"{r['steps']:5d}  {r['guidance']:8.1f}  {r['spread_raw']:11.2f}  "
            f"{r['spread_rectified']:9.2f}  {r['falls_by']:7.1f}x  {r['spread_lambda']:12.2f}  "
            f"{r['all_raw']:6.2f} to {r['all_rectified']:.2f}"
        )
    return 0 if min(r["falls_by"] for r in rows if r["guidance"] == 1.0) >= NEEDED else 1


def measure(steps: int, guidance: float, prompts: int, videos: int) -> dict[str, Any]:
    """Gradient norm of each step of a schedule.

    Args:
        steps: steps of the schedule (shift 3).
        guidance: guidance scale.
        prompts: groups per step.
        videos: videos of each.
    """
    config = build_config(
        {
            "model": {"transformer": "tiny"},
            "schedule": {"steps": steps},
            "rollout": {
                "guidance": guidance, "noise": "independent", "shared_prefix": False,
                "group_size": videos, "micro_batch": videos,
            },
        }
    )  # fmt: skip
    networks = load_networks(config)
    policy = networks.policy
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            noise = torch.randn(parameter.shape, generator=generator(name, "gradient scales"))
            parameter.add_(0.02 * noise)
    split = build_prompts(config)
    with tempfile.TemporaryDirectory() as cache:
        context = embed_prompts(config, split, Path(cache), Control(), networks.device)
    settings = rollout_settings(config, *latent_layout(networks))
    negative = context("") if guidance != 1.0 else None
    sampler = RolloutSampler(policy, build_schedule(config), settings, context, negative)
    window = (0, steps)
    texts = [p.text for p in split.train[:prompts]]
    options = {"iteration": 1, "run_seed": 0, "group_size": videos, "noise": "independent"}
    groups = make_groups(texts, window=window, **options)
    ones, used = np.ones((prompts, videos)), np.ones((prompts, videos), bool)
    raw, rectified, scales = [], [], []
    for step in range(*window):
        at = [group.at(step) for group in groups]
        sampler.forget()
        units = [Unit(row, group, sampler.transition_of(group)) for row, group in enumerate(at)]
        _, stats = policy_gradient(policy, sampler, at, units, ones, used, LossConfig(), window)
        raw.append(stats.by_step[step]["raw"])
        rectified.append(stats.by_step[step]["rectified"])
        scales.append(sampler.transition(at[0]).gradient_scale)
    spread = [max(n[:-1]) / min(n[:-1]) for n in (raw, rectified, scales)]
    return {
        "steps": steps,
        "guidance": guidance,
        "prompts": prompts,
        "videos": videos,
        "sigmas": [round(float(s), 6) for s in sampler.schedule.sigmas[:steps]],
        "raw": [float(f"{n:.4e}") for n in raw],
        "rectified": [float(f"{n:.4e}") for n in rectified],
        "spread_raw": spread[0],
        "spread_rectified": spread[1],
        "falls_by": spread[0] / spread[1],
        "spread_lambda": spread[2],
        "all_raw": max(raw) / min(raw),
        "all_rectified": max(rectified) / min(rectified),
    }


if __name__ == "__main__":
    raise SystemExit(main())
