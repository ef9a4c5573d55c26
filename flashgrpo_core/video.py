"""Video files and pictures of videos: mp4 in and out, sheets, strips, before/after.

A video is uint8 RGB `[T, H, W, 3]`. Files are H.264 in mp4, 4:2:0, so that every browser plays
them. PyAV is used where it can be imported (always inside ComfyUI); on a bare command line
imageio-ffmpeg takes its place, which runs ffmpeg as a child process.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from . import fence
from .errors import FlashGRPOError

av: Any
try:
    import av
except ImportError:
    av = None

# What the back ends raise for a bad file, a full disk or a missing codec.
_FAILURES: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError)
if av is not None:
    _FAILURES += (av.FFmpegError,)

#: x264's constant rate factor: 0 is lossless, 23 its default. 14 keeps what a reward would see.
CRF = 14
_PRESET = "medium"

# The fast path of swscale from YUV to RGB is darker by a grey level; these flags (SWS_BICUBIC,
# SWS_ACCURATE_RND, SWS_FULL_CHR_H_INT) take its exact path.
_EXACT_AV = 0x4 | 0x40000 | 0x2000
_EXACT_FFMPEG = ["-sws_flags", "bicubic+accurate_rnd+full_chroma_int"]

_BACKGROUND = (24, 26, 30)
_INK = (235, 235, 235)


def write_mp4(path: str | Path, video: np.ndarray, fps: float, *, crf: int = CRF) -> Path:
    """Write a video; the file appears complete or not at all.

    4:2:0 needs even sizes: an odd width or height is extended by repeating the last column or row.

    Args:
        path: the `.mp4` file; its folder is created.
        video: uint8 `[T, H, W, 3]`.
        fps: frames per second.
        crf: quality, 0 (lossless) to 51.

    Raises:
        FlashGRPOError: a bad video or rate, no encoder, or the file cannot be written.
    """
    path = Path(path)
    video = check_video(video)
    if isinstance(fps, bool) or not math.isfinite(fps) or not 0 < fps <= 1000:
        raise FlashGRPOError(f"fps = {fps!r} for {path.name!r} must be above 0 and at most 1000")
    video = np.pad(
        video, ((0, 0), (0, video.shape[1] % 2), (0, video.shape[2] % 2), (0, 0)), mode="edge"
    )
    temporary = path.with_name(f".{path.stem}.{fence.unique()}.tmp.mp4")
    encode = _encode_av if av is not None else _encode_ffmpeg
    fence.check(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        encode(temporary, video, fps, crf)
        fence.check(path)
        os.replace(temporary, path)
    except _FAILURES as exc:
        raise FlashGRPOError(
            f"video {str(path)!r} cannot be written: {_one_line(exc)}: check free space and access"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_video(path: str | Path, max_frames: int | None = None) -> tuple[np.ndarray, float]:
    """Read a video file.

    Args:
        path: any file the installed decoder knows.
        max_frames: stop after this many frames.

    Returns:
        uint8 `[T, H, W, 3]` and its average frames per second.

    Raises:
        FlashGRPOError: the file is missing, unreadable, without a video, or has no frames.
    """
    path = Path(path)
    if not path.is_file():
        raise FlashGRPOError(f"video {str(path)!r} does not exist: check the path")
    if max_frames is not None and max_frames < 1:
        raise FlashGRPOError(f"max_frames = {max_frames} for {path.name!r} must be at least 1")
    decode = _decode_av if av is not None else _decode_ffmpeg
    try:
        frames, fps = decode(path, max_frames)
    except _FAILURES as exc:
        raise FlashGRPOError(
            f"video {str(path)!r} cannot be read: {_one_line(exc)}: convert it to mp4 (H.264)"
        ) from None
    if not frames:
        raise FlashGRPOError(f"video {str(path)!r} has no frames: check the file")
    if not fps or not math.isfinite(fps):
        raise FlashGRPOError(f"video {str(path)!r} does not say its frame rate: convert it to mp4")
    return np.stack(frames), float(fps)


def check_video(video: Any) -> np.ndarray:
    """Check that `video` is uint8 `[T, H, W, 3]` with at least one frame and pixel.

    Raises:
        FlashGRPOError: it is not.
    """
    good = isinstance(video, np.ndarray) and video.dtype == np.uint8 and video.ndim == 4
    if not good or video.shape[3] != 3 or 0 in video.shape:
        what = f"of type {type(video).__name__}"
        if isinstance(video, np.ndarray):
            what = f"{video.dtype} {list(video.shape)}"
        raise FlashGRPOError(f"the video is {what}: it must be uint8 [T, H, W, 3] (RGB, 0..255)")
    return video


def contact_sheet(
    videos: Sequence[np.ndarray],
    columns: int = 4,
    captions: Sequence[str] | None = None,
    *,
    tile: int = 256,
) -> Image.Image:
    """One picture of many videos: the middle frame of each, in rows, with captions below.

    Args:
        videos: uint8 `[T, H, W, 3]` each; sizes may differ.
        columns: tiles in a row.
        captions: one text per video, wrapped to two lines.
        tile: width of a tile in pixels.

    Raises:
        FlashGRPOError: no videos, or another number of captions.
    """
    if not len(videos):
        raise FlashGRPOError("a contact sheet needs at least one video")
    if columns < 1 or tile < 16:
        raise FlashGRPOError(f"a contact sheet of {columns} columns of {tile} pixels is impossible")
    if captions is not None and len(captions) != len(videos):
        raise FlashGRPOError(
            f"a contact sheet of {len(videos)} videos got {len(captions)} captions: give one each"
        )
    columns = min(columns, len(videos))
    gap, size = 8, 14
    frames = [check_video(video)[len(video) // 2] for video in videos]
    pictures = [
        _resized(frame, tile, round(tile * frame.shape[0] / frame.shape[1])) for frame in frames
    ]
    height = max(p.height for p in pictures)
    text_height = 0 if captions is None else 2 * (size + 4) + 4
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new(
        "RGB",
        (columns * (tile + gap) + gap, rows * (height + text_height + gap) + gap),
        _BACKGROUND,
    )
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        x = gap + column * (tile + gap)
        y = gap + row * (height + text_height + gap)
        sheet.paste(picture, (x, y + (height - picture.height) // 2))
        if captions is not None:
            for line, text in enumerate(_wrapped(captions[index], font, tile, lines=2)):
                draw.text((x, y + height + 4 + line * (size + 4)), text, font=font, fill=_INK)
    return sheet


def filmstrip(video: np.ndarray, frames: int = 8, *, height: int = 128) -> Image.Image:
    """Evenly spaced frames of one video side by side, first and last included.

    Raises:
        FlashGRPOError: a bad video or number of frames.
    """
    video = check_video(video)
    if frames < 1:
        raise FlashGRPOError(f"a filmstrip of {frames} frames is impossible: ask for at least 1")
    indices = np.linspace(0, len(video) - 1, min(frames, len(video))).round().astype(int)
    width = max(1, round(height * video.shape[2] / video.shape[1]))
    gap = 2
    strip = Image.new("RGB", (len(indices) * (width + gap) - gap, height), _BACKGROUND)
    for position, index in enumerate(indices):
        strip.paste(_resized(video[index], width, height), (position * (width + gap), 0))
    return strip


def side_by_side(
    left: np.ndarray,
    right: np.ndarray,
    labels: tuple[str, str] = ("before", "after"),
    *,
    min_height: int = 256,
) -> np.ndarray:
    """Two videos next to each other, each under its label.

    The right one is scaled to the height of the left; of the shorter one the last frame stands
    still. Videos lower than `min_height` are enlarged by a whole factor, so that labels fit.

    Returns:
        uint8 `[T, H', W', 3]` with even sizes; `H'` includes the label bar on top.

    Raises:
        FlashGRPOError: a bad video or not two labels.
    """
    left, right = check_video(left), check_video(right)
    if len(labels) != 2:
        raise FlashGRPOError(f"side_by_side got {len(labels)} labels: give two")
    factor = math.ceil(min_height / left.shape[1])
    height = left.shape[1] * factor
    widths = [max(1, round(v.shape[2] * height / v.shape[1])) for v in (left, right)]
    gap = 4
    size = max(14, height // 20)
    bar_height = size + 12
    canvas_width = widths[0] + gap + widths[1]
    canvas_size = (canvas_width + canvas_width % 2, height + bar_height + (height + bar_height) % 2)
    base = Image.new("RGB", canvas_size, _BACKGROUND)
    draw = ImageDraw.Draw(base)
    font = ImageFont.load_default(size)
    corners = (0, widths[0] + gap)
    for x, width, label in zip(corners, widths, labels, strict=True):
        text = "".join(_wrapped(label, font, width - 8, lines=1))
        draw.text((x + width / 2, bar_height / 2), text, font=font, fill=_INK, anchor="mm")
    out = np.repeat(np.asarray(base)[None], max(len(left), len(right)), axis=0)
    for x, width, video in zip(corners, widths, (left, right), strict=True):
        for t in range(len(out)):
            frame = video[min(t, len(video) - 1)]
            out[t, bar_height : bar_height + height, x : x + width] = _resized(frame, width, height)
    return out


def jpeg_data_uri(image: Image.Image | np.ndarray, quality: int = 88) -> str:
    """A `data:image/jpeg;base64,...` text of a picture (PIL, or uint8 `[H, W, 3]`)."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(check_video(image[None])[0])
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="JPEG", quality=quality)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _encode_av(path: Path, video: np.ndarray, fps: float, crf: int) -> None:
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(crf), "preset": _PRESET}
        # The conversion below is BT.601; without the tag players guess BT.709 for large frames.
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = 6  # SMPTE 170M
        context.color_range = 1  # limited
        for pixels in video:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


