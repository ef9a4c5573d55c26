"""Asking a server: the least busy of several, again when one fails, and never for ever."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
import urllib.parse

from .. import __version__
from ..errors import FlashGRPOError

log = logging.getLogger(__name__)

#: Longest pause of a server that fails or is busy, seconds.
MAX_REST = 30.0
_FIRST_REST = 0.5
#: Longest wait for a connection, seconds: a machine that is off does not answer at all.
_CONNECT = 10.0
_LONGEST_ANSWER = 64 << 20


class ServerFailed(Exception):
    """No server has answered; the message is one line."""


class Stop:
    """Ends requests from another thread: those that wait, and those that are under way."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def now(self) -> None:
        """Stop everything."""
        self.event.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    try:
                        connection.sock.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass  # it has ended by itself

    def watch(self, connection: http.client.HTTPConnection) -> None:
        """Remember an open connection."""
        with self._lock:
            self._open.add(connection)

    def unwatch(self, connection: http.client.HTTPConnection) -> None:
        """Forget it."""
        with self._lock:
            self._open.discard(connection)


class _Server:
    """One address: how busy it is, and until when it is left alone."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self.url = url
        self.secure = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port
        self.path = parts.path
        self.in_flight = 0
        self.failures = 0
        self.rest_until = 0.0

    def connection(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout)


class ServerPool:
    """Equal servers behind one name. Thread-safe.

    Args:
        urls: their addresses.
        token: what they ask for, or empty.
        timeout: seconds without a byte after which a request has failed.
        attempts: how often a request may fail (no connection, an answer of 500 or above) before it
            is given up. After that, and until a server has answered again, requests have one try.
        patience: seconds after which a request is given up, however often a server was busy.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        token: str = "",
        timeout: float = 300.0,
        attempts: int = 4,
        patience: float = 1800.0,
    ) -> None:
        self.servers = [_Server(url) for url in urls]
        self.token = token
        self.timeout = timeout
        self.attempts = attempts
        self.patience = patience
        self._lock = threading.Lock()
        self._down = False

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        content_type: str = "application/json",
        stop: Stop | None = None,
    ) -> bytes:
        """Send a request to a server and return the body of its answer.

        Raises:
            ServerFailed: no server has answered in the attempts and time there are, or `stop`.
            FlashGRPOError: a server has refused the request (4xx): asking again would not help.
        """
        stop = stop or Stop()
        end, failures, reason = time.monotonic() + self.patience, 0, ""
        while True:
            server, wait = self._take()
            if wait > 0 and (stop.event.wait(min(wait, 1.0)) or time.monotonic() > end):
                self._release(server)
                break
            if wait > 0:
                self._release(server)
                continue
            try:
                status, pause, data = self._send(server, method, path, body, content_type, stop)
            except (OSError, http.client.HTTPException) as exc:
                status, pause, data = 599, None, b""
                reason = f"{server.url}: {type(exc).__name__}: {exc}"
            finally:
                self._release(server)
            if status == 200:
                server.failures, self._down = 0, False
                return data
            if status != 599:
                reason = f"{server.url} answers {status}: {_reason(data)}"
            if stop.event.is_set():
                break
            if status in (429, 503):  # busy is no failure
                server.rest_until = time.monotonic() + min(pause or _FIRST_REST, MAX_REST)
            elif status >= 500:
                failures += 1
                server.failures += 1
                rest = min(_FIRST_REST * 2 ** (server.failures - 1), MAX_REST)
                server.rest_until = time.monotonic() + rest
                if failures >= (1 if self._down else self.attempts):
                    break
            else:
                raise FlashGRPOError(_refused(server.url, status, _reason(data)))
            log.info("%s; trying again", reason)
            if time.monotonic() > end:
                break
        if stop.event.is_set():
            raise ServerFailed("stopped")
        self._down = True
        raise ServerFailed(reason or f"{self.servers[0].url} was busy for {self.patience:.0f} s")

    def _take(self) -> tuple[_Server, float]:
        """The server to ask, counted as busy, and how long it still rests (0 when it does not)."""
        with self._lock:
            now = time.monotonic()
            server = min(
                self.servers, key=lambda s: (max(s.rest_until - now, 0.0), s.in_flight, s.failures)
            )
            server.in_flight += 1
            # When all have failed for long, there is nothing to be spared by waiting.
            return server, 0.0 if self._down else max(server.rest_until - now, 0.0)

    def _release(self, server: _Server) -> None:
        with self._lock:
            server.in_flight -= 1

    def _send(
        self, server: _Server, method: str, path: str, body: bytes, content_type: str, stop: Stop
    ) -> tuple[int, float | None, bytes]:
        """Status, pause that the server asks for, and body of the answer."""
        headers = {"User-Agent": f"flashgrpo/{__version__}", "Content-Type": content_type}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        connection = server.connection(min(self.timeout, _CONNECT))
        stop.watch(connection)
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout)
            if stop.event.is_set():
                raise ConnectionAbortedError("stopped")
            try:
                connection.request(method, server.path + path, body or None, headers)
            except (BrokenPipeError, ConnectionResetError):
                # A server that refuses a request need not read it; its answer may be there.
                pass
            response = connection.getresponse()
            data = response.read(_LONGEST_ANSWER)
            return response.status, _seconds(response.getheader("Retry-After")), data
        finally:
            stop.unwatch(connection)
            connection.close()


def _seconds(text: str | None) -> float | None:
    try:
        return max(float(text or ""), 0.1)
    except ValueError:
        return None


def _reason(data: bytes) -> str:
    """One line of an error answer, ours or an OpenAI-compatible server's."""
    try:
        error = json.loads(data)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        text = data[:200].decode("utf-8", "replace")
    return " ".join(str(text).split())[:300] or "no reason given"


def _refused(url: str, status: int, reason: str) -> str:
    fix = "correct the request"
    if status in (401, 403):
        fix = "put the server's token into the servers file (or token_file)"
    elif status == 404:
        fix = "start the server with that --reward, or name one that it serves"
    elif status == 413:
        fix = "raise the limits of the server, or lower rollout.frames or the size"
    return f"reward server {url} refuses the request ({status}): {reason}: {fix}"
