"""The reward server as a real process: right answers, refusals, load, and one of two that dies.

Locks in: served scores are those of the reward itself; no request ends the server or runs code;
what a request may ask of it is bounded; a client gets on with the servers that are left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from flashgrpo_core import cli
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import RewardMix
from flashgrpo_core.served.server import ServerSettings, is_loopback
from tests.unit._reward_server import (
    LIMITS,
    ServerProcess,
    bad_requests,
    clips,
    cut_off_client,
    request_bytes,
    slow_client,
)

TOKEN = "a-token-of-26-characters-ok"

#: The command line with a reward that takes its time and fails when it is told to.
MOODY = """
import sys, time
import numpy as np
from flashgrpo_core import cli
from flashgrpo_core.rewards import REWARDS

class Moody:
    name = "moody"
    def __init__(self, seconds: float = 0.05):
        self.seconds = seconds
    def score(self, batch):
        time.sleep(self.seconds)
        if "explode" in batch.prompts:
            raise ValueError("boom")
        values = [float(v.mean()) if "nothing" not in p else np.nan for v, p in zip(batch.videos, batch.prompts)]
        return {"moody": np.array(values)}

REWARDS["moody"] = Moody
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*LIMITS, "--read-timeout", "1") as running:
        yield running


@pytest.fixture(scope="module")
def moody() -> Iterator[ServerProcess]:
    """One video at a time, one waiting."""
    arguments = ("--option", "seconds=0.2", "--queue", "1", "--batch", "1", "--timeout", "5")
    with ServerProcess("--reward", "moody", *arguments, script=MOODY) as running:
        yield running


def served(url: str | list[str], **options: object) -> RewardMix:
    return RewardMix([{"name": "served", "url": url, **options}])


def test_served_scores_are_the_rewards_own(server: ServerProcess) -> None:
    batch = clips(5)
    own = RewardMix([{"name": "brightness"}]).score(batch).terms["brightness"]
    exact = served(server.url, reward="brightness").score(batch)
    np.testing.assert_array_equal(exact.terms["served:brightness"], own)
    small = served(server.url, encoding="mp4").score(batch)
    np.testing.assert_allclose(small.terms["served"], own, atol=0.01)
    order = [3, 1, 4, 0, 2]
    permuted = served(server.url).score(batch.select(order)).terms["served"]
    np.testing.assert_array_equal(permuted, own[order])


def test_start_images_and_ids_travel_with_their_videos(server: ServerProcess) -> None:
    batch = clips(3)
    batch = type(batch)(
        batch.videos, batch.prompts, 8.0, ["g"] * 3, [None, batch.videos[1, 0], None]
    )
    status, answer = server.ask(request_bytes(batch))
    assert status == 200 and answer["version"] == 1
    assert [row["id"] for row in answer["results"]] == ["v0", "v1", "v2"]
    assert set(answer["results"][0]["values"]) == {"brightness", "brightness.measured"}


@pytest.mark.parametrize("name", bad_requests(""))
def test_wrong_requests_are_answered_with_the_reason(
    server: ServerProcess, name: str, tmp_path: Path
) -> None:
    mark = tmp_path / "unpickled"
    body, status, reason = bad_requests(str(mark))[name]
    got, answer = server.ask(body)
    assert (got, reason in answer["error"]) == (status, True), (got, answer)
    assert "Traceback" not in answer["error"] and len(answer["error"]) < 400
    assert not mark.exists()
    assert server.ask(request_bytes(clips(1)))[0] == 200


def test_other_doors_are_shut(server: ServerProcess) -> None:
    body = request_bytes(clips(1))
    assert server.ask(body, "application/json")[0] == 415
    assert server.ask(body, "application/x-pickle")[0] == 415
    assert server.ask(body, path="/")[0] == 404
    assert server.ask(b"", method="GET")[0] == 405
    status, answer = server.ask(iter([body]))  # in chunks, without a length
    assert status == 411 and "Content-Length" in answer["error"]
    status, answer = server.ask(b"FGRW" + bytes(9 << 20))
    assert status == 413 and "at most 8388608" in answer["error"]


def test_slow_and_cut_off_clients_hold_nobody_up(server: ServerProcess) -> None:
    body = request_bytes(clips(1))
    slow = [threading.Thread(target=slow_client, args=(server.port, 2.0)) for _ in range(4)]
    for thread in slow:
        thread.start()
    for _ in range(5):
        cut_off_client(server.port, body)
    started = time.monotonic()
    for _ in range(10):
        assert server.ask(body)[0] == 200
    assert time.monotonic() - started < 2.0
    for thread in slow:
        thread.join()
    health = server.health()
    assert health["status"] == "ok" and health["rewards"] == ["brightness"]
    assert health["waiting"] == 0 and health["protocol"] == 1


