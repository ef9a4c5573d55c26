"""Video files with both back ends, and pictures of videos."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flashgrpo_core import video as module
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.video import (
    contact_sheet,
    filmstrip,
    jpeg_data_uri,
    read_video,
    side_by_side,
    write_mp4,
)
from tests.unit._clips import disc, line, natural


@pytest.fixture(params=["pyav", "imageio-ffmpeg"])
def back_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The fallback is what runs where PyAV is not installed."""
    assert module.av is not None, "pip install av"
    if request.param == "imageio-ffmpeg":
        monkeypatch.setattr(module, "av", None)
    return request.param


@pytest.mark.parametrize("fps", [8.0, 16.0, 15.0, 23.976])
def test_a_video_survives_the_file(tmp_path: Path, back_end: str, fps: float) -> None:
    clip = natural()[:9]
    path = write_mp4(tmp_path / "new folder" / "clip.mp4", clip, fps)
    found, rate = read_video(path)
    assert found.shape == clip.shape and found.dtype == np.uint8
    assert rate == pytest.approx(fps, rel=1e-3)
    difference = found.astype(int) - clip
    assert np.abs(difference).mean() < 3
    assert np.abs(difference.mean((0, 1, 2))).max() < 0.3, "no colour cast"
    assert os.listdir(path.parent) == ["clip.mp4"]


def test_what_one_back_end_writes_the_other_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = disc(line())
    write_mp4(tmp_path / "av.mp4", clip, 8)
    ours = read_video(tmp_path / "av.mp4")[0]
    monkeypatch.setattr(module, "av", None)
    write_mp4(tmp_path / "ffmpeg.mp4", clip, 8)
    theirs, fps = read_video(tmp_path / "av.mp4")
    assert fps == 8
    # They interpolate the halved colour planes in different ways.
    assert np.abs(ours.astype(int) - theirs).mean() < 0.5
    monkeypatch.undo()
    assert read_video(tmp_path / "ffmpeg.mp4")[0].shape == clip.shape


def test_the_file_is_what_browsers_play(tmp_path: Path, back_end: str) -> None:
    import av

    path = write_mp4(tmp_path / "clip.mp4", disc(line()), 8)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.pix_fmt == "yuv420p"
        assert stream.frames == 9
        assert stream.codec_context.colorspace == 6
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat"), "plays before it is fully loaded"


@pytest.mark.parametrize(("height", "width"), [(33, 47), (64, 65), (2, 2)])
def test_odd_sizes_are_extended_by_their_edge(
    tmp_path: Path, back_end: str, height: int, width: int
) -> None:
    clip = np.full((3, height, width, 3), 90, np.uint8)
    found, _ = read_video(write_mp4(tmp_path / "odd.mp4", clip, 8))
    assert found.shape == (3, height + height % 2, width + width % 2, 3)
    assert np.abs(found.astype(int) - 90).max() < 8


def test_one_frame(tmp_path: Path, back_end: str) -> None:
    found, fps = read_video(write_mp4(tmp_path / "one.mp4", disc(line(1)), 8))
    assert found.shape == (1, 64, 64, 3) and fps == pytest.approx(8)


def test_reading_can_stop_early(tmp_path: Path, back_end: str) -> None:
    path = write_mp4(tmp_path / "clip.mp4", disc(line()), 8)
    assert len(read_video(path, max_frames=4)[0]) == 4
    with pytest.raises(FlashGRPOError, match="max_frames = 0"):
        read_video(path, max_frames=0)


def test_the_same_video_gives_the_same_bytes(tmp_path: Path, back_end: str) -> None:
    for name in ("a.mp4", "b.mp4"):
        write_mp4(tmp_path / name, disc(line()), 8)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_a_path_with_spaces_and_letters_of_any_language(tmp_path: Path, back_end: str) -> None:
    path = write_mp4(tmp_path / "Übung 1 비디오.mp4", disc(line(3)), 8)
    assert read_video(path)[0].shape == (3, 64, 64, 3)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, back_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")

    def full(source: Path, target: Path) -> None:
        assert Path(source).stat().st_size > 100
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    with pytest.raises(FlashGRPOError, match=r"clip\.mp4.*No space left"):
        write_mp4(path, disc(line(3)), 8)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["clip.mp4"]


@pytest.mark.parametrize(
    ("clip", "named"),
    [
        (np.zeros((3, 8, 8, 3), np.float32), "float32"),
        (np.zeros((3, 8, 8), np.uint8), r"\[3, 8, 8\]"),
        (np.zeros((0, 8, 8, 3), np.uint8), r"\[0, 8, 8, 3\]"),
        ([[1]], "list"),
    ],
)
def test_bad_videos_are_named(tmp_path: Path, clip: object, named: str) -> None:
    with pytest.raises(FlashGRPOError, match=named):
        write_mp4(tmp_path / "x.mp4", clip, 8)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), 2000])
def test_bad_rates_are_named(tmp_path: Path, fps: float) -> None:
    with pytest.raises(FlashGRPOError, match="fps"):
        write_mp4(tmp_path / "x.mp4", disc(line(1)), fps)


