"""`events.jsonl` and `rewards.jsonl`: append-only logs that survive a crash at any byte.

Every chart and every resume decision is drawn from these files, so a record is on the disk before
`append` returns, and a line that a crash cut short is repaired when the log is opened again.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import fence
from ..errors import FlashGRPOError

log = logging.getLogger(__name__)

#: Version of the event format, written in `run_started`; the format is only ever extended.
SCHEMA = 1

_BLOCK = 1 << 16


def utc_now() -> str:
    """The current time as UTC ISO 8601 with milliseconds, e.g. `2026-05-15T08:30:00.125Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def jsonable(value: Any) -> Any:
    """`value` in plain JSON types: NaN and infinities become None, arrays become lists.

    Raises:
        FlashGRPOError: a value has no JSON form.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, tensors
        return jsonable(value.tolist())
    raise FlashGRPOError(
        f"a log record cannot hold {type(value).__name__}: convert it to JSON types"
    )


def _append_text(path: Path, text: str) -> None:
    """Append `text` with one write and fsync it."""
    fence.check(path)
    try:
        handle = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644
        )
        try:
            # After opening: who takes a run over replaces the file behind this handle.
            fence.check(path)
            start = os.fstat(handle).st_size
            data = memoryview(text.encode("utf-8"))
            try:
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
            except OSError:
                # A full disk took part of it: the next record must not continue that line.
                os.truncate(handle, start)
                raise
        finally:
            os.close(handle)
    except OSError as exc:
        raise FlashGRPOError(
            f"{str(path)!r} cannot be written: {exc.strerror or exc}; free disk space or check "
            "permissions, then resume"
        ) from exc


def repair(path: Path) -> bool:
    """Make the log end with a complete line again after a crash; True when it was changed.

    A last line without its line break is completed when it is whole JSON, else cut off.
    """
    try:
        with open(path, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            start, tail = end, b""
            while start > 0 and b"\n" not in tail:
                step = min(_BLOCK, start)
                start -= step
                file.seek(start)
                tail = file.read(step) + tail
            rest = tail[tail.rfind(b"\n") + 1 :]
            if not rest:
                return False
            fence.check(path)
            if _parse(rest) is not None:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            else:
                file.truncate(end - len(rest))
            file.flush()
            os.fsync(file.fileno())
            return True
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise FlashGRPOError(
            f"{str(path)!r} cannot be repaired: {exc.strerror or exc}; check permissions"
        ) from exc


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, UnicodeDecodeError):
        return None
    return record if isinstance(record, dict) else None


class EventLog:
    """Appends records to `events.jsonl`. One process writes; any number may read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if repair(self.path):
            log.warning("%s ended in a torn line from a crash: repaired", self.path)

    def append(self, event: str, iteration: int, **fields: Any) -> dict[str, Any]:
        """Write one event and return the record as it stands in the file.

        Args:
            event: kind, e.g. `iteration`, `phase`, `evaluation`, `warning`.
            iteration: iteration it belongs to, 0 before the first.
            **fields: further JSON-able values; NaN becomes null.

        Raises:
            FlashGRPOError: the disk is full or the file cannot be written.
        """
        record = {"event": event, "iteration": int(iteration), "time": utc_now()}
        record |= jsonable(fields)
        _append_text(self.path, json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        return record


class RewardLog:
    """Appends one line per rollout to `rewards.jsonl`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if repair(self.path):
            log.warning("%s ended in a torn line from a crash: repaired", self.path)

    def append(self, iteration: int, rows: Iterable[dict[str, Any]]) -> None:
        """Write the rows of one iteration with one write and one fsync.

        Args:
            iteration: the iteration all rows belong to.
            rows: tables with group_id, prompt, sample, sde_step, sigma, total, terms, advantage,
                valid.
        """
        lines = [
            json.dumps(
                {"iteration": int(iteration)} | jsonable(row), ensure_ascii=False, allow_nan=False
            )
            for row in rows
        ]
        if lines:
            _append_text(self.path, "\n".join(lines) + "\n")


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """All records of a JSON-lines log; an empty list when the file does not exist.

    A torn last line is left out. Damage before the end is left out too, and logged.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            log.warning("%s line %d is not a JSON object and was left out", path, number)
    return records


def read_from(path: str | Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The records that were appended behind `offset`, and the offset behind the last of them.

    Only whole lines are read. When the log has become shorter, its torn end was cut off after a
    crash, and reading goes on there.
    """
    try:
        with open(path, "rb") as file:
            offset = min(offset, file.seek(0, os.SEEK_END))
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    records = [_parse(line) for line in whole.split(b"\n") if line.strip()]
    return [record for record in records if record is not None], offset + len(whole)


def latest(events: Iterable[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """The last record per (event, iteration): after a resume an iteration can appear twice."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for record in events:
        key = (str(record.get("event")), int(record.get("iteration") or 0))
        found.pop(key, None)  # the order follows the last record, not the first
        found[key] = record
    return found


def latest_each(
    events: Iterable[Mapping[str, Any]], event: str, *fields: str
) -> list[dict[str, Any]]:
    """The last record of kind `event` per (iteration, *fields), in order of iteration.

    For kinds of which one iteration has several, such as `evaluation` (split, weights) and
    `phase` (name).
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in events:
        if record.get("event") == event:
            key = (int(record.get("iteration") or 0), *(str(record.get(f)) for f in fields))
            found[key] = dict(record)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


def term_curves(events: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Mean of each reward term over the training rollouts, as (iteration, value) by label.

    A win rate whose compared value is there too is left out: its mean is always 0.5.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in latest_each(events, "iteration"):
        for name, value in ((record.get("reward") or {}).get("terms") or {}).items():
            if isinstance(value, (int, float)):
                curves.setdefault(name, []).append((int(record["iteration"]), float(value)))
    return {n: c for n, c in curves.items() if n.removesuffix(".win_rate") not in {*curves} - {n}}


def read_rewards(path: str | Path) -> list[dict[str, Any]]:
    """All rows of `rewards.jsonl`, the last one per (iteration, group, sample)."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in read_events(path):
        found[(row.get("iteration"), row.get("group_id"), row.get("sample"))] = row
    return list(found.values())


def backwards(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a log from the last to the first, reading only as far as is consumed."""
    try:
        with open(path, "rb") as file:
            position, rest = file.seek(0, os.SEEK_END), b""
            while position > 0:
                step = min(_BLOCK, position)
                position -= step
                file.seek(position)
                lines = (file.read(step) + rest).split(b"\n")
                rest = lines[0] if position > 0 else b""
                for line in reversed(lines[1:] if position > 0 else lines):
                    record = _parse(line) if line.strip() else None
                    if record is not None:
                        yield record
    except FileNotFoundError:
        return
