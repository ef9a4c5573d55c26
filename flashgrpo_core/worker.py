"""`flashgrpo worker`: trains the jobs that ComfyUI's Train node puts into the queue.

It may itself be started by `accelerate launch` or `torchrun`: the main process then takes the jobs
and tells the others, and all of them train together.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
import re
import secrets
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import __version__, fence
from .build import build_prompts, needed_texts, preflight, text_tokens
from .cli_common import Answer
from .config import Config
from .config_io import build_config, to_tables
from .devices import pick_device
from .distributed import World
from .embedded import with_embedded_files
from .errors import FlashGRPOError
from .failures import words
from .fence import LostLease, Released
from .files import resolve_inside
from .launch import launched_world, part
from .lookup import adopt_moved_files
from .progress import Session, TerminalControl
from .ready_embeddings import ReadyEmbeddings
from .runs.checkpoint import list_checkpoints
from .runs.events import EventLog, utc_now
from .runs.folder import RunFolder
from .runs.job import Job, job_config
from .runs.queue import BEAT, Queue, Watch
from .training import train
from .worker_job import Heart, JobControl, Taken, deaths, end_of, last_end, take_over

log = logging.getLogger(__name__)

#: Workers that may die in a row over the same iteration of a job before it is given up.
MAX_DEATHS = 5

_IDLE = {"event": "idle"}
_END = {"event": "end"}


def worker(args: Namespace) -> Answer:
    """Train jobs until asked to stop."""
    output, models = _folders(args.runs, args.models)
    launch = Config()
    if pick_device("auto").type == "cpu":
        launch.model.device = "cpu"  # processes without a GPU find each other only when told so
    world = launched_world(launch)
    control = TerminalControl(quiet=not world.is_main)
    with Session(control):
        found = Worker(
            output, models, world, control, name=args.name, lease=args.lease, once=args.once
        )
        found.shard = launch.model.shard
        count = found.run()
    if world.size > 1:
        part()
    return Answer(f"{count} job(s) done" if world.is_main else "", {"jobs": count})


def _folders(runs: str, models: list[str]) -> tuple[Path, list[Path]]:
    output = Path(runs).expanduser().absolute()
    if output.name == "runs" and output.parent.name == "flashgrpo":
        output = output.parent.parent
    for option, folder in [("--runs", output), *(("--models", Path(m)) for m in models)]:
        if not folder.expanduser().is_dir():
            raise FlashGRPOError(
                f"{option} {str(folder)!r} is no folder: name ComfyUI's "
                + ("output folder" if option == "--runs" else "models folder")
            )
    # Links in front of it must not hide that a path lies inside.
    return Path(os.path.realpath(output)), [Path(m).expanduser().absolute() for m in models]


class Worker:
    """One worker: a process, or several that train together.

    Args:
        output: folder that holds `flashgrpo/runs` and `flashgrpo/queue`.
        models: folders with model files.
        world: the processes.
        control: where it says what it does; knows when it was asked to stop.
        name: what people call it; default the name of the machine.
        lease: seconds without a heartbeat after which another worker's job is taken over.
        once: end when there is no job to take.
    """

    def __init__(
        self,
        output: Path,
        models: list[Path],
        world: World,
        control: TerminalControl,
        *,
        name: str | None = None,
        lease: float,
        once: bool = False,
    ) -> None:
        self.queue = Queue(output)
        self.output = output
        self.models = models
        self.world = world
        self.control = control
        self.lease_seconds = lease
        self.once = once
        self.shard = False  # what the launcher asks of every job
        label = re.sub(r"[^A-Za-z0-9_-]+", "-", name or platform.node() or "worker")[:60]
        self.id = f"{label}.{secrets.token_hex(4)}"
        self.heart = Heart(self.queue.workers_path / f"{self.id}.json", self.id, world.size)
        self._watch = Watch()
        self._threads = torch.get_num_threads()

    def run(self) -> int:
        """Take and train jobs until asked to stop; returns how many were brought to an end."""
        if not self.world.is_main:
            while (order := tell(self.world, None)) != _END:
                if order != _IDLE:
                    self._train_along(order)
            return 0
        self.control.note(f"worker {self.id}: {self.world.size} process(es), {self.queue.path}")
        self.heart.start()
        done = 0
        try:
            while not self.control.stop_requested:
                taken = self._take()
                if taken is not None:
                    done += self._work(taken)
                elif self.once:
                    break
                else:
                    tell(self.world, _IDLE)  # the others must not wait for too long
                    time.sleep(BEAT)
            tell(self.world, _END)
        finally:
            self.heart.stop()
        return done

    def _take(self) -> Taken | None:
        """Claim the first job that can be had, in order of submission."""
        runs: set[str] = set()
        seen: set[str] = set()
        for entry in self.queue.open():
            lease = entry.lease()
            if lease is None:
                continue  # it changes hands at this moment
            job: Job | FlashGRPOError
            try:
                job = entry.job()
            except FlashGRPOError as exc:
                job = exc
            else:
                if job.run in runs:
                    continue  # an earlier job of the same run is still open
                runs.add(job.run)
            if not lease.free:
                seen.add(lease.name)
                silent, _ = self._watch.look(lease.name, lease.read())
                if silent < self.lease_seconds:
                    continue
            claimed = utc_now()  # before the rename, so that times have the order of the claims
            mine = lease.pass_to(self.id)
            if mine is None or entry.result() is not None:
                continue  # someone was faster, or it ended while we looked
            if not lease.free:
                self.control.note(f"job {entry.name}: {lease.owner} fell silent, taking over")
            self.heart.hold(entry, mine)
            return Taken(entry, mine, job, claimed)
        for name, content in self.queue.workers().items():
            seen.add(f"workers/{name}")
            if self._watch.look(f"workers/{name}", content)[0] > 10 * self.lease_seconds:
                (self.queue.workers_path / f"{name}.json").unlink(missing_ok=True)
        self._watch.forget(seen)
        return None

    def _work(self, taken: Taken) -> bool:
        """Train a job that was claimed; returns whether it came to an end."""
        entry, lease = taken.entry, taken.lease
        roots = [entry.path]
        if isinstance(taken.job, Job):
            roots.append(RunFolder(self.output, taken.job.run).path)
        try:
            with fence.fenced(roots, lease.held, lease.name):
                outcome = self._outcome(taken)
                entry.end(**outcome)
            self.control.note(f"job {entry.name}: {outcome['status']} {outcome.get('reason', '')}")
            return True
        except Released:
            self.heart.drop()
            lease.free_it()
            self.control.note(f"job {entry.name}: given back to the queue")
        except (LostLease, FlashGRPOError) as exc:
            # A result that cannot be written leaves the job to whoever can.
            self.control.note(f"job {entry.name}: {exc}")
        finally:
            self.heart.drop()
            _forget(self._threads)
        return False

    def _outcome(self, taken: Taken) -> dict[str, Any]:
        """Bring a job to its end; returns the fields of its result."""
        if not isinstance(taken.job, Job):
            return {"status": "failed", "reason": str(taken.job)}
        job = taken.job
        try:
            resolve_inside(self.output, f"flashgrpo/runs/{job.run}")  # a link may lead out
            folder = RunFolder(self.output, job.run)
            folder.path.mkdir(parents=True, exist_ok=True)
            if taken.lease.generation > 1:
                take_over(folder, taken.entry)
            end = end_of(folder, job) or self._log_and_train(taken, job, folder)
        except (FlashGRPOError, OSError) as exc:
            # The run folder itself cannot be written.
            return {"status": "failed", "reason": str(exc)}
        return {key: end[key] for key in ("status", "reason", "lora") if end.get(key)}

    def _log_and_train(self, taken: Taken, job: Job, folder: RunFolder) -> dict[str, Any]:
        """Train; returns the `run_finished` event."""
        events = EventLog(folder.events)
        iteration = max(list_checkpoints(folder.checkpoints), default=0)
        died = deaths(folder, job, iteration, taken.lease.generation)
        events.append(
            "job",
            iteration,
            job=taken.entry.name,
            id=job.id,
            worker=self.id,
            generation=taken.lease.generation,
            claimed=taken.claimed,
            world_size=self.world.size,
        )
        known = last_end(folder)
        outcome = self._train(taken, job, folder, died)
        end = end_of(folder, job)
        if end is not None:
            return end
        if known is not None and outcome["status"] == "finished":
            # It was finished already and stays what it was; each job has an end of its own.
            kept = ("lora", "best_iteration", "iterations")
            outcome |= {key: known[key] for key in kept if key in known}
            return events.append("run_finished", known["iteration"], **outcome)
        iteration = max(list_checkpoints(folder.checkpoints), default=0)
        return events.append("run_finished", iteration, **{"lora": None, **outcome})

    def _train(self, taken: Taken, job: Job, folder: RunFolder, died: int) -> dict[str, Any]:
        """Train; returns the status, and why it failed."""
        try:
            if died >= MAX_DEATHS:
                raise FlashGRPOError(
                    f"{died} workers in a row have died over it at the same place: see what they "
                    "last said (out of memory?), and queue it again with smaller settings"
                )
            config = job_config(job, self.output, self.models)
            if list_checkpoints(folder.checkpoints):
                folder.write_config(adopt_moved_files(folder.config(), config))
            else:
                preflight(config)
                folder.write_config(config)
            self.control.note(f"job {taken.entry.name}: run {job.run}")
            tell(self.world, {"config": to_tables(config), "embeddings": job.embeddings})
            control = JobControl(taken.entry, config, self.heart, self.control)
            return {"status": self._run(config, job.embeddings, control)}
        except LostLease:
            raise
        except Exception as exc:
            if self.control.stop_requested:
                raise Released("the worker was asked to end") from None
            log.debug("job %s", taken.entry.name, exc_info=True)
            return {"status": "failed", "reason": _reason(exc, job)}

    def _train_along(self, order: dict[str, Any]) -> None:
        """Train with the main process."""
        try:
            self._run(
                build_config(order["config"]), order["embeddings"], TerminalControl(quiet=True)
            )
        except Exception as exc:
            # The main process hears of it, and ends the job.
            log.warning("process %d: %s", self.world.rank, words(exc))
        finally:
            _forget(self._threads)

    def _run(self, config: Config, embeddings: str, control: TerminalControl) -> str:
        """Train; returns how it ended."""
        control.offload = config.model.offload
        config.model.shard |= self.shard
        # What the ranks of one job have said to each other is of no concern to the next.
        world = World(self.world.rank, self.world.size, self.world.device, self.world.local_rank)
        ready = None
        try:
            if embeddings:
                path = RunFolder(self.output, config.run.name).path / embeddings
                texts = needed_texts(config, build_prompts(config))
                ready = ReadyEmbeddings(path, texts, text_tokens(with_embedded_files(config)))
        except Exception:
            world.leave(failed=True)
            raise
        return train(config, control, world=world, embeddings=ready).status


def tell(world: World, message: dict[str, Any] | None) -> dict[str, Any]:
    """Let all processes know what the main one says.

    Args:
        world: the processes.
        message: plain JSON, on the main process.
    """
    if world.size == 1:
        return message or {}
    data = json.dumps(message).encode() if world.is_main else b""
    length = int(world.sum_array(np.array([float(len(data))]))[0])
    numbers = np.zeros(length)
    if world.is_main:
        numbers[:] = np.frombuffer(data, np.uint8)
    return json.loads(world.sum_array(numbers).astype(np.uint8).tobytes())


def _reason(exc: Exception, job: Job) -> str:
    """Why a job failed, in one line."""
    other = f" (the job is from version {job.version}, this worker is {__version__})"
    return words(exc) + (other if job.version != __version__ else "")


def _forget(threads: int) -> None:
    """Give back what a job has used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    torch.set_num_threads(threads)
