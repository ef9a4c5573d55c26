"""FSDP2 on two real processes: the weights are spread, the numbers are those of the whole model.

Locks in: every frozen weight is a DTensor and half of it lies here; gradients equal the unsharded
ones; ranks with less work accompany the others instead of hanging; a LoRA that differs and a rank
that hangs are named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, "-m", "tests.training._two_ranks", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_each_rank_fills_in_its_row(seen: list[dict[str, Any]]) -> None:
    assert [one["gathered"] for one in seen] == [[[1.0, 7.0], [2.0, 7.0]]] * 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_are_spread_and_gradients_are_those_of_the_whole_model(
    seen: list[dict[str, Any]], dtype: str
) -> None:
    for one in (rank[dtype] for rank in seen):
        assert one["dtensors"] == one["frozen"] > 100
        assert 0.45 < one["local_share"] < 0.55
        assert one["error"] == 0.0  # gathering does not change a weight
        assert one["gradients_left"] == []
    # Two backward passes and one forward of process 0 that process 1 had no work for.
    assert [rank[dtype]["accompanied"] for rank in seen] == [0, 3]


def test_a_lora_that_differs_is_named(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["fp32"]["hash"] == seen[1]["fp32"]["hash"]
    for rank in seen:
        assert "LoRA of process 1 differs from that of process 0" in rank["fp32"]["hash_error"]
        assert "after iteration 7" in rank["fp32"]["hash_error"]


def test_the_process_that_hangs_is_named_by_both(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert len(rank["stalls"]) == 1
        assert rank["stalls"][0].startswith("stall 3: process 1 of 2 has made no step for")
        assert "in phase score of iteration 3" in rank["stalls"][0]
