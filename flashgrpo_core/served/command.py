"""`flashgrpo reward-server`."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..cli_common import Answer
from ..errors import FlashGRPOError
from ..lookup import resolve_terms
from ..rewards.mix import RewardMix
from ..rewards.servers import read_token
from .protocol import Limits


def reward_server(args: Namespace) -> Answer:
    """Serve rewards until Ctrl-C."""
    from .server import ServerSettings, serve

    settings = ServerSettings(
        host=args.host,
        port=args.port,
        token=read_token(Path(args.token_file)) if args.token_file else "",
        limits=Limits(
            bytes=args.max_megabytes << 20,
            videos=args.max_videos,
            frames=args.max_frames,
            pixels=args.max_pixels,
        ),
        queue=args.queue,
        batch=args.batch,
        score_timeout=args.timeout,
        read_timeout=args.read_timeout,
    )
    rewards = served_rewards(args.reward, args.option, args.models)

    def ready(address: str) -> None:
        names = ", ".join(rewards)
        sys.stderr.write(f"flashgrpo: serving {names} on {address}\n")
        sys.stderr.flush()

    asyncio.run(serve(rewards, settings, ready))
    return Answer("stopped")


def served_rewards(
    names: list[str], options: list[str], models: str | None
) -> dict[str, RewardMix]:
    """The rewards of the command line, ready to score.

    Args:
        names: reward names, each once.
        options: `key=value` for the only reward, or `name.key=value`; values are TOML, bare words
            strings.
        models: folder in which model files are looked up.

    Raises:
        FlashGRPOError: an unknown reward or option, or a missing file.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in names}
    if len(tables) != len(names):
        raise FlashGRPOError("a --reward is given twice: name each reward once")
    from ..config_io import apply_override

    for text in options:
        name = text.partition("=")[0].partition(".")[0]
        if name not in tables:
            if len(tables) > 1:
                raise FlashGRPOError(f"--option {text!r} must begin with one of {', '.join(names)}")
            text = f"{names[0]}.{text}"
        apply_override(tables, text)
    rewards = {}
    folder = Path(models).expanduser() if models else None
    for name, table in tables.items():
        terms = resolve_terms([{"name": name, **table}], Path.cwd(), folder)
        mix = RewardMix(terms, on_nan="mask")
        if mix.feature_sizes:
            raise FlashGRPOError(
                f"reward {name!r} compares the videos of a group, which a server never sees "
                "together: use it in the trainer"
            )
        rewards[name] = mix
    return rewards
