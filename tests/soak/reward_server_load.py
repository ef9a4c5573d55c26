"""A reward server under load from good, wrong, oversized, slow and cut-off clients.

    python tests/soak/reward_server_load.py [--clients 4] [--requests 200]

Each client sends that many good requests and, mixed in at random, as many hostile ones. All good
ones must be answered with the reward's own value, wrong ones refused with their reason; nothing may
be unpickled, the server must live to the end, and its memory must not grow. Writes
`benchmarks/results/reward_server_load.json`.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from flashgrpo_core.rewards import RewardMix  # noqa: E402
from tests.unit._reward_server import (  # noqa: E402
    LIMITS,
    ServerProcess,
    bad_requests,
    clips,
    cut_off_client,
    request_bytes,
    slow_client,
)

RESULTS = ROOT / "benchmarks" / "results" / "reward_server_load.json"
#: Growth between the first and the second half that still counts as flat, MiB: the allocator's
#: pools and fragmentation; a leak of one request (4 MiB) in a hundred would exceed it.
FLAT = 16.0


def client(number: int, count: int, server: ServerProcess, mark: str, tally: Any) -> None:
    """One client: `count` good requests, as many hostile ones, in random order."""
    rng = random.Random(number)
    mix = RewardMix([{"name": "served", "url": server.url}])
    own = RewardMix([{"name": "brightness"}])
    wrong = bad_requests(mark)
    turns = ["good"] * count + ["hostile"] * count
    rng.shuffle(turns)
    for turn, kind in enumerate(turns):
        # Frames of 64 x 64 up to 256 x 256: up to 4 MiB a request.
        batch = clips(1, seed=10_000 * number + turn, frames=21, size=rng.choice((64, 128, 256)))
        if kind == "good":
            right = np.array_equal(mix.score(batch).total, own.score(batch).total)
            tally["good, right" if right else "good, WRONG"] += 1
            continue
        hostile = rng.choices(("wrong", "oversized", "cut off", "slow"), (80, 8, 8, 4))[0]
        if hostile == "wrong":
            name = rng.choice(list(wrong))
            body, status, reason = wrong[name]
            got, answer = server.ask(body)
            fine = got == status and reason in answer["error"]
            tally["wrong, refused" if fine else f"wrong, NOT REFUSED: {name}"] += 1
        elif hostile == "oversized":
            got, _ = server.ask(b"FGRW" + bytes(9 << 20))
            tally["oversized, refused" if got == 413 else "oversized, NOT REFUSED"] += 1
        elif hostile == "cut off":
            cut_off_client(server.port, request_bytes(batch))
            tally["cut off"] += 1
        else:
            slow_client(server.port, 1.5)
            tally["slow"] += 1


def watch(process: psutil.Process, samples: list[float], stop: threading.Event) -> None:
    """Resident memory of the server in MiB, ten times a second."""
    while not stop.wait(0.1):
        samples.append(process.memory_info().rss / 2**20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    tally: collections.Counter[str] = collections.Counter()
    samples: list[float] = []
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(*LIMITS, "--read-timeout", "1") as server,
    ):
        mark = Path(folder) / "unpickled"
        process = psutil.Process(server.process.pid)
        watcher = threading.Thread(target=watch, args=(process, samples, stop))
        watcher.start()
        started = time.monotonic()
        threads = [
            threading.Thread(target=client, args=(i, args.requests, server, str(mark), tally))
            for i in range(args.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - started
        stop.set()
        watcher.join()
        alive, pickled = server.process.poll() is None, mark.exists()
        health = server.health() if alive else {}
        handles = process.num_fds() if alive and hasattr(process, "num_fds") else None
    # After the warm-up: allocators fill their pools with the first large requests.
    rest = samples[len(samples) // 5 :]
    halves = [float(np.median(part)) for part in np.array_split(np.array(rest), 2)]
    growth = halves[1] - halves[0]
    wanted = args.clients * args.requests
    passed = (
        alive
        and not pickled
        and tally["good, right"] == wanted
        and not any(word in name for name in tally for word in ("WRONG", "NOT REFUSED"))
        and growth < FLAT
        and health["waiting"] == 0
    )
    result = {
        "passed": passed,
        "clients": args.clients,
        "good_requests": wanted,
        "tally": dict(sorted(tally.items())),
        "seconds": round(seconds, 1),
        "server_alive": alive,
        "unpickled": pickled,
        "scored": health.get("scored"),
        "open_files_at_the_end": handles,
        "memory_mib": {
            "second_and_third_fifth": round(halves[0], 1),
            "fourth_and_last_fifth": round(halves[1], 1),
            "growth": round(growth, 1),
            "peak": round(max(samples), 1),
        },
    }
    print(json.dumps(result, indent=1))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