#: Containers that count as video; FFmpeg would also draw a text file as one.
_FORMATS = {"mov", "mp4", "matroska", "webm", "avi", "gif", "mpegts", "mpeg", "ogg", "flv", "asf"}


def _decode_av(path: Path, max_frames: int | None) -> tuple[list[np.ndarray], float]:
    frames: list[np.ndarray] = []
    with av.open(str(path)) as container:
        if not _FORMATS & set(container.format.name.split(",")):
            raise ValueError(f"it is a {container.format.name} file")
        if not container.streams.video:
            raise ValueError("it holds no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        fps = float(stream.average_rate or 0)
        for frame in container.decode(stream):
            exact = frame.reformat(format="rgb24", interpolation=_EXACT_AV)
            frames.append(exact.to_ndarray())
            if len(frames) == max_frames:
                break
    return frames, fps


def _imageio_ffmpeg() -> Any:
    try:
        import imageio_ffmpeg
    except ImportError:
        raise FlashGRPOError(
            "video files need the package av (PyAV) or imageio-ffmpeg: pip install av"
        ) from None
    return imageio_ffmpeg


def _encode_ffmpeg(path: Path, video: np.ndarray, fps: float, crf: int) -> None:
    tags = ["-colorspace", "smpte170m", "-color_primaries", "smpte170m", "-color_trc", "smpte170m"]
    writer = _imageio_ffmpeg().write_frames(
        str(path),
        (video.shape[2], video.shape[1]),
        fps=fps,
        codec="libx264",
        quality=None,
        macro_block_size=1,
        ffmpeg_log_level="error",
        output_params=["-crf", str(crf), "-preset", _PRESET, *tags, "-movflags", "+faststart"],
    )
    writer.send(None)
    try:
        for pixels in video:
            writer.send(np.ascontiguousarray(pixels))
    finally:
        writer.close()
    if not path.is_file() or path.stat().st_size == 0:
        raise OSError("ffmpeg wrote nothing")


def _decode_ffmpeg(path: Path, max_frames: int | None) -> tuple[list[np.ndarray], float]:
    reader = _imageio_ffmpeg().read_frames(str(path), pix_fmt="rgb24", output_params=_EXACT_FFMPEG)
    frames: list[np.ndarray] = []
    try:
        meta = next(reader)
        width, height = meta["size"]
        for data in reader:
            frames.append(np.frombuffer(data, np.uint8).reshape(height, width, 3).copy())
            if len(frames) == max_frames:
                break
    finally:
        reader.close()
    return frames, float(meta.get("fps") or 0)


def _resized(frame: np.ndarray, width: int, height: int) -> Image.Image:
    """Scale a frame; a whole-number enlargement keeps its pixels square and crisp."""
    whole = width % frame.shape[1] == 0 and height % frame.shape[0] == 0
    method = Image.Resampling.NEAREST if whole else Image.Resampling.LANCZOS
    return Image.fromarray(frame).resize((width, max(1, height)), method)


def _wrapped(text: str, font: Any, width: int, lines: int) -> list[str]:
    """Break `text` into at most `lines` lines of `width` pixels; the rest becomes an ellipsis."""
    words = text.split()
    out: list[str] = []
    while words and len(out) < lines:
        line = words.pop(0)
        while words and font.getlength(f"{line} {words[0]}") <= width:
            line += " " + words.pop(0)
        out.append(line)
    for index, line in enumerate(out):
        cut = bool(words) and index == len(out) - 1
        kept = line
        while kept and font.getlength(kept + "..." * (cut or kept != line)) > width:
            kept = kept[:-1]
        out[index] = kept + "..." * (cut or kept != line)
    return out


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:200] or type(exc).__name__
