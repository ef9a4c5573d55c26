"""What a reward server and its clients say to each other: JSON heads and binary bodies, no pickle.

A request is `MAGIC`, the length of the head (uint32, little endian), the head (JSON, UTF-8) and the
body. The head names the videos one by one; the body is one safetensors file with the tensor
`videos` (uint8 `[B, T, H, W, 3]`) and for each start image `start_images.<index>` (uint8
`[H, W, 3]`), or the mp4 files of all videos one behind the other. The answer is JSON. The whole
format is written down in `docs/reward_server.md`.
"""

from __future__ import annotations

import io
import json
import math
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ..errors import FlashGRPOError
from ..rewards.batch import VideoBatch
from ..video import av, write_mp4

#: Version of the format; a server answers requests of its own version only.
VERSION = 1
MAGIC = b"FGRW"
CONTENT_TYPE = "application/vnd.flashgrpo.score"
ENCODINGS = ("safetensors", "mp4")
SCORE_PATH = "/v1/score"
HEALTH_PATH = "/v1/health"

_HEAD_BYTES = 1 << 20
_PROMPT_CHARACTERS = 20_000
_ID_CHARACTERS = 200


@dataclass(frozen=True)
class Limits:
    """What a request may ask of a server.

    Attributes:
        bytes: size of a request.
        videos: videos in a request.
        frames: frames of a video.
        pixels: width times height of a frame.
    """

    bytes: int = 512 << 20
    videos: int = 64
    frames: int = 1025
    pixels: int = 4096 * 2304


class RequestError(Exception):
    """A request that is answered with a reason instead of scores.

    Args:
        status: HTTP status.
        message: one line: what is wrong and what is allowed.
        retry_after: seconds after which the same request may be sent again, or None.
    """

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """A request: ids of the `B` videos, the wanted reward (empty: the only one), the videos."""

    ids: list[str]
    reward: str
    batch: VideoBatch


def pack_request(request: ScoreRequest, encoding: str = "safetensors") -> bytes:
    """The bytes of a request.

    Args:
        request: the videos.
        encoding: `safetensors` (exact) or `mp4` (about a fiftieth of the size; H.264 changes the
            pixels a little, and start images are not sent).
    """
    batch = request.batch
    videos: list[dict[str, Any]] = [
        {"id": id_, "prompt": prompt, "group": group}
        for id_, prompt, group in zip(request.ids, batch.prompts, batch.group_ids, strict=True)
    ]
    if encoding == "mp4":
        body = b""
        for entry, video in zip(videos, batch.videos, strict=True):
            with tempfile.TemporaryDirectory(prefix="flashgrpo-") as folder:
                data = write_mp4(Path(folder) / "video.mp4", video, batch.fps).read_bytes()
            entry["bytes"] = len(data)
            body += data
    else:
        tensors = {"videos": batch.videos}
        for index, image in enumerate(batch.start_images or []):
            if image is not None:
                tensors[f"start_images.{index}"] = image
        body = safetensors.numpy.save(tensors)
    head = {
        "version": VERSION,
        "reward": request.reward,
        "fps": batch.fps,
        "encoding": encoding,
        "videos": videos,
    }
    text = json.dumps(head, ensure_ascii=False).encode("utf-8")
    return b"".join((MAGIC, struct.pack("<I", len(text)), text, body))


def unpack_request(data: bytes, limits: Limits) -> ScoreRequest:
    """Read a request; nothing in it is trusted.

    Raises:
        RequestError: it is not one, or breaks a limit.
    """
    if data[:4] != MAGIC or len(data) < 8:
        raise RequestError(400, f"this is no score request: it must begin with {MAGIC.decode()!r}")
    (size,) = struct.unpack("<I", data[4:8])
    if size > min(_HEAD_BYTES, len(data) - 8):
        raise RequestError(400, f"the head has {size} bytes: {_HEAD_BYTES} at most, and all sent")
    head = _head(data[8 : 8 + size])
    if head.get("version") != VERSION:
        raise RequestError(
            400,
            f"protocol version {head.get('version')!r:.40} is unknown: this server has {VERSION}",
        )
    entries = head.get("videos")
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise RequestError(400, "videos in the head must be a list of at least one table")
    if len(entries) > limits.videos:
        raise RequestError(413, f"{len(entries)} videos in a request: at most {limits.videos}")
    ids = [_text(entry, "id", _ID_CHARACTERS) for entry in entries]
    if len(set(ids)) != len(ids):
        raise RequestError(400, "two videos of a request have the same id")
    prompts = [_text(entry, "prompt", _PROMPT_CHARACTERS) for entry in entries]
    groups = [_text(entry, "group", _ID_CHARACTERS) for entry in entries]
    body = memoryview(data)[8 + size :]
    encoding, images = head.get("encoding"), None
    if encoding == "safetensors":
        videos, images = _tensors(bytes(body), len(entries), limits)
    elif encoding == "mp4":
        videos = _mp4s(body, entries, limits)
    else:
        raise RequestError(400, f"encoding {encoding!r:.40} must be one of {', '.join(ENCODINGS)}")
    try:
        batch = VideoBatch(videos, prompts, head.get("fps"), groups, images)  # type: ignore[arg-type]
    except FlashGRPOError as exc:
        raise RequestError(400, str(exc)) from None
    return ScoreRequest(ids, _text(head, "reward", _ID_CHARACTERS), batch)


def _head(raw: bytes) -> dict[str, Any]:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        head = json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as exc:
        raise RequestError(400, f"the head is no JSON: {str(exc)[:100]}") from None
    if not isinstance(head, dict):
        raise RequestError(400, "the head must be a JSON object")
    return head


