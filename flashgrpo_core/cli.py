"""The command line: `flashgrpo demo | train | sample | eval | export | inspect | score | ...`.

Results go to standard output, progress and errors to standard error. Exit status: 0 done, or
training stopped on request (it says how to resume), 2 bad input (one line that names the fix), 130
ended by a second Ctrl-C, or by one outside training, 1 anything unexpected.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .config import RunConfig, ScheduleConfig
from .errors import Cancelled, FlashGRPOError

_FORMATS = ("comfyui", "kohya", "diffusers")

#: Command -> module and function that carry it out.
COMMANDS = {
    "demo": ("cli_train", "demo"),
    "train": ("cli_train", "train"),
    "sample": ("cli_models", "sample"),
    "eval": ("cli_models", "evaluate_command"),
    "export": ("cli_models", "export"),
    "inspect": ("cli_look", "inspect"),
    "score": ("cli_score", "score"),
    "schedule": ("cli_look", "schedule"),
    "plan": ("cli_plan", "plan_command"),
    "report": ("cli_look", "report"),
    "worker": ("worker", "worker"),
    "bench": ("bench.command", "bench"),
    "reward-server": ("served.command", "reward_server"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Args:
        argv: arguments without the program name; default the process's own.
    """
    for stream in (sys.stdout, sys.stderr):
        # A prompt in Chinese must not break a console that cannot show it.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        return _run(build_parser().parse_args(argv))
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) is gone: nothing to say and nobody to hear it
        return 0
    except (Exception, KeyboardInterrupt) as exc:
        if debug:
            traceback.print_exc()
        code, message = _failure(exc)
    print(f"flashgrpo: {message}", file=sys.stderr)
    return code


def _failure(exc: BaseException) -> tuple[int, str]:
    """Exit status and one line for a failure; a traceback helps no user."""
    text = " ".join(str(exc).split())
    if isinstance(exc, FlashGRPOError):
        return 2, text
    if isinstance(exc, OSError):
        where = "" if exc.filename is None else f"{str(exc.filename)!r}: "
        return 2, f"{where}{exc.strerror or text}: check the path and its permissions"
    if isinstance(exc, (Cancelled, KeyboardInterrupt)):
        return 130, "stopped; what was saved before can be resumed"
    name = type(exc).__name__
    if name == "OutOfMemoryError":
        from .failures import OUT_OF_MEMORY

        return 1, OUT_OF_MEMORY
    return 1, f"unexpected {name}: {text[:300] or 'no message'} (run again with --debug)"


def _run(args: argparse.Namespace) -> int:
    # torch and diffusers take seconds to import: each command imports what it needs, no more.
    from .runs.events import jsonable

    module, function = COMMANDS[args.command]
    try:
        known = importlib.util.find_spec(f".{module}", __package__) is not None
    except ModuleNotFoundError:
        known = False
    if not known:
        raise FlashGRPOError(
            f"`{args.command}` is not part of the ComfyUI node pack: install the Python package "
            "(pip install flashgrpo) in an environment of its own"
        )
    answer = getattr(importlib.import_module(f".{module}", __package__), function)(args)
    if args.json and answer.data:
        print(json.dumps(jsonable(answer.data), ensure_ascii=False, indent=1))
    elif answer.text:
        print(answer.text)
    sys.stdout.flush()
    return answer.code


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        """Raise the message with the command that explains the arguments."""
        raise FlashGRPOError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    shared = _Parser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print the result as JSON")
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = _Parser(
        prog="flashgrpo",
        description="Align Wan video models to a reward with Flash-GRPO and get a LoRA.",
    )
    parser.add_argument("--version", action="version", version=f"flashgrpo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=help, description=help, parents=[shared], allow_abbrev=False
        )

    _add_demo(command("demo", "Train the embedded tiny Wan on this machine, in minutes."))
    _add_train(command("train", "Train a run from a TOML file, or go on with one."))
    _add_sample(command("sample", "Make videos from prompts, with or without a LoRA."))
    _add_eval(command("eval", "Judge a run or a LoRA against its start on held-out prompts."))
    _add_export(command("export", "Write a LoRA file from a run's checkpoint."))
    sub = command("inspect", "Say what a model file, LoRA or run folder is.")
    sub.add_argument("file", metavar="FILE", help="safetensors file, model folder or run folder")
    _add_score(command("score", "Score existing videos with rewards, best first."))
    _add_reward_server(command("reward-server", "Serve rewards to trainers over HTTP."))
    _add_schedule(command("schedule", "Print a noise schedule and its SDE steps in float64."))
    _add_plan(command("plan", "Predict memory and time of a run, and which card holds it."))
    sub = command("report", "Draw the report.html of a run again.")
    sub.add_argument("run_folder", metavar="RUN", help="run folder")
    _add_bench(command("bench", "Compare training strategies on the tiny Wan, over seeds."))
    _add_worker(command("worker", "Train the jobs that ComfyUI puts into its queue."))
    return parser


