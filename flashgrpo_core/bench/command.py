"""`flashgrpo bench`."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from ..cli_common import Answer, facts
from ..errors import FlashGRPOError
from .analysis import best_learning_rates, cells_of, summarise
from .arms import (
    LEARNING_RATES,
    QUICK,
    TUNING_SEED,
    Cell,
    Sizes,
    cell_config,
    chosen_arms,
    iteration_forwards,
)
from .matrix import read_cell, run_cells
from .page import write_page


def bench(args: Namespace) -> Answer:
    """Choose learning rates, run the comparison, write the report; goes on where it stopped.

    Raises:
        FlashGRPOError: unknown arms, or a run failed.
    """
    arms = chosen_arms(args.arms)
    sizes = QUICK if args.quick else Sizes()
    if args.budget:
        sizes = replace(sizes, budget=args.budget, common=min(args.budget, sizes.common))
    seeds = args.seeds or (1 if args.quick else 5)
    rates = (1e-3,) if args.quick else LEARNING_RATES
    folder = Path(args.out).absolute()
    folder.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if args.learning_rate:
        best, tuning = dict.fromkeys(arms, args.learning_rate), []
    else:
        trials = [
            Cell(arm, rate, TUNING_SEED + i, tuning=True)
            for i in range(args.tuning_seeds)
            for rate in rates
            for arm in arms
        ]
        for arm in arms:
            config = cell_config(Cell(arm, rates[0], 0), "", sizes, sizes.common)
            say(f"{arm}: {iteration_forwards(config):.0f} forwards per iteration")
        tuning = [] if args.report_only else run_cells(trials, folder, sizes, args.jobs, say)
        tuning = tuning or [r for c in trials if (r := read_cell(c, folder, sizes))]
        best = best_learning_rates(tuning)
    cells = cells_of([arm for arm in arms if arm in best], best, range(seeds))
    if not args.report_only:
        run_cells(cells, folder, sizes, args.jobs, say)
    main = [r for cell in cells if (r := read_cell(cell, folder, sizes))]
    if not main:
        raise FlashGRPOError(f"no run is finished in {str(folder)!r}: leave out --report-only")
    summary = summarise(main, tuning)
    page = write_page(summary, folder)
    rows: list[tuple[str, object]] = [
        (
            f"{r['of']} / {r['to']} to {r['level']:g}",
            f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}] of the forwards"
            if r["known"]
            else f"{r['of']} does not reach it in most runs",
        )
        for r in summary["ratios"]
        if r["axis"] == "forwards"
    ]
    return Answer(facts([*rows, ("report", page), ("data", folder / "bench.json")]), summary)
