"""The `served` reward: the scores of a `flashgrpo reward-server`."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from ..control import Control
from ..errors import FlashGRPOError
from ..rewards.batch import VideoBatch
from ..rewards.options import choice, number
from ..rewards.servers import Server, check_urls, find_server, read_token
from .client import ServerFailed, ServerPool, Stop
from .protocol import (
    CONTENT_TYPE,
    ENCODINGS,
    SCORE_PATH,
    ScoreRequest,
    pack_request,
    unpack_answer,
)

log = logging.getLogger(__name__)

#: Names the servers file of the command line.
VARIABLE = "FLASHGRPO_SERVERS"


def resolve(reward: str, server: Any, url: Any, token_file: Any, kind: str) -> Server:
    """The server that a term names, or the one at its address.

    Raises:
        FlashGRPOError: neither or both are given, or it cannot be found.
    """
    if bool(server) == bool(url):
        raise FlashGRPOError(
            f"reward {reward!r} needs either server (a name in the servers file) or url"
        )
    if server:
        if not isinstance(server, str):
            raise FlashGRPOError(f"reward {reward!r}: server = {server!r} must be a name")
        variable = os.environ.get(VARIABLE)
        return find_server(server, kind, Path(variable).expanduser() if variable else None)
    token = read_token(Path(str(token_file))) if token_file else ""
    return Server(check_urls(f"reward {reward!r}", url), token, kind)


class ServedReward:
    """Scores of a reward that another process computes.

    Each video is a request of its own, several at a time, so that equal servers share the work and
    one that dies costs nothing but time. A video that no server has scored gets NaN, which
    `reward.on_nan` deals with (it is masked, unless told otherwise); a request that a server
    refuses stops the run with its reason.

    Args:
        server: name in the servers file.
        reward: the reward to ask for; empty for a server that has only one.
        url: address, or a list of them, instead of `server`.
        token_file: file with the token for `url`.
        encoding: `safetensors` (exact) or `mp4` (small, for slow networks).
        timeout: seconds without a byte after which a request has failed.
        attempts: how often a request may fail.
        parallel: requests under way at a time; 0 = two per server.
        label: name in logs and charts; default `served:<reward>`.
    """

    name = "served"
    title = "Served"
    description = "Asks a reward server for the scores: any reward, in its own environment or on another machine."
    range = "that of the served reward"
    direction = "that of the served reward"
    hackable_by = "whatever the served reward can be cheated by"

    served = True
    whole_batch = True
    #: Options that name files, looked up beside the TOML.
    files = ("token_file",)
    source = "write the server's token into it"

    def __init__(
        self,
        server: str = "",
        reward: str = "",
        url: str | list[str] = "",
        token_file: str = "",
        encoding: str = "safetensors",
        timeout: float = 300.0,
        attempts: int = 4,
        parallel: int = 0,
        label: str = "",
    ) -> None:
        kind = type(self).name
        found = resolve(kind, server, url, token_file, "reward")
        if not isinstance(reward, str) or not isinstance(label, str):
            raise FlashGRPOError(f"reward {kind!r}: reward and label must be text")
        self.reward = reward
        self.encoding = choice(kind, "encoding", encoding, ENCODINGS)
        self.parallel = int(number(kind, "parallel", parallel, 0, 64)) or 2 * len(found.urls)
        self.pool = ServerPool(
            found.urls,
            found.token,
            number(kind, "timeout", timeout, 0.1, 86400),
            int(number(kind, "attempts", attempts, 1, 100)),
        )
        self.name = label or (f"served:{reward}" if reward else kind)
        self._parts: set[str] = set()

    def score(self, batch: VideoBatch, control: Control | None = None) -> dict[str, np.ndarray]:
        """See the class."""
        rows = each_video(batch, self._ask, self.parallel, control or Control())
        self._parts.update(*rows)
        self._parts.discard("")
        values = {self.name: np.array([row.get("", np.nan) for row in rows], np.float64)}
        for part in sorted(self._parts):
            values[f"{self.name}.{part}"] = np.array([r.get(part, np.nan) for r in rows])
        return values

    def _ask(self, video: VideoBatch, stop: Stop) -> dict[str, float]:
        """Value (key empty) and parts of one video; empty when no server has answered."""
        request = ScoreRequest([uuid.uuid4().hex], self.reward, video)
        body = pack_request(request, self.encoding)
        try:
            data = self.pool.ask("POST", SCORE_PATH, body, CONTENT_TYPE, stop)
            values = unpack_answer(data, request.ids, self.reward)
        except (ServerFailed, ValueError, KeyError, TypeError, AttributeError) as exc:
            if not stop.event.is_set():
                log.warning("%s: a video was not scored: %s", self.name, str(exc)[:300])
            return {}
        return {key: float(value[0]) for key, value in values.items()}


def each_video(
    batch: VideoBatch,
    ask: Callable[[VideoBatch, Stop], dict[str, float]],
    parallel: int,
    control: Control,
) -> list[dict[str, float]]:
    """Ask for each video of a batch, several at a time, and stop all when the host stops.

    Raises:
        FlashGRPOError: a request was refused.
    """
    if not len(batch):
        return []
    stop = Stop()
    with ThreadPoolExecutor(min(parallel, len(batch)), "served") as threads:
        asked: list[Future[dict[str, float]]] = [
            threads.submit(ask, batch.select([i]), stop) for i in range(len(batch))
        ]
        try:
            open_ = set(asked)
            while open_:
                done, open_ = wait(open_, timeout=0.5, return_when="FIRST_COMPLETED")
                control.check()
                for future in done:
                    future.result()
        except BaseException:
            stop.now()
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in asked]
