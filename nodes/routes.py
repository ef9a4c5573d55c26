"""Read-only routes for the live monitor: what a run's own files say.

State lives in the run folder, so a monitor that opens after a page refresh, or in another browser,
sees the same. Names from a request are looked up among the runs on disk and never become a path.
The one route that is not read-only sets a flag in memory: finish after this iteration.
"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

from aiohttp import web

from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.files import resolve_inside
from ..flashgrpo_core.runs.events import backwards, latest_each, read_events, term_curves
from ..flashgrpo_core.runs.folder import RunFolder, list_runs
from ..flashgrpo_core.video import filmstrip, read_video
from . import host
from .progress import training
from .workers import elsewhere

#: Warnings that a monitor shows, newest last.
_SHOWN_WARNINGS = 5


def register() -> None:
    """Add the routes."""
    host.add_route("GET", "/flashgrpo/runs", _list)
    host.add_route("GET", "/flashgrpo/runs/{name}", _summary)
    host.add_route("GET", "/flashgrpo/runs/{name}/filmstrip", _filmstrip)
    host.add_route("POST", "/flashgrpo/runs/{name}/finish", _finish)


async def _list(request: web.Request) -> web.Response:
    return web.json_response(await asyncio.to_thread(_all_runs))


async def _summary(request: web.Request) -> web.Response:
    folder = await asyncio.to_thread(_find, request.match_info["name"])
    return web.json_response(await asyncio.to_thread(summary, folder))


async def _filmstrip(request: web.Request) -> web.Response:
    folder = await asyncio.to_thread(_find, request.match_info["name"])
    data = await asyncio.to_thread(_newest_strip, folder)
    if data is None:
        raise web.HTTPNotFound(text="no video yet")
    return web.Response(body=data, content_type="image/jpeg")


async def _finish(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    control = training.get(name) or (await asyncio.to_thread(elsewhere, name)).get(name)
    if control is None:
        raise web.HTTPNotFound(text="this run is not training here")
    control.finish_requested = True
    return web.json_response({"finishing": True})


def _find(name: str) -> RunFolder:
    for folder in list_runs(host.output_folder()):
        if folder.name == name:
            return folder
    raise web.HTTPNotFound(text="no such run")


def _all_runs() -> list[dict[str, Any]]:
    rows, others = [], elsewhere()
    for folder in list_runs(host.output_folder()):
        control = training.get(folder.name) or others.get(folder.name)
        try:
            config = folder.config()
            modified = folder.events.stat().st_mtime if folder.events.is_file() else 0.0
            last = next(backwards(folder.events), {})
        except (FlashGRPOError, OSError):
            continue  # a folder from another version or half deleted: not this list's problem
        rows.append(
            {
                "name": folder.name,
                "status": folder.status(),
                "training": control is not None,
                "iteration": last.get("iteration") or 0,
                "iterations": config.run.iterations,
                "mtime": modified,
                "node_id": None if control is None else control.node_id,
            }
        )
    return rows


def summary(folder: RunFolder) -> dict[str, Any]:
    """What the monitor shows of a run."""
    events, config = read_events(folder.events), folder.config()
    control = training.get(folder.name) or elsewhere(folder.name).get(folder.name)
    warnings = [e["message"] for e in events if e["event"] == "warning"]
    if control is not None and control.message:
        warnings.append(control.message)
    validation = [
        [e["iteration"], e["reward_mean"], e["difference"], e["ci_low"], e["ci_high"]]
        for e in latest_each(events, "evaluation", "split")
        if e.get("split") == "validation" and e.get("reward_mean") is not None
    ]
    rewards = [
        [e["iteration"], e["reward"]["mean"]]
        for e in latest_each(events, "iteration")
        if e["reward"]["mean"] is not None
    ]
    return {
        "name": folder.name,
        "status": folder.status(),
        "training": control is not None,
        "iteration": max((e["iteration"] for e in events), default=0),
        "iterations": config.run.iterations,
        "rewards": rewards,
        "terms": term_curves(events),
        "validation": validation,
        "warnings": warnings[-_SHOWN_WARNINGS:],
        "peak_memory": max((e.get("peak_memory") or 0 for e in events), default=0) or None,
        "phase": None if control is None else control.name,
        "phase_done": 0 if control is None else control.done,
        "phase_total": 0 if control is None else control.total,
        "eta": None if control is None else control.eta(),
        "finishing": control is not None and control.finish_requested,
        "node_id": None if control is None else control.node_id,
        "filmstrip": _strip_address(folder),
    }


def _newest_sample(folder: RunFolder) -> Path | None:
    try:
        entries = folder.read_samples()
        newest = max(entries, key=lambda e: (e["iteration"], e["split"] == "validation"))
        return resolve_inside(folder.samples, newest["file"])
    except (FlashGRPOError, ValueError, KeyError, TypeError):
        return None


def _strip_address(folder: RunFolder) -> str | None:
    """Address of the newest video's frames; it changes when the picture does."""
    control = training.get(folder.name)
    sample = _newest_sample(folder)
    if control is not None and control.strip is not None:
        version = str(int(control.strip_time * 1000))
    elif sample is not None and sample.is_file():
        version = str(sample.stat().st_mtime_ns)
    else:
        return None
    return f"/flashgrpo/runs/{folder.name}/filmstrip?v={version}"


def _newest_strip(folder: RunFolder) -> bytes | None:
    control = training.get(folder.name)
    strip = None if control is None else control.strip
    if strip is None:
        sample = _newest_sample(folder)
        if sample is None or not sample.is_file():
            return None
        strip = filmstrip(read_video(sample)[0])
    buffer = io.BytesIO()
    strip.convert("RGB").save(buffer, format="JPEG", quality=88)
    return buffer.getvalue()