def test_files_that_are_no_video_are_named(tmp_path: Path, back_end: str) -> None:
    with pytest.raises(FlashGRPOError, match=r"none\.mp4.*does not exist"):
        read_video(tmp_path / "none.mp4")
    (tmp_path / "text.mp4").write_text("this is no video\n" * 100)
    with pytest.raises(FlashGRPOError, match=r"text\.mp4") as error:
        read_video(tmp_path / "text.mp4")
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_an_error(tmp_path: Path, back_end: str) -> None:
    path = write_mp4(tmp_path / "clip.mp4", natural(), 8)
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(FlashGRPOError, match=r"clip\.mp4"):
        read_video(path)


def test_without_any_encoder_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "av", None)
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    with pytest.raises(FlashGRPOError, match="pip install av"):
        write_mp4(tmp_path / "x.mp4", disc(line(1)), 8)


# --- pictures


def test_contact_sheet_shows_the_middle_frame_of_each_video() -> None:
    videos = [np.full((3, 32, 64, 3), 40 * i, np.uint8) for i in range(5)]
    for clip in videos:
        clip[1] += 30
    sheet = np.asarray(contact_sheet(videos, columns=3, tile=64))
    assert sheet.shape == (2 * (32 + 8) + 8, 3 * (64 + 8) + 8, 3)
    for index in range(5):
        row, column = divmod(index, 3)
        centre = sheet[8 + row * 40 + 16, 8 + column * 72 + 32]
        assert centre.tolist() == [40 * index + 30] * 3


def test_contact_sheet_takes_videos_of_different_sizes_and_captions() -> None:
    videos = [disc(line()), natural()[:, :, :90]]
    captions = ["a red circle moving right " * 9, ""]
    plain, captioned = contact_sheet(videos), contact_sheet(videos, captions=captions)
    assert captioned.width == plain.width == 2 * (256 + 8) + 8
    strip = np.asarray(captioned)[plain.height - 8 :]
    assert captioned.height > plain.height
    left, right = strip[:, : captioned.width // 2], strip[:, captioned.width // 2 :]
    assert left.max() > 200, "the caption is drawn"
    assert right.max() < 60, "and stays under its own video"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"videos": []}, "at least one video"),
        ({"videos": [disc(line(1))], "captions": ["a", "b"]}, "2 captions"),
        ({"videos": [disc(line(1))], "columns": 0}, "0 columns"),
        ({"videos": [np.zeros((8, 8, 3), np.uint8)]}, r"\[8, 8, 3\]"),
    ],
)
def test_impossible_contact_sheets_are_named(arguments: dict, named: str) -> None:
    with pytest.raises(FlashGRPOError, match=named):
        contact_sheet(**arguments)


def test_filmstrip_runs_from_the_first_to_the_last_frame() -> None:
    clip = np.stack([np.full((64, 64, 3), 20 * t, np.uint8) for t in range(9)])
    strip = np.asarray(filmstrip(clip, frames=5, height=64))
    assert strip.shape == (64, 5 * 66 - 2, 3)
    assert [int(strip[32, 66 * i + 32, 0]) for i in range(5)] == [0, 40, 80, 120, 160]
    assert np.asarray(filmstrip(clip[:2], frames=5)).shape[1] == 2 * 130 - 2
    with pytest.raises(FlashGRPOError, match="0 frames"):
        filmstrip(clip, frames=0)


def test_side_by_side_puts_labels_above_and_holds_the_last_frame() -> None:
    left = np.stack([np.full((64, 64, 3), 10 * t, np.uint8) for t in range(3)])
    right = np.stack([np.full((128, 192, 3), 100 + t, np.uint8) for t in range(5)])
    both = side_by_side(left, right, ("base", "trained"))
    frames, height, width, channels = both.shape
    assert (frames, channels) == (5, 3) and height % 2 == width % 2 == 0
    bar = height - 256
    assert 20 <= bar <= 60
    assert both[:, bar + 100, 100, 0].tolist() == [0, 10, 20, 20, 20]
    assert both[:, bar + 100, 256 + 4 + 100, 0].tolist() == [100, 101, 102, 103, 104]
    for half in (both[0, :bar, :256], both[0, :bar, 260:]):
        assert half.max() > 200, "the label is drawn"
    assert both[0, :bar].std() > 0 and (both[0, :bar] == both[4, :bar]).all()


def test_side_by_side_keeps_large_videos_at_their_size() -> None:
    clip = np.zeros((1, 480, 832, 3), np.uint8)
    both = side_by_side(clip, clip)
    assert both.shape[2] == 2 * 832 + 4 and 480 < both.shape[1] < 560
    with pytest.raises(FlashGRPOError, match="3 labels"):
        side_by_side(clip, clip, ("a", "b", "c"))  # type: ignore[arg-type]


def test_long_labels_end_in_an_ellipsis_inside_their_half() -> None:
    clip = np.zeros((1, 64, 64, 3), np.uint8)
    bar = side_by_side(clip, clip, ("W" * 200, "short"))[0, :20]
    assert bar[:, 250:262].max() < 60


def test_side_by_side_can_be_written(tmp_path: Path, back_end: str) -> None:
    both = side_by_side(disc(line()), disc(line()))
    assert read_video(write_mp4(tmp_path / "both.mp4", both, 8))[0].shape == both.shape


@pytest.mark.parametrize("as_array", [True, False])
def test_jpeg_data_uri_is_a_jpeg(as_array: bool) -> None:
    frame = natural()[0]
    uri = jpeg_data_uri(frame if as_array else Image.fromarray(frame))
    head, _, data = uri.partition(",")
    assert head == "data:image/jpeg;base64"
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(data, validate=True))))
    assert np.abs(found.astype(int) - frame).mean() < 5