def _add_demo(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", default="output", metavar="DIR", help="output folder (./output)")
    sub.add_argument("--seed", type=_natural, default=0, help="seed of every random draw (0)")
    sub.add_argument("--iterations", type=_natural, default=45, metavar="N", help="length (45)")


def _add_models(sub: argparse.ArgumentParser, what: str) -> None:
    sub.add_argument("--models", metavar="DIR", help=f"ComfyUI models folder in which {what}")


def _add_set(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a setting, e.g. optim.learning_rate=1e-4; may be repeated",
    )


def _add_train(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", help="TOML file, or the folder of a run")
    _add_set(sub)
    sub.add_argument("--dry-run", action="store_true", help="check files and count, train nothing")
    sub.add_argument(
        "--resume",
        choices=("auto", "never", "latest"),
        default="auto",
        help="auto: continue an existing run; never: refuse it; latest: require it",
    )
    _add_models(sub, "files are looked up that do not lie beside the TOML")


def _add_base(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--transformer", metavar="FILE", help="Wan diffusion model, or `tiny`")
    sub.add_argument("--vae", metavar="FILE", help="Wan VAE")
    sub.add_argument("--text-encoder", metavar="FILE", help="UMT5 text encoder")
    _add_set(sub)
    _add_models(sub, "files are looked up")


def _add_sample(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file or run folder")
    _add_base(sub)
    sub.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    sub.add_argument("--prompts", metavar="FILE", help=".txt (one a line) or .jsonl")
    sub.add_argument("--image", metavar="FILE", help="start image of prompts without their own")
    sub.add_argument("--lora", action="append", default=[], metavar="FILE", help="LoRA to apply")
    sub.add_argument("--strength", type=_finite, default=1.0, help="strength of the LoRA (1.0)")
    sub.add_argument("--seed", type=_natural, default=0, help="seed of the first video (0)")
    sub.add_argument("--count", type=_positive, default=1, help="videos per prompt (1)")
    sub.add_argument("--out", default="samples", metavar="DIR", help="folder (./samples)")


def _add_eval(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("target", metavar="RUN_OR_LORA", help="run folder, or a LoRA .safetensors")
    sub.add_argument("--config", metavar="CONFIG", help="for a LoRA: TOML file or run folder")
    _add_base(sub)
    sub.add_argument("--strength", type=_finite, default=1.0, help="strength of the LoRA (1.0)")
    sub.add_argument("--split", choices=("test", "validation"), default="test")
    sub.add_argument("--prompts", metavar="FILE", help="judge on these prompts instead")
    sub.add_argument("--limit", type=_positive, metavar="N", help="use only the first N prompts")
    sub.add_argument("--seeds", type=_positive, metavar="N", help="videos per prompt")
    _add_which(sub)
    _add_reward(sub)
    sub.add_argument("--out", metavar="DIR", help="keep the videos here")


def _add_which(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--checkpoint", type=_checkpoint, default="best", metavar="N|best|latest", help="(best)"
    )
    sub.add_argument("--weights", choices=("ema", "live"), help="default: what the run judges")


def _add_export(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_folder", metavar="RUN", help="run folder")
    _add_which(sub)
    sub.add_argument("--format", choices=_FORMATS, help="key names; default: the run's setting")
    sub.add_argument("--out", metavar="FILE", help=".safetensors; default: the run's lora folder")
    _add_models(sub, "the model is looked up")


def _add_worker(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--runs", required=True, metavar="DIR", help="ComfyUI's output folder")
    sub.add_argument(
        "--models",
        action="append",
        default=[],
        metavar="DIR",
        help="ComfyUI's models folder; may be repeated. Nothing outside these folders is opened",
    )
    sub.add_argument("--name", help="name of this worker (that of the machine)")
    sub.add_argument("--once", action="store_true", help="end when no job is left to take")
    sub.add_argument(
        "--lease",
        type=_lease,
        default=60.0,
        metavar="SECONDS",
        help="silence after which another worker counts as dead and its job is taken over (60)",
    )


def _add_bench(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", default="bench", metavar="DIR", help="folder of runs and report")
    sub.add_argument("--quick", action="store_true", help="a few tiny runs, to see that it works")
    sub.add_argument("--arms", default="", metavar="A,B", help="what is compared; default six arms")
    sub.add_argument("--seeds", type=_positive, default=0, help="runs per arm (5; --quick: 1)")
    sub.add_argument(
        "--tuning-seeds", type=_positive, default=1, help="runs per learning rate and arm (1)"
    )
    sub.add_argument(
        "--learning-rate", type=_finite, default=0.0, help="for all arms, instead of the grid"
    )
    sub.add_argument(
        "--budget", type=_positive, default=0, metavar="N", help="forwards per run at most (80000)"
    )
    sub.add_argument(
        "--jobs", type=_positive, default=1, help="runs at a time, one thread each (1)"
    )
    sub.add_argument("--report-only", action="store_true", help="only draw what is finished")


def _lease(text: str) -> float:
    value = _finite(text)
    if value < 3:
        raise argparse.ArgumentTypeError(f"{text} must be at least 3 seconds")
    return value


def _add_reward(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="NAME[=WEIGHT]",
        help="reward term, or an inline TOML table with options; may be repeated",
    )


def _add_score(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("videos", metavar="VIDEO_OR_FOLDER", help="video file, or a folder of them")
    sub.add_argument("--prompt", help="prompt of all videos")
    sub.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt a line in the order of the file names, or .jsonl with file and prompt; "
        "default: NAME.txt beside each video, prompts.jsonl or index.json in the folder",
    )
    _add_reward(sub)
    _add_models(sub, "the models of rewards are looked up")
    sub.add_argument("--on-nan", choices=("auto", "error", "mask"), default="auto")
    sub.add_argument(
        "--max-frames", type=_positive, metavar="N", help="read only the first N frames"
    )


def _add_reward_server(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--reward", action="append", required=True, metavar="NAME", help="reward; may be repeated"
    )
    sub.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the reward (NAME.KEY=VALUE with several); may be repeated",
    )
    _add_models(sub, "model files are looked up")
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    sub.add_argument("--port", type=_port, default=8190, help="port (8190); 0 takes a free one")
    sub.add_argument(
        "--token-file", metavar="FILE", help="what clients must show; required off loopback"
    )
    for name, default, text in (
        ("batch", 8, "videos scored together"),
        ("queue", 16, "requests that may wait"),
        ("max-megabytes", 512, "largest request"),
        ("max-videos", 64, "most videos in a request"),
        ("max-frames", 1025, "longest video"),
        ("max-pixels", 4096 * 2304, "largest frame, width times height"),
    ):
        sub.add_argument(
            f"--{name}", type=_positive, default=default, metavar="N", help=f"{text} ({default})"
        )
    for name, seconds, text in (
        ("timeout", 600.0, "time for the scores of a request"),
        ("read-timeout", 60.0, "time a client may take to send a request"),
    ):
        sub.add_argument(
            f"--{name}",
            type=_seconds,
            default=seconds,
            metavar="SECONDS",
            help=f"{text} ({seconds:g})",
        )


def _add_plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file or run folder")
    _add_set(sub)
    _add_models(sub, "files are looked up that do not lie beside the TOML")
    sub.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="cuda", help="planned for (cuda)"
    )
    sub.add_argument(
        "--rate", type=_seconds, metavar="TFLOPS", help="TFLOP/s it reaches; measured when present"
    )
    sub.add_argument(
        "--processes", type=_positive, metavar="N", help="processes that model.shard spreads over"
    )
    sub.add_argument("--presets", action="store_true", help="list the presets by model and card")
    sub.add_argument(
        "--preset", metavar="NAME", help="plan a preset on the published model, without its files"
    )


def _add_schedule(sub: argparse.ArgumentParser) -> None:
    choices = {
        f: ScheduleConfig.__dataclass_fields__[f].metadata["choices"] for f in ("kind", "sde")
    }
    sub.add_argument("--kind", choices=choices["kind"], default="simple")
    sub.add_argument("--steps", type=_positive, default=20)
    sub.add_argument("--shift", type=_finite, default=3.0)
    sub.add_argument("--sde", choices=choices["sde"], default="flash")
    sub.add_argument("--eta", type=_finite, help="noise scale; default: the usual one of --sde")
    sub.add_argument("--window", metavar="A:B", help="stochastic steps, half-open (first half)")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _natural(text: str) -> int:
    value = _whole(text)
    high = int(RunConfig.__dataclass_fields__["seed"].metadata["high"])
    if not 0 <= value <= high:
        raise argparse.ArgumentTypeError(f"{text} is outside 0 to {high}")
    return value


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _port(text: str) -> int:
    value = _whole(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is outside 0 to 65535")
    return value


def _seconds(text: str) -> float:
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _checkpoint(text: str) -> str:
    if text not in ("best", "latest") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither best, latest nor an iteration")
    return text