def _text(table: Mapping[str, Any], key: str, limit: int) -> str:
    value = table.get(key, "")
    if not isinstance(value, str) or len(value) > limit:
        raise RequestError(400, f"{key} in the head must be text of at most {limit} characters")
    return value


def _tensors(
    body: bytes, count: int, limits: Limits
) -> tuple[np.ndarray, list[np.ndarray | None] | None]:
    try:
        tensors = safetensors.numpy.load(body)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as exc:
        raise RequestError(400, f"the body is no safetensors file: {str(exc)[:100]}") from None
    videos = tensors.pop("videos", None)
    if videos is None or videos.dtype != np.uint8 or videos.ndim != 5:
        raise RequestError(400, "the tensor 'videos' is missing or not uint8 [B, T, H, W, 3]")
    if len(videos) != count:
        raise RequestError(400, f"the head names {count} videos, the body holds {len(videos)}")
    _check_size(videos.shape[1], videos.shape[3], videos.shape[2], limits)
    if not tensors:
        return videos, None
    images: list[np.ndarray | None] = [None] * count
    for name, image in tensors.items():
        prefix, _, index = name.partition(".")
        if prefix != "start_images" or not index.isascii() or not index.isdecimal():
            raise RequestError(400, f"the body holds an unknown tensor {name[:40]!r}")
        if len(index) > 6 or int(index) >= count:
            raise RequestError(400, f"{name[:40]!r} belongs to none of the {count} videos")
        if image.ndim == 3:
            _check_size(1, image.shape[1], image.shape[0], limits)
        images[int(index)] = image
    return videos, images


def _mp4s(body: memoryview, entries: Sequence[Mapping[str, Any]], limits: Limits) -> np.ndarray:
    sizes = [s for e in entries if isinstance(s := e.get("bytes"), int) and s > 0]
    if len(sizes) != len(entries) or sum(sizes) != len(body):
        raise RequestError(400, "the sizes (bytes) of the mp4 files do not add up to the body")
    videos: list[np.ndarray] = []
    start, room = 0, limits.bytes
    for size in sizes:
        videos.append(_mp4(bytes(body[start : start + size]), limits, room))
        start, room = start + size, room - videos[-1].nbytes
    if len({video.shape for video in videos}) != 1:
        raise RequestError(400, "the videos of a request must have one size and length")
    return np.stack(videos)


def _mp4(data: bytes, limits: Limits, room: int) -> np.ndarray:
    """Decode an mp4 without trusting what it says about itself, into at most `room` bytes."""
    if av is None:
        raise RequestError(400, "this server cannot read mp4 (the package av is missing)")
    frames: list[np.ndarray] = []
    try:
        # The format is named: FFmpeg would also open a playlist, which leads to other files.
        with av.open(io.BytesIO(data), format="mp4") as container:
            stream = container.streams.video[0]
            _check_size(1, stream.width, stream.height, limits)
            for frame in container.decode(stream):
                _check_size(len(frames) + 1, frame.width, frame.height, limits)
                room -= 3 * frame.width * frame.height
                if room < 0:
                    raise RequestError(413, f"the decoded videos exceed {limits.bytes} bytes")
                frames.append(frame.to_ndarray(format="rgb24"))
    except (OSError, ValueError, RuntimeError, IndexError, av.FFmpegError) as exc:
        raise RequestError(400, f"a video is no readable mp4: {str(exc)[:100]}") from None
    if not frames or len({frame.shape for frame in frames}) != 1:
        raise RequestError(400, "a video has no frames, or frames of different sizes")
    return np.stack(frames)


def _check_size(frames: int, width: int, height: int, limits: Limits) -> None:
    if frames > limits.frames:
        raise RequestError(413, f"a video has {frames} frames or more: at most {limits.frames}")
    if width * height > limits.pixels:
        raise RequestError(
            413, f"a frame has {width}x{height} pixels: at most {limits.pixels} in all"
        )


def pack_answer(
    request: ScoreRequest, values: Mapping[str, np.ndarray], server: str
) -> dict[str, Any]:
    """The answer: all values of each video by its id; what is not finite is null."""
    return {
        "version": VERSION,
        "server": server,
        "results": [
            {
                "id": id_,
                "values": {
                    key: float(value[i]) if math.isfinite(value[i]) else None
                    for key, value in values.items()
                },
            }
            for i, id_ in enumerate(request.ids)
        ],
    }


def unpack_answer(data: bytes, ids: Sequence[str], reward: str) -> dict[str, np.ndarray]:
    """The values of the videos in the order of `ids`, float64 `[B]` each; null becomes NaN.

    Args:
        data: the answer.
        ids: ids of the request.
        reward: the reward that was asked for; empty takes the one that was served.

    Returns:
        Values by key; the reward's own value has the key ``""``, its parts their name.

    Raises:
        ValueError: it is no answer to this request.
    """
    answer = json.loads(data)
    rows = {row["id"]: row["values"] for row in answer["results"]}
    if set(rows) != set(ids):
        raise ValueError("the answer holds other ids than the request")
    first = rows[ids[0]]
    name = reward or min(first, key=len)
    if name not in first:
        raise ValueError(f"the answer holds no value of {name!r}")
    values = {}
    for key in first:
        if key == name or key.startswith(name + "."):
            column = [rows[id_][key] for id_ in ids]
            numbers = [math.nan if v is None else float(v) for v in column]
            values[key[len(name) + 1 :]] = np.array(numbers, dtype=np.float64)
    return values
