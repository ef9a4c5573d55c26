"""The command line without a network: options, messages, exit codes, schedules, look-up, progress."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashgrpo_core import cli, progress
from flashgrpo_core.cli import COMMANDS, build_parser, main
from flashgrpo_core.cli_common import facts, reward_terms, size_words, table
from flashgrpo_core.config_io import build_config
from flashgrpo_core.errors import Cancelled, FlashGRPOError
from flashgrpo_core.lookup import resolve_files
from flashgrpo_core.progress import Session, TerminalControl, result_words
from flashgrpo_core.video import write_mp4


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert name in overview
        with pytest.raises(SystemExit) as exit_:
            main([name, "--help"])
        assert exit_.value.code == 0
        text = capsys.readouterr().out
        assert "--json" in text and "--debug" in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["trian"],
        ["demo", "--iterations", "-1"],
        ["demo", "--seed", "x"],
        ["sample", "--count", "0"],
        ["export", "run", "--checkpoint", "newest"],
        ["schedule", "--kind", "karras"],
        ["train", "c.toml", "--dry"],
    ],
)
def test_wrong_options_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--help" in error and "_" not in error.split("'")[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "missing.toml"], "'missing.toml' does not exist"),
        (["sample", "--prompt", "a"], "no model is named"),
        (["sample", "--transformer", "tiny"], "no prompt is given"),
        (["sample", "--transformer", "w.safetensors", "--prompt", "a"], "w.safetensors"),
        (["eval", "lora.safetensors"], "no model is named"),
        (["export", "nowhere"], "'nowhere' is no run folder"),
        (["inspect", "nothing.safetensors"], "nothing.safetensors"),
        (["score", "none.mp4", "--prompt", "a"], "'none.mp4' does not exist"),
        (["report", "nowhere"], "no run folder"),
        (["schedule", "--steps", "5000"], "5000"),
        (["schedule", "--shift", "0"], "shift"),
        (["schedule", "--window", "3:99"], "3:99"),
        (["schedule", "--window", "5"], "FIRST:END"),
        (["schedule", "--eta", "0"], "--eta"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flashgrpo: ") and captured.err.count("\n") == 1
    assert words in captured.err and "Traceback" not in captured.err
    assert main([*argv, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (FlashGRPOError("two\nlines"), 2, "flashgrpo: two lines\n"),
        (ValueError("odd\nthing"), 1, "unexpected ValueError: odd thing"),
        (KeyboardInterrupt(), 130, "can be resumed"),
        (Cancelled("x"), 130, "can be resumed"),
        (torch.OutOfMemoryError("CUDA"), 1, "rollout.micro_batch"),
    ],
)
def test_every_failure_becomes_one_line(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(args: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert main(["inspect", "x"]) == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1


def test_a_console_that_cannot_show_a_letter_does_not_break(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr("sys.stderr", console)
    assert main(["score", str(tmp_path / "größe 视频.mp4"), "--prompt", "a"]) == 2
    console.flush()
    assert b"gr??e ??.mp4" in raw.getvalue()


# Schedules: the numbers are those of the method's published reference values.


def test_schedule_prints_float64(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "schedule", "--kind", "unipc-a", "--steps", "20", "--shift", "3")
    assert len(data["sigmas"]) == 21 and data["sigmas"][-1] == 0.0
    for key in ("timesteps", "dt", "noise_std", "lambda", "inverse_lambda"):
        assert len(data[key]) == 20, key
    assert data["timesteps"][:10] == [999, 982, 963, 944, 922, 899, 874, 847, 817, 785]
    lam = data["lambda"]
    assert (lam[0], lam[9], lam[19]) == pytest.approx((0.1337, 0.2649, 2.914), rel=4e-4)
    inverse = np.array(data["inverse_lambda"][:10])
    assert inverse.mean() == pytest.approx(5.587689, rel=1e-6)
    assert data["window"] == [0, 10] and len(data["weights"]) == 10
    assert np.mean(data["weights"]) == pytest.approx(1.0, abs=1e-12)
    assert data["weights"][0] / data["weights"][9] == pytest.approx(1.9804, rel=1e-4)
    assert 0.128 < min(data["noise_std"][:10]) < max(data["noise_std"][:10]) < 0.1465
    np.testing.assert_array_equal(np.diff(data["sigmas"]), data["dt"])


@pytest.mark.parametrize(
    ("shift", "sigmas"),
    [
        ("3", [1, 0.9, 0.75, 0.5, 0]),
        ("5", [1, 0.9375, 0.8333, 0.625, 0]),
        ("8", [1, 0.96, 0.8889, 0.7273, 0]),
    ],
)
def test_simple_schedule_is_comfyuis(
    shift: str, sigmas: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    data = run_json(capsys, "schedule", "--kind", "simple", "--steps", "4", "--shift", shift)
    assert data["sigmas"] == pytest.approx(sigmas, abs=5e-5)
    assert data["timesteps"] == pytest.approx([1000 * s for s in data["sigmas"][:-1]])


def test_schedule_window_sampler_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "schedule", "--steps", "10", "--sde", "cps", "--window", "2:6")
    assert data["eta"] == 0.7 and data["window"] == [2, 6] and len(data["weights"]) == 4
    assert data["lambda"][-1] is None and data["noise_std"][-1] == 0.0  # cps ends without noise
    assert np.mean(data["weights"]) == pytest.approx(1.0)
    ratio = np.array(data["weights"]) / np.array(data["inverse_lambda"][2:6])
    assert ratio == pytest.approx([ratio[0]] * 4)
    assert main(["schedule", "--steps", "10", "--window", "2:6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and lines[0].split()[0] == "step"
    assert len(lines[3].split()) == len(lines[4].split()) - 0 == 8 and len(lines[2].split()) == 7


# Reward terms, score, small helpers.


def test_reward_terms() -> None:
    assert reward_terms(["motion", "technical=0.5", "motion = 2"]) == [
        {"name": "motion", "weight": 1.0},
        {"name": "technical", "weight": 0.5},
        {"name": "motion", "weight": 2.0},
    ]
    assert reward_terms(['{name = "motion", enough = 0.25}']) == [
        {"name": "motion", "enough": 0.25}
    ]
    for bad in ("motion=fast", "{name = }"):
        with pytest.raises(FlashGRPOError, match="--reward"):
            reward_terms([bad])


PROMPTED = (("a", "red"), ("b", "blue"))


def moving_square(step: int) -> np.ndarray:
    video = np.full((9, 64, 64, 3), 40, np.uint8)
    for t in range(9):
        video[t, 20:44, 4 + step * t : 24 + step * t] = (220, 90, 60)
    return video


def test_score_ranks_videos_and_reads_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "clips ü"
    for name, step in (("a.mp4", 0), ("b.mp4", 4)):
        write_mp4(folder / name, moving_square(step), 8)
    data = run_json(capsys, "score", str(folder), "--prompt", "x", "--reward", "motion=2")
    moving, still = data["videos"]  # best first
    assert [v["rank"] for v in data["videos"]] == [1, 2] and moving["file"].endswith("b.mp4")
    assert moving["total"] > still["total"]
    assert moving["total"] == pytest.approx(2 * moving["terms"]["motion"])
    assert data["mean"]["total"] == pytest.approx((moving["total"] + still["total"]) / 2)
    assert data["weights"] == {"motion": 2.0} and still["frames"] == 9

    prompts = tmp_path / "p.txt"
    prompts.write_text("first\nsecond\n", encoding="utf-8")
    argv = ["score", str(folder), "--reward", "motion"]
    data = run_json(capsys, *argv, "--prompts", str(prompts))
    assert [v["prompt"] for v in data["videos"]] == ["second", "first"]
    prompts.write_text("only one\n", encoding="utf-8")
    assert main([*argv, "--prompts", str(prompts)]) == 2
    assert main(argv) == 0, "motion looks at no prompt"
    argv = [*argv, "--reward", "tiny_world"]
    assert main(argv) == 2
    assert "no prompt is known for 'a.mp4'" in capsys.readouterr().err
    index = [{"file": f"x/{f}.mp4", "prompt": f"{c} moving up"} for f, c in PROMPTED]
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    data = run_json(capsys, *argv)
    assert {v["prompt"] for v in data["videos"]} == {"red moving up", "blue moving up"}
    (folder / "a.txt").write_text("green\nmoving up\n", encoding="utf-8")
    lines = "\n".join(json.dumps({"file": "b.mp4", "prompt": "cyan moving up"}) for _ in range(1))
    (folder / "prompts.jsonl").write_text(lines + "\n", encoding="utf-8")
    data = run_json(capsys, *argv)
    assert {v["prompt"] for v in data["videos"]} == {"green moving up", "cyan moving up"}
    by_name = tmp_path / "named.jsonl"
    rows = [{"file": f"{f}.mp4", "prompt": f"{c} moving left"} for f, c in PROMPTED]
    by_name.write_text("\n".join(map(json.dumps, rows[::-1])), encoding="utf-8")
    data = run_json(capsys, *argv, "--prompts", str(by_name))
    assert {Path(v["file"]).name: v["prompt"] for v in data["videos"]} == {
        "a.mp4": "red moving left",
        "b.mp4": "blue moving left",
    }
    (folder / "prompts.jsonl").write_text("[]\n", encoding="utf-8")
    assert main(argv) == 2 and "needs file and prompt" in capsys.readouterr().err
    assert main([*argv, "--prompt", "red moving up"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("mean")
    assert main(["score", str(folder), "--prompt", "x", "--reward", "motoin"]) == 2
    assert "did you mean 'motion'" in capsys.readouterr().err


def test_words_and_tables() -> None:
    assert table([["a", "1"], ["bbb", "22"]]) == "a     1\nbbb  22"
    assert facts([("a", 1), ("long", ""), ("b", None), ("c", [])]) == "a  1"
    assert [size_words(n) for n in (12, 12_345, 5.3e9)] == ["12 B", "12.3 kB", "5.3 GB"]


# Finding files.


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_files_are_found_beside_the_toml_then_in_comfyuis_folders(tmp_path: Path) -> None:
    base, models = tmp_path / "job", tmp_path / "ComfyUI mödels"
    base.mkdir()
    wan = touch(models / "unet" / "sub" / "wan.safetensors")
    vae = touch(models / "vae" / "vae.safetensors")
    clip = touch(models / "clip" / "umt5.safetensors")
    lora = touch(models / "loras" / "style.safetensors")
    prompts = touch(base / "prompts.txt")
    config = build_config(
        {
            "model": {
                "transformer": "sub/wan.safetensors",
                "vae": "vae.safetensors",
                "text_encoder": "umt5.safetensors",
                "frozen_loras": [{"file": "style.safetensors", "strength": 0.5}],
                "continue_from": str(lora),
            },
            "prompts": {"file": "prompts.txt"},
        }
    )
    found = resolve_files(config, base, models)
    assert found.model.transformer == str(wan) and found.model.vae == str(vae)
    assert found.model.text_encoder == str(clip) and found.prompts.file == str(prompts)
    assert found.model.frozen_loras == [{"file": str(lora), "strength": 0.5}]
    assert config.model.vae == "vae.safetensors"  # the original is not changed
    assert resolve_files(found, tmp_path, None) == found  # absolute paths stay
    own = touch(base / "vae.safetensors")
    assert resolve_files(config, base, models).model.vae == str(own)
    preferred = touch(models / "diffusion_models" / "sub" / "wan.safetensors")
    assert resolve_files(config, base, models).model.transformer == str(preferred)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    config = build_config({"model": {"transformer": "tiny", "vae": "v.safetensors"}})
    with pytest.raises(FlashGRPOError) as error:
        resolve_files(config, tmp_path, None)
    assert "model.vae = 'v.safetensors'" in str(error.value) and str(tmp_path) in str(error.value)
    assert "--models" in str(error.value)
    (tmp_path / "m").mkdir()
    with pytest.raises(FlashGRPOError) as error:
        resolve_files(config, tmp_path, tmp_path / "m")
    assert str(tmp_path / "m" / "vae") in str(error.value)
    with pytest.raises(FlashGRPOError, match="no folder"):
        resolve_files(config, tmp_path, tmp_path / "nowhere")
    tiny = build_config({"model": {"transformer": "tiny"}})
    assert resolve_files(tiny, tmp_path, None) == tiny


# Progress.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ITERATION = {
    "event": "iteration",
    "iteration": 3,
    "reward": {"mean": 0.5, "terms": {}},
    "advantage_std": 0.02,
    "grad_norm": 2e-4,
    "ratio_drift": 0.0,
    "seconds": 30.0,
}
EVALUATION = {
    "event": "evaluation",
    "iteration": 10,
    "split": "test",
    "reward_mean": 0.7,
    "baseline_mean": 0.6,
    "difference": 0.1,
    "ci_low": 0.05,
    "ci_high": 0.15,
}


def test_a_pipe_gets_one_line_per_iteration_with_the_time_left() -> None:
    stream = io.StringIO()
    control = TerminalControl(13, stream=stream)
    control.phase("rollout", 8, 3)
    control.tick(8)
    control.event(ITERATION)
    control.event({"event": "phase", "iteration": 3, "name": "rollout", "seconds": 1.0})
    control.event(EVALUATION)
    control.close()
    assert stream.getvalue().splitlines() == [
        "iteration 3/13  reward 0.500  std 0.020  grad 2e−4  drift 0  30.0 s  left 5 min 0 s",
        "test at iteration 10  reward 0.600 -> 0.700, difference +0.100 (95 % interval +0.050 to +0.150)",
    ]
    assert "interval" not in result_words({**EVALUATION, "ci_low": None})


def test_a_terminal_gets_a_bar_that_makes_room_for_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = Terminal()
    control = TerminalControl(13, stream=stream)
    control.phase("rollout", 8, 3)
    clock[0] = 10.0
    control.tick(2)
    assert stream.getvalue().endswith("2/8  30.0 s left")
    assert "iteration 3  rollout" in stream.getvalue()
    control.event(ITERATION)
    lines = stream.getvalue().split("\r\x1b[K")
    assert any(part.startswith("iteration 3/13  reward") for part in lines)
    control.close()
    assert stream.getvalue().endswith("\r\x1b[K")
    quiet = Terminal()
    control = TerminalControl(13, stream=quiet, quiet=True)
    control.phase("rollout", 8, 3)
    control.event(ITERATION)
    assert quiet.getvalue() == ""


def test_the_first_interrupt_asks_and_its_echo_is_the_same_request() -> None:
    stream = io.StringIO()
    before = signal.getsignal(signal.SIGINT)
    with Session(TerminalControl(stream=stream)) as control:
        control.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Cancelled):
            control.check()
        # A launcher passes on what the terminal has sent already; tests/training/test_stop.py
        # shows what a second request does.
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
    assert stream.getvalue().count("stopping after the current step") == 1


def test_log_records_become_notes() -> None:
    import logging

    stream = io.StringIO()
    with Session(TerminalControl(stream=stream)):
        logging.getLogger("flashgrpo_core.somewhere").warning("odd %d", 3)
    logging.getLogger("flashgrpo_core.somewhere").warning("after")
    assert stream.getvalue() == "warning: odd 3\n"


def test_offload_keeps_one_network_on_its_device() -> None:
    moves: list[tuple[str, str]] = []

    class Network(torch.nn.Linear):
        def __init__(self, name: str) -> None:
            super().__init__(1, 1)
            self.name = name

        def to(self, device: Any) -> Network:  # type: ignore[override]
            moves.append((self.name, str(device)))
            return self

    wan, vae = Network("wan"), Network("vae")
    control = TerminalControl(offload=True)
    control.bring(wan)
    control.bring(vae)
    control.bring(wan)
    assert moves == [
        ("wan", "cpu"),
        ("wan", "cpu"),
        ("vae", "cpu"),
        ("vae", "cpu"),
        ("wan", "cpu"),
    ]
    moves.clear()
    TerminalControl().bring(wan)
    assert moves == []


def test_the_parser_knows_every_command() -> None:
    parser = build_parser()
    action = next(a for a in parser._actions if a.dest == "command")
    assert set(action.choices or ()) == set(COMMANDS)
