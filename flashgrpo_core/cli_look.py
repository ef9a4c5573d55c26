"""`flashgrpo inspect`, `schedule` and `report`: looking without training."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from .cli_common import Answer, facts, table
from .errors import FlashGRPOError
from .runs.folder import RunFolder
from .runs.report import headline_evaluation, read_run, write_report


def inspect(args: Namespace) -> Answer:
    """Say what a model file, a LoRA or a run folder is."""
    path = Path(args.file)
    if (path / "config.toml").is_file():
        return _inspect_run(RunFolder.at(path))
    from .wan.describe import describe

    found = describe(path)
    rows: list[tuple[str, Any]] = [
        (key, found.get(key)) for key in ("path", "kind", "title", "dtype", "quantisation")
    ]
    rows.append(("parameters", f"{found['parameters']:,}"))
    for key in ("format", "ranks", "alphas", "effective_scales", "modules", "keys", "matched"):
        rows.append((key, _plain(found.get(key))))
    if found.get("unmatched"):
        names = found["unmatched"]
        rows.append(("unmatched", f"{len(names)}: {', '.join(names[:4])}"))
    for name, value in (found.get("architecture") or {}).items():
        rows.append((f"  {name}", _plain(value)))
    for name, value in found["metadata"].items():
        rows.append((f"  {name}", value if len(value) <= 100 else value[:100] + " ..."))
    return Answer(facts(rows), found)


def _plain(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _inspect_run(run: RunFolder) -> Answer:
    data = read_run(run)
    judged = headline_evaluation(data)
    done = data.iterations[-1]["iteration"] if data.iterations else 0
    planned = data.config.run.iterations if data.config else None
    answer: dict[str, Any] = {
        "path": str(run.path),
        "kind": "run",
        "status": data.status,
        "iteration": done,
        "iterations": planned,
        "evaluation": judged,
        "loras": sorted(str(p) for p in run.lora.glob("*.safetensors")),
        "warnings": data.warnings,
    }
    from .progress import result_words

    rows: list[tuple[str, Any]] = [
        ("run", run.path),
        ("status", data.status),
        ("iteration", f"{done} of {'?' if planned is None else planned}"),
        ("result", f"{judged['split']}: {result_words(judged)}" if judged else "not judged yet"),
    ]
    rows += [("LoRA", path) for path in answer["loras"]]
    rows += [("warning", w.get("message")) for w in data.warnings[-5:]]
    try:
        run.config()
    except FlashGRPOError as exc:
        # What was trained can be seen all the same, but it cannot go on like this.
        answer["error"] = str(exc)
        return Answer(facts([*rows, ("error", exc)]), answer, 2)
    return Answer(facts(rows), answer)


def report(args: Namespace) -> Answer:
    """Draw the report of a run again."""
    path = write_report(RunFolder.at(args.run_folder))
    return Answer(str(path), {"report": str(path)})


def schedule(args: Namespace) -> Answer:
    """Print a schedule and its SDE steps in float64."""
    from .schedule import make_schedule
    from .sde import sde_transition

    chosen = make_schedule(args.kind, args.steps, args.shift)
    first, end = _window(args.window, args.steps)
    eta = (
        {"flash": 1.0, "flow": 0.7, "dance": 0.3, "cps": 0.7}[args.sde]
        if args.eta is None
        else args.eta
    )
    if not (math.isfinite(eta) and eta > 0):
        raise FlashGRPOError(
            f"--eta {eta} must be a finite number above 0: without noise there is no SDE step"
        )
    steps = [sde_transition(chosen, k, args.sde, eta) for k in range(args.steps)]
    scale: list[float | None] = [s.gradient_scale if s.noise_std > 0 else None for s in steps]
    inverse = [1.0 / value if value else None for value in scale]
    pool = [value for value in inverse[first:end] if value is not None]
    weights = [value / (sum(pool) / len(pool)) for value in pool]
    data = {
        "kind": args.kind,
        "steps": args.steps,
        "shift": args.shift,
        "sde": args.sde,
        "eta": eta,
        "window": [first, end],
        "sigmas": chosen.sigmas,
        "timesteps": chosen.timesteps,
        "dt": chosen.dt,
        "noise_std": [s.noise_std for s in steps],
        "lambda": scale,
        "inverse_lambda": inverse,
        "weights": weights,
    }
    rows = [["step", "sigma", "timestep", "dt", "noise std", "lambda", "1/lambda", "weight"]]
    for k, step in enumerate(steps):
        weight = repr(weights[k - first]) if first <= k < end else ""
        numbers = (
            step.sigma,
            float(chosen.timesteps[k]),
            step.dt,
            step.noise_std,
            scale[k],
            inverse[k],
        )
        rows.append([str(k), *("-" if v is None else repr(float(v)) for v in numbers), weight])
    rows.append([str(args.steps), repr(float(chosen.sigmas[-1])), "", "", "", "", "", ""])
    return Answer(table(rows), data)


def _window(text: str | None, steps: int) -> tuple[int, int]:
    if text is None:
        return 0, max(1, steps // 2)
    first, sep, end = text.partition(":")
    try:
        a, b = int(first or 0), int(end or steps - 1)
    except ValueError:
        a = b = -1
    if not sep or not 0 <= a < b <= steps - 1:
        raise FlashGRPOError(
            f"--window {text!r} must be FIRST:END with 0 <= FIRST < END <= {steps - 1} (the last "
            "of "
            f"{steps} steps is never stochastic)"
        )
    return a, b
