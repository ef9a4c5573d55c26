"""Score Videos: rank videos that exist already, linked ones or those of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from comfy_api.latest import InputImpl, io, ui

from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.ranking import Clip, prompts_beside, rank_videos, videos_in
from ..flashgrpo_core.rewards.mix import RewardMix
from ..flashgrpo_core.video import read_video
from . import host, pictures, pool
from .pictures import to_image
from .values import Reward, RewardType
from .widgets import CATEGORY, advanced


class ScoreVideos(host.ComfyNode):
    """Ranks videos by a reward."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOScoreVideos",
            display_name="Score Videos",
            category=CATEGORY,
            description="Ranks videos by a reward, best first: linked videos, or those of a folder. "
            "No model is trained or needed beyond those of the reward.",
            is_input_list=True,
            is_output_node=True,
            inputs=[
                RewardType.Input("reward", tooltip="The reward, or a chain of rewards."),
                io.Video.Input(
                    "videos", optional=True, tooltip="Videos to rank, one or a list of them."
                ),
                io.String.Input(
                    "folder",
                    default="",
                    placeholder="output/video",
                    tooltip="Folder whose videos are ranked as well: input or output, or a folder in "
                    "one of them. Empty: only the linked videos.",
                ),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    default="",
                    placeholder="what the videos should show",
                    tooltip="Prompt of all videos. In a folder, name.txt beside name.mp4 goes first. "
                    "Videos of one prompt are a group.",
                ),
                io.Combo.Input(
                    "on_nan",
                    options=["auto", "error", "mask"],
                    default="auto",
                    tooltip="A score that is not finite: stop, or put the video last; auto puts it "
                    "last when another process gives the scores.",
                ),
                advanced(
                    io.Int.Input(
                        "max_frames",
                        default=241,
                        min=1,
                        max=100000,
                        tooltip="Only the first frames of longer videos are scored, 1 to 100000.",
                    )
                ),
            ],
            outputs=[
                io.Image.Output(display_name="picture"),
                io.String.Output(display_name="scores"),
                io.Video.Output(display_name="best"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, folder: Sequence[str], **_: Any) -> list[Any]:
        """The state of the folder's videos and prompts."""
        try:
            name = str(folder[0]).strip()
            files = sorted(host.media_folder(name).iterdir()) if name else []
            return [pool.stamp(file) for file in files]
        except (FlashGRPOError, OSError, LookupError) as exc:
            return [str(exc)]

    @classmethod
    def execute(
        cls,
        reward: list[Reward],
        folder: str,
        prompt: str,
        on_nan: str,
        max_frames: int,
        videos: list[Any] | None = None,
    ) -> io.NodeOutput:
        """Score, rank, draw."""
        if len(reward) != 1:
            raise FlashGRPOError(f"{len(reward)} rewards are linked: chain them through previous")
        mix = RewardMix([dict(term) for term in reward[0].terms], on_nan)
        text = " ".join(prompt.split())
        sources: dict[str, Any] = {}
        clips = []
        for number, video in enumerate(videos or [], start=1):
            name = f"video {number}"
            sources[name] = video
            clips.append(Clip(name, text, partial(_frames, video, max_frames)))
        if folder.strip():
            files = videos_in(host.media_folder(folder.strip()))
            for file, own in zip(files, prompts_beside(files), strict=True):
                sources[file.name] = file
                clips.append(Clip(file.name, own or text, partial(read_video, file, max_frames)))
        if not clips:
            raise FlashGRPOError("no video to score: link videos, or name a folder")
        control = pool.control()
        control.phase("score", len(clips))
        ranked = rank_videos(clips, mix, control)
        pool.keep_rewards(mix)
        picture = to_image(pictures.ranked_sheet(ranked))
        best = sources[ranked[0].clip.name]
        if isinstance(best, Path):
            best = InputImpl.VideoFromFile(str(best))
        return io.NodeOutput(
            picture, pictures.ranked_text(ranked), best, ui=ui.PreviewImage(picture)
        )


def _frames(video: Any, limit: int) -> tuple[np.ndarray, float]:
    """Frames of a VIDEO, uint8 `[T, H, W, 3]`, and its rate."""
    parts = video.get_components()
    images = parts.images[:limit, ..., :3]  # float [T, H, W, C], 0..1
    frames = (images * 255).round().clamp(0, 255).byte().cpu().numpy()
    if not len(frames):
        raise FlashGRPOError("a linked video has no frames")
    return frames, float(parts.frame_rate)
