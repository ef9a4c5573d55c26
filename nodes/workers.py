"""Training by workers: a node writes a job, follows the run's own files, and starts nothing itself."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from ..flashgrpo_core import __version__
from ..flashgrpo_core.build import build_prompts, needed_texts
from ..flashgrpo_core.config import Config
from ..flashgrpo_core.config_io import build_config, identity_differences
from ..flashgrpo_core.errors import Cancelled, FlashGRPOError
from ..flashgrpo_core.files import open_tensors
from ..flashgrpo_core.keeping import RunResult, finished_result
from ..flashgrpo_core.lookup import FOLDERS
from ..flashgrpo_core.ready_embeddings import write_embeddings
from ..flashgrpo_core.runs.events import read_from
from ..flashgrpo_core.runs.folder import RunFolder
from ..flashgrpo_core.runs.job import Job, Tables, portable
from ..flashgrpo_core.runs.queue import Entry, Queue, Watch
from . import host
from .embeddings import stored_file
from .progress import TrainControl, training
from .values import Prompts

log = logging.getLogger(__name__)

HERE = "this ComfyUI"
WORKERS = "workers"
#: Seconds between two looks at the run folder.
_LOOK = 0.25
#: Seconds without a heartbeat after which a worker is called silent.
_SILENT = 15.0
#: Seconds in which a living worker is sure to be seen beating.
_UNDECIDED = 4.0


def active_job(run: str) -> Entry | None:
    """The job of a run that waits or is being trained, or None."""
    return Queue(host.output_folder()).active(run)


def train_on_workers(folder: RunFolder, prompts: Prompts, config: Config) -> RunResult:
    """Let a worker train a run and follow it; a job that is there already is followed.

    Args:
        folder: the run.
        prompts: its prompts.
        config: its configuration.

    Returns:
        The result.

    Raises:
        FlashGRPOError: the job failed, or another job of this run is open.
        Cancelled: the user cancelled.
    """
    own = Command()
    tables = portable(config, host.output_folder(), own.name_of)
    if any(
        p.image for part in (prompts.train, prompts.validation, prompts.test) for p in part or ()
    ):
        own.add(host.input_folder())
    control: FollowControl | None = None
    submitted: Entry | None = None
    while (result := finished_result(folder, config)) is None:
        entry = active_job(folder.name)
        if entry is None and submitted is not None:
            raise FlashGRPOError(
                f"job {submitted.name} of run {folder.name!r} ended without a result: see "
                f"{str(folder.events)!r}"
            )
        if entry is None:
            entry = submitted = _submit(folder, prompts, config, tables)
        elif not entry.cancelled():
            _check_same(entry.job(), tables)
        control = FollowControl(config, folder, entry, own)
        training[folder.name] = control
        try:
            end = control.follow()
        except Cancelled:
            entry.cancel()
            raise
        finally:
            training.pop(folder.name, None)
        if end["status"] == "failed":
            raise FlashGRPOError(f"the worker could not train: {end.get('reason') or 'no reason'}")
        if end["status"] == "stopped" and not control.came_cancelled:
            raise Cancelled("cancelled elsewhere")
    return result


def _submit(folder: RunFolder, prompts: Prompts, config: Config, tables: Tables) -> Entry:
    """Write the job, and the prompt embeddings that no worker can make itself."""
    name = ""
    if prompts.folder is not None:
        name = f"embeddings-{prompts.folder.name}.safetensors"
        texts = needed_texts(config, build_prompts(config))
        files = {text: open_tensors(stored_file(prompts.folder, text)) for text in texts}
        write_embeddings(
            folder.path / name,
            texts,
            {text: file.shape("embedding")[0] for text, file in files.items()},
            lambda text: files[text].get("embedding"),
        )
    return Queue(host.output_folder()).submit(__version__, folder.name, tables, name)


def _check_same(job: Job, tables: Tables) -> None:
    """Follow only what is being asked for."""
    changed = identity_differences(_compared(job.config), _compared(tables))
    if changed:
        raise FlashGRPOError(
            f"a worker has run {job.run!r} with other settings ({'; '.join(changed)}): use its "
            "settings, cancel its job, or choose another run name"
        )


def _compared(tables: Tables) -> Config:
    return build_config({**tables, "run": {**tables.get("run", {}), "output": "", "name": "run"}})


class Command:
    """Names of model files for a job, and the command that starts a worker with their folders."""

    def __init__(self) -> None:
        self._folders = [host.models_folder()]

    def name_of(self, kind: str, path: str) -> str:
        """Name of a file below the folder it is listed in.

        Raises:
            FlashGRPOError: it lies in none of ComfyUI's folders.
        """
        folder, name = host.model_place(path)
        known = folder.name in FOLDERS.get(kind, ())
        self.add(folder.parent if known else folder)
        return name

    def add(self, folder: Path) -> None:
        """A folder that the worker must be allowed to read."""
        if folder != host.output_folder() and folder not in self._folders:
            self._folders.append(folder)

    def text(self) -> str:
        """The command."""
        models = " ".join(f'--models "{folder}"' for folder in self._folders)
        return f'flashgrpo worker --runs "{host.output_folder()}" {models}'


class FollowControl(TrainControl):
    """Shows a run that a worker trains as if it were trained here.

    Args:
        config: the run.
        folder: its folder.
        entry: its job.
        command: how a worker is started.
    """

    def __init__(self, config: Config, folder: RunFolder, entry: Entry, command: Command) -> None:
        super().__init__(lambda network: None, config, folder.lora)
        self._folder, self._entry, self._command = folder, entry, command
        self._queue = Queue(host.output_folder())
        self._watch = Watch()
        self._offset = 0
        self._warned = False
        self._shown = ""
        self.came_cancelled = entry.cancelled()
        self.message = ""
        self.name = "wait"

    def follow(self) -> dict[str, Any]:
        """Show what happens until the job has ended; returns its result.

        Raises:
            Cancelled: the user pressed Cancel.
        """
        while True:
            result = self._entry.result()
            self._read_events()
            if result is not None:
                return result
            self.check()
            if not self._entry.path.is_dir():
                raise FlashGRPOError(
                    f"job {self._entry.name} was deleted from the queue: queue the workflow again"
                )
            self._show(self._entry.progress())
            if self.status() != self._shown:
                self._shown = self.status()
                host.show_text(self._shown)
            time.sleep(_LOOK)

    def finish(self) -> bool:
        """Whether the user pressed "Finish now"."""
        if self.finish_requested and not self._entry.finishing():
            self._entry.finish()
        return self.finish_requested

    def status(self) -> str:
        """The text below the node."""
        return self.message or super().status()

    def _read_events(self) -> None:
        records, self._offset = read_from(self._folder.events, self._offset)
        for record in records:
            lora = record["event"] == "lora"
            if not lora or (self._lora_folder / str(record.get("file"))).is_file():
                self.event(record)

    def _show(self, progress: Mapping[str, Any]) -> None:
        self.finish()
        self.message = self._trouble()
        name, total = str(progress.get("phase") or ""), int(progress.get("total") or 0)
        if not name:
            return
        iteration, done = int(progress.get("iteration") or 0), int(progress.get("done") or 0)
        if (name, max(total, 1)) != (self.name, self.total) or done < self.done:
            self.phase(name, total, iteration)
        if done > self.done:
            self.tick(done - self.done)
        self._show_preview()

    def _show_preview(self) -> None:
        try:
            changed = self._entry.preview.stat().st_mtime
            if changed > self.strip_time:
                self.strip = Image.open(io.BytesIO(self._entry.preview.read_bytes())).copy()
                self.strip_time = changed
        except OSError:
            return  # none yet, or being replaced

    def _trouble(self) -> str:
        """Why nothing happens, or an empty text."""
        lease = self._entry.lease()
        if lease is not None and not lease.free:
            silent, _ = self._watch.look(lease.name, lease.read())
            if silent < _SILENT:
                return ""
            who = lease.owner.rpartition(".")[0]
            text = f"worker {who} has been silent for {silent:.0f} s, another one will take over"
        else:
            before = sum(entry.name < self._entry.name for entry in self._queue.open())
            text = f"waiting for a worker, {before} job(s) before this one"
        if self._anyone_alive():
            return text
        if not self._warned:
            self._warned = True
            log.warning("no worker is running; start one with: %s", self._command.text())
        return f"no worker is running; start one with: {self._command.text()}"

    def _anyone_alive(self) -> bool:
        alive = False
        for name, content in self._queue.workers().items():
            silent, beats = self._watch.look(f"workers/{name}", content)
            alive |= silent < (_SILENT if beats else _UNDECIDED)
        return alive


class Elsewhere:
    """A run that a worker trains while no node here follows it, e.g. after a restart of ComfyUI.

    Args:
        entry: its job.
    """

    message = ""
    node_id = None

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        progress = entry.progress()
        self.name = str(progress.get("phase") or "wait")
        self.done, self.total = int(progress.get("done") or 0), int(progress.get("total") or 0)

    def eta(self) -> float | None:
        """Unknown: nobody has measured it here."""
        return None

    @property
    def finish_requested(self) -> bool:
        """Whether "Finish now" was pressed."""
        return self._entry.finishing()

    @finish_requested.setter
    def finish_requested(self, value: bool) -> None:
        self._entry.finish()


def elsewhere(name: str | None = None) -> dict[str, Elsewhere]:
    """Runs with an open job that no node here follows; `name` restricts it to one."""
    found: dict[str, Elsewhere] = {}
    for entry in Queue(host.output_folder()).open():
        try:
            run = entry.job().run
        except FlashGRPOError:
            continue
        if run not in training and name in (None, run):
            found.setdefault(run, Elsewhere(entry))
    return found
