"""`flashgrpo reward-server`: any reward behind HTTP, for trainers that cannot load it themselves."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from .. import __version__
from ..errors import FlashGRPOError
from ..rewards.mix import RewardMix
from .protocol import (
    CONTENT_TYPE,
    HEALTH_PATH,
    SCORE_PATH,
    VERSION,
    Limits,
    RequestError,
    pack_answer,
    unpack_request,
)
from .scheduler import Scheduler

try:
    from aiohttp import web
except ImportError:
    raise FlashGRPOError(
        "the reward server needs the package aiohttp: pip install 'flashgrpo[server]'"
    ) from None

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Shortest token; it is the only thing between a network and the GPU.
MIN_TOKEN = 16


@dataclass(frozen=True)
class ServerSettings:
    """How a server listens and what it accepts.

    Attributes:
        host: address to listen on.
        port: port; 0 takes a free one.
        token: what clients must show; required unless `host` is a loopback address.
        limits: size of requests.
        queue: requests that may wait for their scores.
        batch: videos scored together, from requests that wait together.
        score_timeout: seconds a request may take until its scores are there.
        read_timeout: seconds a client may take to send a request.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default="", repr=False)
    limits: Limits = field(default_factory=Limits)
    queue: int = 16
    batch: int = 8
    score_timeout: float = 600.0
    read_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.token and len(self.token) < MIN_TOKEN:
            raise FlashGRPOError(
                f"the token has {len(self.token)} characters: it needs at least {MIN_TOKEN}"
            )
        if not self.token and not is_loopback(self.host):
            raise FlashGRPOError(
                f"--host {self.host!r} can be reached from other machines: give a --token-file, "
                "or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RewardServer:
    """The HTTP side: checks who asks for what, and hands it to the scheduler.

    Args:
        rewards: the served rewards by name, each as a mix of one term with `on_nan="mask"`.
        settings: how it listens and what it accepts.
    """

    def __init__(self, rewards: dict[str, RewardMix], settings: ServerSettings) -> None:
        self.settings = settings
        self.scheduler = Scheduler(rewards, settings.queue, settings.batch, settings.score_timeout)
        self._receiving = 0  # bytes of requests that are being read or scored

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(
            middlewares=[self._errors, self._authorise],
            client_max_size=self.settings.limits.bytes,
        )
        app.router.add_post(SCORE_PATH, self._score)
        app.router.add_get(HEALTH_PATH, self._health)
        app.cleanup_ctx.append(self._scoring)
        return app

    async def _scoring(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self.scheduler.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self.scheduler.close()

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every failure in JSON with one line; no request ends the server."""
        try:
            return await handler(request)
        except RequestError as exc:
            headers = {}
            if exc.retry_after is not None:
                headers["Retry-After"] = f"{exc.retry_after:.0f}"
            return _failure(exc.status, str(exc), headers)
        except web.HTTPException as exc:
            return _failure(exc.status, exc.reason)
        except Exception as exc:
            log.exception("unexpected failure of %s", request.path)
            return _failure(500, f"unexpected {type(exc).__name__}: see the server's log")

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = self.settings.token
        if token:
            kind, _, shown = request.headers.get("Authorization", "").partition(" ")
            right = hmac.compare_digest(shown.strip().encode(), token.encode())
            if kind.lower() != "bearer" or not right:
                raise RequestError(401, "the token is missing or wrong")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        limits = self.settings.limits
        return web.json_response(
            {
                "status": "ok",
                "version": __version__,
                "protocol": VERSION,
                "rewards": list(self.scheduler.rewards),
                "waiting": self.scheduler.waiting,
                "busy_seconds": round(self.scheduler.busy_seconds, 3),
                "scored": self.scheduler.scored,
                "failed": self.scheduler.failed,
                "limits": vars(limits),
                "memory": _memory(),
            }
        )

    async def _score(self, request: web.Request) -> web.Response:
        size, limit = request.content_length, self.settings.limits.bytes
        if request.content_type != CONTENT_TYPE:
            raise RequestError(415, f"the content type must be {CONTENT_TYPE}")
        if size is None:
            raise RequestError(411, "the request must say its Content-Length")
        if size > limit:
            raise RequestError(413, f"the request has {size} bytes: at most {limit}")
        # Before the body is read: what waits must fit into memory.
        self.scheduler.admit()
        if self._receiving and self._receiving + size > 2 * limit:
            raise RequestError(503, "too many requests are being received", retry_after=1.0)
        self._receiving += size
        try:
            return await self._answer(request)
        finally:
            self._receiving -= size

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(self.settings.read_timeout):
                data = await request.read()
        except TimeoutError:
            raise RequestError(
                408, f"the request did not arrive within {self.settings.read_timeout:g} s"
            ) from None
        loop = asyncio.get_running_loop()
        wanted = await loop.run_in_executor(None, unpack_request, data, self.settings.limits)
        del data
        served = self.scheduler.rewards
        name = wanted.reward or next(iter(served))
        if name not in served or (not wanted.reward and len(served) > 1):
            raise RequestError(
                404, f"reward {wanted.reward[:80]!r} is not served here: {', '.join(served)}"
            )
        values = await self.scheduler.score(
            name, wanted.batch, lambda: request.transport is None or request.transport.is_closing()
        )
        return web.json_response(pack_answer(wanted, values, f"flashgrpo {__version__}"))


def _failure(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    text = json.dumps({"error": message})
    response = web.Response(
        status=status, text=text, content_type="application/json", headers=headers
    )
    if status in (400, 401, 408, 411, 413, 415):
        # What is left of such a request is not worth reading.
        response.force_close()
    return response


def _memory() -> dict[str, int]:
    """Free and total bytes of the GPU, where there is one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"free": free, "total": total}


async def start(
    rewards: dict[str, RewardMix], settings: ServerSettings
) -> tuple[web.AppRunner, int]:
    """Listen; returns the runner (call `cleanup` to end) and the port.

    Raises:
        FlashGRPOError: the address or port cannot be used.
    """
    server = RewardServer(rewards, settings)
    runner = web.AppRunner(server.application(), access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as exc:
        await runner.cleanup()
        raise FlashGRPOError(
            f"cannot listen on {settings.host}:{settings.port} ({exc.strerror or exc}): choose "
            "another --port or --host"
        ) from None
    return runner, int(runner.addresses[0][1])


async def serve(
    rewards: dict[str, RewardMix], settings: ServerSettings, ready: Callable[[str], Any]
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        rewards: see `RewardServer`.
        settings: see `RewardServer`.
        ready: called with the server's address once it listens.
    """
    runner, port = await start(rewards, settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises instead
            loop.add_signal_handler(number, stop.set)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    ready(f"http://{host}:{port}")
    try:
        await stop.wait()
    finally:
        await runner.cleanup()
