"""The command line end to end on the embedded model: train, stop, resume, export, judge, sample."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashgrpo_core.cli import main
from flashgrpo_core.cli_common import saved_weights
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.progress import TerminalControl
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.video import read_video

# Small enough for a unit test, with everything a long run has: both splits, EMA, two iterations.
JOB = """
[model]
transformer = "tiny"
lora_rank = 4
lora_targets = ["attn1.to_q", "attn2.to_v"]
[schedule]
steps = 3
window = [0, 2]
[rollout]
prompts_per_iteration = 2
group_size = 2
width = 32
height = 32
frames = 5
[reward]
terms = [{name = "contrast"}, {name = "brightness", weight = 0.5}]
[optim]
learning_rate = 1e-2
warmup = 0
ema_decay = 0.5
[eval]
every = 1
prompts = 1
seeds = 1
test_prompts = 2
test_seeds = 1
[prompts]
file = "train ü.txt"
validation_file = "val.txt"
test_file = "test.txt"
[run]
name = "small"
iterations = 2
output = "set by the test"
"""


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_job(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train ü.txt").write_text("a red ball moves right\na blue ball moves up\n", "utf-8")
    (folder / "val.txt").write_text("a green ball moves left\n", "utf-8")
    (folder / "test.txt").write_text("a red ball moves left\na blue ball moves down\n", "utf-8")
    job = JOB.replace("set by the test", (folder / "out").as_posix())
    (folder / "job.toml").write_text(job, "utf-8")
    return folder / "job.toml"


class Trained:
    """A finished run and what the command printed."""

    def __init__(self, root: Path, job: Path | None = None) -> None:
        self.job = job or write_job(root / "jöb")
        self.argv = ["train", str(self.job), "--set", f"run.output={root / 'out'}"]
        self.run = RunFolder(root / "out", "small")

    @property
    def lora(self) -> Path:
        last = [e for e in read_events(self.run.events) if e["event"] == "run_finished"][-1]
        return self.run.lora / last["lora"][0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = Trained(tmp_path_factory.mktemp("run"))
    assert main(one.argv) == 0
    yield one
    torch.set_num_threads(threads)


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_finished_run_answers_at_once_with_its_files(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trained.run.events.read_bytes()
    data = ask(capsys, *trained.argv)
    assert data["status"] == "finished" and data["iteration"] == 2
    assert data["loras"] == [str(trained.lora)] and Path(data["report"]).is_file()
    assert data["test"]["split"] == "test" and data["test"]["prompts"] == 2
    assert trained.run.events.read_bytes() == before
    assert main(trained.argv) == 0
    text = capsys.readouterr().out
    assert str(trained.lora) in text and "report.html" in text and "held-out test" in text
    assert main([*trained.argv, "--resume", "never"]) == 2
    assert "exists already" in capsys.readouterr().err
    # The run folder itself is a configuration, wherever one stands.
    assert ask(capsys, "train", str(trained.run.path))["loras"] == data["loras"]


def test_other_settings_are_refused_by_name(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*trained.argv, "--set", "optim.learning_rate=1e-3"]) == 2
    assert "optim.learning_rate: 0.01 -> 0.001" in capsys.readouterr().err


def test_stopping_exits_0_and_resuming_ends_with_the_same_bytes(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Trained(tmp_path, trained.job)
    checks = {"stop": True}
    real = TerminalControl.check

    def check(self: TerminalControl) -> None:
        done = [e for e in read_events(other.run.events) if e["event"] == "checkpoint"]
        if checks["stop"] and done:
            self.stop_requested = True
        real(self)

    monkeypatch.setattr(TerminalControl, "check", check)
    assert main(other.argv) == 0
    out = capsys.readouterr().out
    assert f"resume with: flashgrpo train {other.run.path}\n" in out
    assert "stopped after iteration 1" in out
    assert other.run.status() == "unfinished" and other.run.report.is_file()
    checks["stop"] = False
    assert main(["train", str(other.run.path), "--resume", "latest"]) == 0
    assert "resumed after iteration 1" in capsys.readouterr().err
    assert sha(other.lora) == sha(trained.lora)
    assert other.run.status() == "finished"


def test_dry_run_counts_and_trains_nothing(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Trained(tmp_path)
    data = ask(capsys, *other.argv, "--dry-run")
    assert not other.run.path.exists()
    started = next(e for e in read_events(trained.run.events) if e["event"] == "run_started")
    assert data["lora"]["parameters"] == started["lora"]["parameters"]
    assert data["lora"]["modules"] == started["lora"]["modules"]
    plan = data["plan"]
    assert plan["videos_per_iteration"] == 4
    assert plan["prompts"] == {"train": 2, "validation": 1, "test": 2}
    rollouts = [
        e["forwards"]
        for e in read_events(trained.run.events)
        if e["event"] == "phase" and e["name"] == "rollout"
    ]
    assert plan["forwards_per_iteration"] == pytest.approx(np.mean(rollouts), rel=0.25)
    assert data["status"] == "new" and data["window"] == [0, 2] and data["sigmas"][-1] == 0
    assert data["files"]["transformer"]["title"].startswith("Wan")
    assert main([*other.argv, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "nothing was trained" in text and "4 videos" in text and "disk" in text
    wrong = str(trained.lora)
    assert main([*other.argv, "--dry-run", "--set", f"model.vae={wrong}"]) == 2
    assert "model.vae" in capsys.readouterr().err


def test_export_repeats_the_runs_own_file_byte_for_byte(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ask(capsys, "export", str(trained.run.path), "--out", str(tmp_path / trained.lora.name))
    assert sha(Path(data["file"])) == sha(trained.lora) == data["sha256"]
    assert data["weights"] == "ema" and data["format"] == "comfyui"


@pytest.mark.parametrize("fmt", ["comfyui", "kohya", "diffusers"])
def test_export_formats_hold_the_same_change(
    fmt: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flashgrpo_core.wan.lora import read_lora

    out = tmp_path / f"{fmt}.safetensors"
    ask(capsys, "export", str(trained.run.path), "--format", fmt, "--checkpoint", "latest",
        "--weights", "live", "--out", str(out))  # fmt: skip
    saved = saved_weights(trained.run, "2", "live")
    assert saved.iteration == 2
    pairs = read_lora(out)
    assert len(pairs) == len(saved.tensors) // 2
    for name, pair in pairs.items():
        a, b = saved.tensors[f"{name}.lora_A"], saved.tensors[f"{name}.lora_B"]
        delta = pair.delta()
        assert delta is not None
        torch.testing.assert_close(delta, 32.0 / 4 * b @ a, rtol=1e-3, atol=1e-7)
        assert delta.abs().max() > 0
    info = ask(capsys, "inspect", str(out))
    assert info["kind"] == "lora" and info["unmatched"] == []


def test_checkpoints_are_chosen_by_name(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    ema, live = (
        saved_weights(trained.run, "latest", "ema"),
        saved_weights(trained.run, "latest", "live"),
    )
    assert (ema.iteration, ema.weights, live.weights) == (2, "ema", "live")
    assert any(not torch.equal(ema.tensors[n], live.tensors[n]) for n in ema.tensors)
    best = saved_weights(trained.run, "best", None)
    finished = [e for e in read_events(trained.run.events) if e["event"] == "run_finished"][-1]
    assert best.iteration == finished["best_iteration"]
    assert saved_weights(trained.run, "best", "live").iteration == best.iteration
    with pytest.raises(FlashGRPOError, match="no checkpoint of iteration 77"):
        saved_weights(trained.run, "77", None)
    assert main(["export", str(trained.run.path), "--out", "x.txt"]) == 2
    assert ".safetensors" in capsys.readouterr().err


def test_eval_of_a_run_repeats_its_final_test(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = read_events(trained.run.events)
    test = [e for e in events if e["event"] == "evaluation" and e["split"] == "test"][-1]
    data = ask(capsys, "eval", str(trained.run.path), "--out", str(tmp_path / "videos"))
    for key in ("reward_mean", "baseline_mean", "difference", "ci_low", "ci_high"):
        assert data[key] == pytest.approx(test[key], abs=1e-9), key
    assert data["terms"]["contrast"]["reward_mean"] == pytest.approx(test["terms"]["contrast"])
    assert (data["prompts"], data["seeds"], data["iteration"]) == (2, 1, test["iteration"])
    assert len(list((tmp_path / "videos").rglob("*.mp4"))) == 4
    assert trained.run.events.read_bytes().count(b"\n") == len(events)  # nothing was added


def test_eval_of_the_lora_file_agrees_with_the_run(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ask(capsys, "eval", str(trained.run.path), "--limit", "1")
    file = ask(capsys, "eval", str(trained.lora), "--config", str(trained.job), "--limit", "1")
    assert file["baseline_mean"] == pytest.approx(run["baseline_mean"], abs=1e-9)
    # The file is merged into the weights; the run adds it beside them: rounding only.
    assert file["reward_mean"] == pytest.approx(run["reward_mean"], abs=2e-3)
    assert file["ci_low"] is None
    none = ask(capsys, "eval", str(trained.lora), "--config", str(trained.job), "--limit", "1",
               "--strength", "0", "--reward", "contrast")  # fmt: skip
    assert none["difference"] == pytest.approx(0.0, abs=1e-9)
    assert set(none["terms"]) == {"contrast"}


def test_sample_with_and_without_the_lora(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def videos(name: str, *extra: str) -> list[np.ndarray]:
        argv = ["sample", str(trained.job), "--prompt", "a red ball", "--prompt", "ein Ball – 球",
                "--seed", "3", "--out", str(tmp_path / name), *extra]  # fmt: skip
        data = ask(capsys, *argv)
        assert [v["prompt"] for v in data["videos"]] == ["a red ball", "ein Ball – 球"]
        index = json.loads((tmp_path / name / "index.json").read_text(encoding="utf-8"))
        assert index == data["videos"]
        return [read_video(v["file"])[0] for v in data["videos"]]

    plain, again = videos("plain"), videos("again")
    lora = videos("lora", "--lora", str(trained.lora))
    off = videos("off", "--lora", str(trained.lora), "--strength", "0")
    assert plain[0].shape == (5, 32, 32, 3)
    for i in range(2):
        np.testing.assert_array_equal(plain[i], again[i])
        np.testing.assert_array_equal(plain[i], off[i])
        assert np.abs(plain[i].astype(int) - lora[i]).max() > 0
    assert np.abs(plain[0].astype(int) - plain[1]).max() > 0


def test_inspect_and_report_of_a_run(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    data = ask(capsys, "inspect", str(trained.run.path))
    assert (data["kind"], data["status"], data["iteration"]) == ("run", "finished", 2)
    assert str(trained.lora) in data["loras"] and data["evaluation"]["split"] == "test"
    assert main(["inspect", str(trained.run.path)]) == 0
    assert "difference" in capsys.readouterr().out
    trained.run.report.unlink()
    assert ask(capsys, "report", str(trained.run.path))["report"] == str(trained.run.report)
    page = trained.run.report.read_text(encoding="utf-8")
    assert page.count("<video ") == 4 and "a blue ball moves down" in page
    assert "contrast" in page and trained.lora.name in page


def test_inspect_of_the_embedded_files(capsys: pytest.CaptureFixture[str]) -> None:
    from flashgrpo_core import embedded

    for path, kind in (
        (embedded.TINY_TRANSFORMER, "transformer"),
        (embedded.TINY_VAE, "vae"),
        (embedded.TINY_TEXT_ENCODER, "text_encoder"),
    ):
        assert ask(capsys, "inspect", str(path))["kind"] == kind
        assert main(["inspect", str(path)]) == 0
        assert kind in capsys.readouterr().out


def test_the_demo_is_the_embedded_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's own wiring; training itself is covered above."""
    from flashgrpo_core import cli_train
    from flashgrpo_core.cli_common import Answer

    seen: list[Any] = []

    def record(config: Any, resume: str) -> Answer:
        seen.append((config, resume))
        RunFolder(config.run.output, config.run.name).create(config)
        return Answer("done")

    monkeypatch.setattr(cli_train, "_train", record)
    out = tmp_path / "out"
    for seed in ("5", "5", "6"):
        run = RunFolder(out, "demo")
        argv = ["demo", "--out", str(out), "--seed", seed, "--iterations", "7"]
        if seed == "5" and run.exists():
            run.config_path.unlink()  # the same demo again goes on in the same folder
        assert main(argv) == 0
    configs = [config for config, _ in seen]
    assert [c.run.name for c in configs] == ["demo", "demo", "demo-2"]
    assert configs[0].run.iterations == 7 and configs[0].model.transformer == "tiny"
    assert configs[0].run.output == str(out) and seen[0][1] == "auto"


def test_dry_run_compares_the_disk_it_needs_with_what_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgrpo_core import cli_train

    job = Trained(tmp_path)
    data = ask(capsys, *job.argv, "--dry-run")
    assert data["free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    monkeypatch.setattr(cli_train, "free_space", lambda path: data["plan"]["disk_bytes"] - 1)
    assert main([*job.argv, "--dry-run"]) == 2
    assert "not enough, choose another run.output" in capsys.readouterr().out


def test_inspect_says_that_a_runs_settings_are_broken(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Trained(tmp_path)
    shutil.copytree(trained.run.path, other.run.path)
    other.run.config_path.write_text("[run]\niterations = many\n", encoding="utf-8")
    assert main(["inspect", str(other.run.path)]) == 2
    out = capsys.readouterr().out
    assert "status     finished" in out and "not valid TOML" in out


def test_an_empty_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--transformer", "tiny", "--prompt", " "]) == 2
    assert '--prompt "" is empty' in capsys.readouterr().err


def test_a_failure_before_training_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Trained(tmp_path)
    assert main([*job.argv, "--set", "run.processes=7"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
