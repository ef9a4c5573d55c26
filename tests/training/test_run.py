"""A run from start to end on the embedded tiny Wan: what it writes, stopping and going on.

Locks in: resume gives the bytes of an undisturbed run; a finished run is not trained again; other
settings under the same name are refused; training longer continues.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.training import train
from flashgrpo_core.wan.lora import read_lora
from tests.training._small import Recorder


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_run_leaves_everything_it_promises(small_config):
    config = small_config()
    control = Recorder()
    result = train(config, control)
    folder = RunFolder(config.run.output, "run")
    assert result.status == "finished" and result.iteration == 4
    assert result.loras[0].is_file() and folder.report.is_file()
    events = read_events(folder.events)
    assert [e["iteration"] for e in events if e["event"] == "iteration"] == [1, 2, 3, 4]
    assert events == control.events
    for event in (e for e in events if e["event"] == "iteration"):
        assert event["ratio_drift"] == 0.0
        assert event["clip_fraction"] == 0.0
    evaluations = [(e["split"], e["iteration"]) for e in events if e["event"] == "evaluation"]
    assert evaluations[:3] == [("validation", 0), ("validation", 2), ("validation", 4)]
    assert evaluations[3][0] == "test"
    rows = [json.loads(line) for line in folder.rewards.read_text().splitlines()]
    assert len(rows) == 4 * 2 * 2
    assert {len({r["sde_step"] for r in rows if r["iteration"] == i}) for i in range(1, 5)} == {2}
    assert [e for e in events if e["event"] == "run_finished"][0]["status"] == "finished"
    networks = {type(n).__name__ for n in control.brought}
    assert networks == {"UMT5EncoderModel", "WanTransformer3DModel", "AutoencoderKLWan"}
    # The LoRA is not the one it started from.
    assert all(pair.B.abs().max() > 0 for pair in read_lora(result.loras[0]).values())
    assert not list(folder.path.rglob("*.tmp*")) and not list(folder.checkpoints.glob(".*"))


@pytest.mark.parametrize(
    ("phase", "iteration", "after"), [("rollout", 3, 5), ("score", 1, 2), ("update", 2, 1)]
)
def test_a_stopped_run_resumes_to_the_same_bytes(small_config, phase, iteration, after):
    undisturbed = train(small_config("whole"))
    stopped = train(small_config("cut"), Recorder((phase, iteration), after))
    assert stopped.status == "stopped"
    assert stopped.iteration == iteration - 1
    resumed = train(small_config("cut"))
    assert resumed.status == "finished"
    one, two = read_lora(undisturbed.loras[0]), read_lora(resumed.loras[0])
    assert one.keys() == two.keys()
    for name, pair in one.items():
        assert torch.equal(pair.A, two[name].A) and torch.equal(pair.B, two[name].B)
    for stem in ("adapter", "ema", "optimizer"):
        whole = undisturbed.folder / "checkpoints" / "000004" / f"{stem}.safetensors"
        cut = resumed.folder / "checkpoints" / "000004" / f"{stem}.safetensors"
        assert checksum(whole) == checksum(cut), stem


def test_what_was_trained_is_kept_when_its_evaluation_is_stopped(small_config):
    """And the evaluation is made up for, so that the same weights are chosen."""
    undisturbed = train(small_config("whole"))
    stopped = train(small_config("cut"), Recorder(("evaluate", 2), 3))
    assert stopped.status == "stopped" and stopped.iteration == 2
    resumed = train(small_config("cut"))
    events = read_events(resumed.folder / "events.jsonl")
    judged = [e["iteration"] for e in events if e["event"] == "evaluation"]
    assert judged == [0, 2, 4, resumed.best_iteration]
    assert len([e for e in events if e["event"] == "iteration"]) == 4
    for path in (undisturbed.folder / "checkpoints" / "000004").iterdir():
        assert checksum(path) == checksum(resumed.folder / "checkpoints" / "000004" / path.name)
    one, two = read_lora(undisturbed.loras[0]), read_lora(resumed.loras[0])
    assert all(torch.equal(pair.B, two[name].B) for name, pair in one.items())


def test_a_finished_run_returns_its_result_and_can_be_extended(small_config):
    first = train(small_config(run={"iterations": 2}))
    control = Recorder()
    again = train(small_config(run={"iterations": 2}), control)
    assert control.events == []
    assert again.loras == first.loras and again.iteration == 2
    assert again.test["difference"] == pytest.approx(first.test["difference"], abs=1e-12)
    longer = train(small_config(run={"iterations": 4}))
    assert longer.iteration == 4
    whole = train(small_config("whole", run={"iterations": 4}))
    adapter = Path("checkpoints") / "000004" / "adapter.safetensors"
    assert checksum(longer.folder / adapter) == checksum(whole.folder / adapter)


def test_other_settings_under_the_same_name_are_refused(small_config):
    train(small_config(run={"iterations": 1}))
    with pytest.raises(FlashGRPOError) as caught:
        train(small_config(run={"iterations": 1}, optim={"learning_rate": 2e-3}))
    assert "optim.learning_rate: 0.001 -> 0.002" in str(caught.value)
    assert "'run-2'" in str(caught.value)
    with pytest.raises(FlashGRPOError, match="exists already"):
        train(small_config(run={"iterations": 1}), resume="never")
    with pytest.raises(FlashGRPOError, match="nothing to resume"):
        train(small_config("absent"), resume="latest")


def test_a_damaged_newest_checkpoint_falls_back_and_says_so(small_config):
    config = small_config(run={"iterations": 3})
    train(config)
    folder = RunFolder(config.run.output, "run")
    adapter = folder.checkpoints / "000003" / "adapter.safetensors"
    raw = bytearray(adapter.read_bytes())
    raw[-1] ^= 1
    adapter.write_bytes(raw)
    result = train(small_config(run={"iterations": 4}))
    assert result.iteration == 4
    codes = [e["code"] for e in read_events(folder.events) if e["event"] == "warning"]
    assert "checkpoint_corrupt" in codes
    started = [e for e in read_events(folder.events) if e["event"] == "run_started"]
    assert started[-1]["resumed_from"] == 2
    whole = train(small_config("whole", run={"iterations": 4}))
    path = Path("checkpoints") / "000004" / "adapter.safetensors"
    assert checksum(folder.path / path) == checksum(whole.folder / path)


def test_flat_rewards_warn_and_then_stop_with_advice(small_config):
    # Clipped to a range it never reaches, the reward is the same for every video.
    config = small_config(
        reward={"terms": [{"name": "motion", "clip": [-2.0, -1.0]}]},
        eval={"every": 0, "test_prompts": 0},
        run={"iterations": 9},
    )
    with pytest.raises(FlashGRPOError, match="in a row without an update"):
        train(config)
    events = read_events(RunFolder(config.run.output, "run").events)
    assert [e["code"] for e in events if e["event"] == "warning"] == ["no_signal"] * 5
    assert events[-1]["event"] == "run_finished" and events[-1]["status"] == "failed"


def test_processes_that_were_asked_for_but_not_started(small_config):
    with pytest.raises(FlashGRPOError, match=r"run.processes = 2 but 1 process"):
        train(small_config(run={"processes": 2}))


def test_a_mistake_does_not_take_the_name(small_config):
    bad = small_config(reward={"terms": [{"name": "motoin"}]})
    with pytest.raises(FlashGRPOError, match="did you mean 'motion'"):
        train(bad)
    folder = RunFolder(bad.run.output, "run")
    assert not folder.path.exists()
    lora = small_config(model={"lora_targets": ["nothing.like.it"]})
    with pytest.raises(FlashGRPOError, match="nothing.like.it"):
        train(lora)
    assert not folder.path.exists()
    # What a killed process left before its first checkpoint is no run either.
    folder.create(lora)
    assert train(small_config(run={"iterations": 1})).status == "finished"