def test_many_clients_at_once_get_their_own_scores(server: ServerProcess) -> None:
    """4 clients x 40 requests with wrong ones in between (tests/soak has the long version)."""
    wrong = list(bad_requests("/nowhere/at/all").values())

    def client(number: int) -> int:
        mix, right = served(server.url), 0
        for turn in range(40):
            batch = clips(1, seed=1000 * number + turn, frames=3, size=16)
            got = mix.score(batch).terms["served"]
            own = RewardMix([{"name": "brightness"}]).score(batch).terms["brightness"]
            right += bool(np.array_equal(got, own))
            if turn % 4 == 0:
                body, status, _ = wrong[(number + turn) % len(wrong)]
                assert server.ask(body)[0] == status
        return right

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(client, range(4))) == [40] * 4


def test_a_failing_reward_costs_one_score(moody: ServerProcess) -> None:
    mix = served(moody.url, attempts=2)
    assert mix.on_nan == "mask"
    batch = clips(3)
    batch.prompts[1] = "explode"
    scores = mix.score(batch)
    assert scores.valid.tolist() == [True, False, True]
    assert np.isnan(scores.total[1])
    batch.prompts[1] = "nothing"
    assert mix.score(batch).valid.tolist() == [True, False, True]
    with pytest.raises(FlashGRPOError, match="reward 'served'"):
        RewardMix([{"name": "served", "url": moody.url}], on_nan="error").score(batch)


def test_a_full_queue_is_answered_with_a_time_to_come_again(moody: ServerProcess) -> None:
    body = request_bytes(clips(1))
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: moody.ask(body), range(6)))
    statuses = sorted(status for status, _ in answers)
    assert statuses[0] == 200 and statuses[-1] == 503
    # The client waits instead of failing: busy is not broken.
    scores = served(moody.url, parallel=6, attempts=1).score(clips(6))
    assert scores.valid.all()


def test_one_of_two_servers_dies_and_all_are_scored() -> None:
    first, second = (ServerProcess("--reward", "moody", script=MOODY) for _ in range(2))
    with first, second:
        batch = clips(30)
        own = batch.videos.reshape(30, -1).mean(1)
        killer = threading.Timer(0.4, first.kill)
        killer.start()
        mix = served([first.url, second.url])
        scores = mix.score(batch)
        killer.join()
        assert first.process.returncode is not None
        assert scores.valid.all()
        np.testing.assert_allclose(scores.terms["served"], own)
        assert second.health()["scored"] >= 15
        # With nobody left every score fails, and after the first round at once.
        second.kill()
        impatient = served([first.url, second.url], attempts=1)
        started = time.monotonic()
        assert not impatient.score(batch).valid.any()
        assert time.monotonic() - started < 5


def test_off_loopback_only_with_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.4", "example.org", "")))
    assert cli.main(["reward-server", "--reward", "motion", "--host", "0.0.0.0"]) == 2
    assert "--token-file" in capsys.readouterr().err
    with pytest.raises(FlashGRPOError, match="at least 16"):
        ServerSettings(token="short")
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    with ServerProcess("--host", "0.0.0.0", "--token-file", str(file)) as running:
        body = request_bytes(clips(1))
        for token in ("", "wrong", TOKEN[:-1], TOKEN + "x"):
            assert running.ask(body, token=token)[0] == 401
            assert running.ask(b"", path="/v1/health", method="GET", token=token)[0] == 401
        assert running.ask(body, token=TOKEN)[0] == 200
        url = f"http://127.0.0.1:{running.port}"
        assert served(url, token_file=str(file)).score(clips(1)).valid.all()
        with pytest.raises(FlashGRPOError, match="401.*servers file"):
            served(url).score(clips(1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--reward", "motoin"], "did you mean 'motion'"),
        (["--reward", "motion", "--option", "enuogh=1"], "has no option 'enuogh'"),
        (["--reward", "motion", "--reward", "motion"], "given twice"),
        (["--reward", "motion", "--reward", "flicker", "--option", "tolerance=2"], "must begin"),
        (["--reward", "diversity"], "compares the videos of a group"),
        (["--reward", "motion", "--port", "70000"], "outside 0 to 65535"),
        (["--reward", "motion", "--host", "no.such.host.invalid"], "token-file"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["reward-server", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_taken_port_is_named(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reward-server", "--reward", "motion", "--port", str(server.port)]) == 2
    assert f"127.0.0.1:{server.port}" in capsys.readouterr().err
