"""What a finished run says: its curve, its gradients, what its advantages depend on, its cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runs.events import latest_each, read_events, read_rewards
from ..runs.folder import RunFolder
from ..seeds import derive_seed

Record = dict[str, Any]

#: Shuffles that estimate the share that chance explains.
SHUFFLES = 20


def measure_run(run: RunFolder) -> Record:
    """The record of a finished run.

    Returns:
        `curve`: per evaluation `iteration`, `forwards`, `seconds` of iterations so far, `cpu_seconds`
        likewise, `steps` (iterations with an optimizer step) and held-out `reward`; `gradients`: sigma -> mean norm
        `raw` and `rectified`; `explained` and `explained_by_chance`: share of the advantages'
        variance that the SDE step explains; `phases`: seconds per iteration.
    """
    events = read_events(run.events)
    iterations = latest_each(events, "iteration")
    judged = [e for e in latest_each(events, "evaluation") if e["split"] == "validation"]
    forwards, seconds, cpu, steps = {0: 0.0}, {0: 0.0}, {0: 0.0}, {0: 0}
    for event in iterations:
        i = event["iteration"]
        forwards[i] = event["forwards_total"]
        seconds[i] = seconds[i - 1] + event["seconds"]
        cpu[i] = cpu[i - 1] + event["cpu_seconds"]
        steps[i] = steps[i - 1] + bool(event["grad_norm"])
    curve = [
        {
            "iteration": e["iteration"],
            "forwards": forwards[e["iteration"]],
            "seconds": round(seconds[e["iteration"]], 2),
            "cpu_seconds": round(cpu[e["iteration"]], 2),
            "steps": steps[e["iteration"]],
            "reward": e["reward_mean"],
        }
        for e in judged
        if e["reward_mean"] is not None
    ]
    last: Record = next((e for e in reversed(events) if e["event"] == "run_finished"), {})
    norms: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in iterations:
        for sigma, norm in event["grad_norm_by_sigma"].items():
            norms[sigma].append((norm["raw"], norm["rectified"]))
    phases: dict[str, float] = defaultdict(float)
    for event in latest_each(events, "phase", "name"):
        if 0 < event["iteration"] and event["name"] in ("rollout", "score", "update"):
            phases[event["name"]] += event["seconds"] / max(len(iterations), 1)
    explained, chance = explained_by_step(read_rewards(run.rewards))
    return {
        "curve": curve,
        "gradients": {
            s: dict(zip(("raw", "rectified"), np.mean(v, axis=0).tolist(), strict=True))
            for s, v in sorted(norms.items(), reverse=True)
        },
        "explained": explained,
        "explained_by_chance": chance,
        "phases": dict(phases),
        "peak_memory": max((e["peak_memory"] or 0 for e in iterations), default=0),
        "diverged": bool(last.get("diverged")),
    }


def explained_by_step(videos: Sequence[Record]) -> tuple[float, float]:
    """Share of the advantages' variance that the SDE step explains, and what chance explains.

    Per iteration the variance between steps over the total variance (eta squared); chance is the
    same number after shuffling the advantages over all videos of the iteration. With iso-temporal
    groups the advantages of each step are whole groups, whose mean is 0, so the share is 0 by
    construction; where every video draws its own step it holds how hard the steps are.

    Args:
        videos: rows of `rewards.jsonl`.

    Returns:
        The two shares, means over the iterations.
    """
    found: list[float] = []
    random: list[float] = []
    by_iteration: dict[int, list[Record]] = defaultdict(list)
    for video in videos:
        if video["valid"]:
            by_iteration[video["iteration"]].append(video)
    for iteration, rows in by_iteration.items():
        steps = np.array([r["sde_step"] for r in rows])
        values = np.array([r["advantage"] for r in rows])
        if len(set(steps.tolist())) < 2 or values.std() == 0:
            continue
        found.append(_between(values, steps))
        rng = np.random.default_rng(derive_seed(iteration, "shuffle"))
        random += [_between(rng.permutation(values), steps) for _ in range(SHUFFLES)]
    if not found:
        return 0.0, 0.0
    return float(np.mean(found)), float(np.mean(random))


def _between(values: np.ndarray, steps: np.ndarray) -> float:
    """Variance between the steps over the total variance."""
    centred = values - values.mean()
    parts = [centred[steps == step] for step in np.unique(steps)]
    return float(sum(len(p) * p.mean() ** 2 for p in parts) / (centred**2).sum())
