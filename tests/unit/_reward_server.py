"""Real reward servers as child processes, and hostile clients for them."""

from __future__ import annotations

import http.client
import json
import pickle
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from typing import Any

import numpy as np
import safetensors.numpy

from flashgrpo_core.rewards import VideoBatch
from flashgrpo_core.served.protocol import (
    CONTENT_TYPE,
    SCORE_PATH,
    ScoreRequest,
    pack_request,
)


class ServerProcess:
    """`flashgrpo reward-server` on a free loopback port.

    Args:
        *arguments: its arguments; default the reward `brightness`.
        script: a program to run in its place, which calls the same command line.
    """

    def __init__(self, *arguments: str, script: str = "", port: int = 0) -> None:
        program = ["-c", script] if script else ["-m", "flashgrpo_core"]
        words = [*arguments] if "--reward" in arguments else ["--reward", "brightness", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, *program, "reward-server", "--port", str(port), *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.log: list[str] = []

    def __enter__(self) -> ServerProcess:
        """Wait until it listens; several that were made before start at the same time."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving .* on (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.log))
        # What it writes later must be read, or a full pipe would stop it.
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        self.port = urllib.parse.urlsplit(self.url).port
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(
        self,
        body: Any,
        content_type: str = CONTENT_TYPE,
        path: str = SCORE_PATH,
        token: str = "",
        method: str = "POST",
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": content_type} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def health(self, token: str = "") -> dict[str, Any]:
        status, answer = self.ask(b"", path="/v1/health", token=token, method="GET")
        assert status == 200, answer
        return answer


def clips(count: int, seed: int = 0, frames: int = 5, size: int = 32) -> VideoBatch:
    """Random videos of different brightness."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 100, (count, frames, size, size, 3))
    level = rng.integers(0, 155, (count, 1, 1, 1, 1))
    videos = (noise + level).astype(np.uint8)
    return VideoBatch(videos, [f"prompt {i}" for i in range(count)], 8.0, ["g"] * count)


def request_bytes(batch: VideoBatch, reward: str = "", encoding: str = "safetensors") -> bytes:
    return pack_request(ScoreRequest([f"v{i}" for i in range(len(batch))], reward, batch), encoding)


def raw_request(head: Any, body: bytes = b"") -> bytes:
    """A request with any head."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return b"FGRW" + struct.pack("<I", len(text)) + text + body


class Exploit:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def bad_requests(mark: str) -> dict[str, tuple[bytes, int, str]]:
    """Requests that are wrong: bytes, expected status, part of the reason.

    Args:
        mark: file that must not exist afterwards: unpickling makes it.
    """
    batch = clips(2)
    good = request_bytes(batch)
    size = struct.unpack("<I", good[4:8])[0]
    head, body = json.loads(good[8 : 8 + size]), good[8 + size :]

    def changed(**fields: Any) -> bytes:
        return raw_request({**head, **fields}, body)

    def tensors(**arrays: np.ndarray) -> bytes:
        return raw_request(head, safetensors.numpy.save(arrays))

    videos = batch.videos
    one = [{**head["videos"][0]}]
    return {
        "empty": (b"", 400, "no score request"),
        "pickle": (pickle.dumps(Exploit(mark)), 400, "no score request"),
        "pickle inside": (raw_request(head, pickle.dumps(Exploit(mark))), 400, "safetensors"),
        "text": (b"hello, are you there?", 400, "no score request"),
        "head too long": (b"FGRW" + struct.pack("<I", 2**31) + b"{}", 400, "head has"),
        "head is no JSON": (raw_request(b"{]"), 400, "no JSON"),
        "head with NaN": (raw_request(b'{"version": NaN}'), 400, "no JSON"),
        "head nested too deep": (raw_request(b"[" * 200_000), 400, "no JSON"),
        "head is a list": (raw_request([1]), 400, "object"),
        "other version": (changed(version=2), 400, "version 2"),
        "no videos": (changed(videos=[]), 400, "at least one"),
        "fewer videos": (changed(videos=one), 400, "names 1 videos"),
        "equal ids": (changed(videos=[head["videos"][0]] * 2), 400, "same id"),
        "id is a number": (changed(videos=[{**one[0], "id": 3}] * 2), 400, "id in the head"),
        "endless prompt": (
            changed(videos=[{**one[0], "prompt": "a" * 30_000}, head["videos"][1]]),
            400,
            "prompt in the head",
        ),
        "too many videos": (changed(videos=[{"id": str(i)} for i in range(99)]), 413, "at most"),
        "unknown reward": (changed(reward="beauty"), 404, "brightness"),
        "fps is text": (changed(fps="fast"), 400, "fps"),
        "unknown encoding": (changed(encoding="pickle"), 400, "encoding"),
        "body cut off": (good[:-10], 400, "safetensors"),
        "no tensor": (tensors(other=videos), 400, "'videos' is missing"),
        "floats": (tensors(videos=videos.astype(np.float32)), 400, "uint8"),
        "further tensor": (tensors(videos=videos, x=videos), 400, "unknown tensor"),
        "too many frames": (tensors(videos=np.zeros((2, 99, 2, 2, 3), np.uint8)), 413, "frames"),
        "frames too large": (
            tensors(videos=np.zeros((2, 1, 600, 600, 3), np.uint8)),
            413,
            "pixels",
        ),
        "mp4 sizes": (changed(encoding="mp4"), 400, "add up"),
        "no mp4": (
            raw_request(
                {**head, "encoding": "mp4", "videos": [{**one[0], "bytes": 9}]}, b"#EXTM3U\n/"
            ),
            400,
            "no readable mp4",
        ),
    }


LIMITS = ("--max-frames", "64", "--max-pixels", "262144", "--max-megabytes", "8")


def slow_client(port: int, seconds: float) -> None:
    """Announces a request and sends a byte now and then."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds + 30) as connection:
        connection.sendall(
            f"POST {SCORE_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: {CONTENT_TYPE}\r\n"
            "Content-Length: 100000\r\n\r\n".encode()
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                connection.sendall(b"F")
            except OSError:
                return
            time.sleep(0.2)


def cut_off_client(port: int, body: bytes) -> None:
    """Sends half of what it announced, and is gone."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(
            f"POST {SCORE_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: {CONTENT_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body[: len(body) // 2]
        )
