"""The judge against a server that speaks OpenAI's protocol, and the file that names servers.

Locks in: what is asked (frames as pictures, no sampling), how marks are read, and that an answer
without a mark is a failed score; a server's address and token come from the user's file only.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import RewardMix
from flashgrpo_core.rewards import servers as servers_module
from flashgrpo_core.rewards.servers import find_server, read_servers, server_names, use_file
from flashgrpo_core.served.judge import RUBRICS
from tests.unit._reward_server import clips

KEY = "sk-local-0123456789"


class Stub:
    """An OpenAI-compatible server that answers with what `reply` makes of a question."""

    def __init__(self, reply: Callable[[dict[str, Any]], Any]) -> None:
        self.questions: list[dict[str, Any]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.questions.append(body)
                right = self.headers.get("Authorization") == f"Bearer {KEY}"
                answer = reply(body) if right else {"error": {"message": "bad key"}}
                status = 200 if right else 401
                if isinstance(answer, int):
                    status, answer = answer, {"error": {"message": "overloaded"}}
                data = json.dumps(answer).encode()
                self.send_response(status if self.path == "/v1/chat/completions" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def says(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def thinks(*tokens: dict[str, float]) -> dict[str, Any]:
    """An answer with log-probabilities; the likeliest of each position was said."""
    content = [
        {
            "token": max(options, key=options.__getitem__),
            "top_logprobs": [
                {"token": token, "logprob": math.log(p)} for token, p in options.items()
            ],
        }
        for options in tokens
    ]
    return {"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": content}}]}


def prompt_of(question: dict[str, Any]) -> str:
    return question["messages"][0]["content"][-1]["text"]


@pytest.fixture
def make_judge(tmp_path: Path) -> Iterator[Callable[..., tuple[Stub, RewardMix]]]:
    """Makes a stub with a reply, a servers file that names it, and the reward that asks it."""
    stubs = []

    def make(reply: Callable[[dict[str, Any]], Any], **options: Any) -> tuple[Stub, RewardMix]:
        stub = Stub(reply)
        stubs.append(stub)
        entry = {"kind": "judge", "url": stub.url, "token": KEY, "model": "unified-8b"}
        file = tmp_path / "servers.json"
        file.write_text(json.dumps({"here": entry}), encoding="utf-8")
        use_file(file)
        return stub, RewardMix([{"name": "judge", "server": "here", **options}])

    before = servers_module.servers_file()
    yield make
    use_file(before)
    for stub in stubs:
        stub.close()


def test_the_judge_sees_frames_and_the_prompt_and_does_not_sample(make_judge: Any) -> None:
    marks = {"prompt 0": 4.5, "prompt 1": 1.0, "prompt 2": 5.0}

    def reply(question: dict[str, Any]) -> dict[str, Any]:
        mark = next(m for p, m in marks.items() if p in prompt_of(question))
        return says(f"The ball is round. My final score: 3 at first.\n**Final Score: {mark}**")

    stub, mix = make_judge(reply, frames=3)
    batch = clips(3, frames=9)
    assert mix.on_nan == "mask"
    assert mix.score(batch).terms["judge"].tolist() == [4.5, 1.0, 5.0]
    question = next(q for q in stub.questions if "prompt 1" in prompt_of(q))
    assert question["model"] == "unified-8b" and question["temperature"] == 0
    *pictures, text = question["messages"][0]["content"]
    assert "3 frames" in text["text"] and "{" not in text["text"]
    shown = []
    for picture in pictures:
        kind, _, data = picture["image_url"]["url"].partition(";base64,")
        assert kind == "data:image/jpeg"
        shown.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))), np.float64))
    # Evenly spaced, the first and the last among them, in order.
    for seen, index in zip(shown, (0, 4, 8), strict=True):
        frame = batch.videos[1, index].astype(np.float64)
        assert abs(seen.mean() - frame.mean()) < 2


def test_three_marks_and_their_mean(make_judge: Any) -> None:
    text = "Alignment Score (1-5): 4\nPhysics Score (1-5): 3.5\nStyle Score (1-5): 3"
    _, mix = make_judge(lambda _: says(text), rubric="unified")
    parts = mix.score(clips(1)).parts
    assert parts["judge"].tolist() == [3.5]
    assert [parts[f"judge.{p}"][0] for p in ("alignment", "physics", "style")] == [4.0, 3.5, 3.0]


def test_yes_or_no_is_a_probability(make_judge: Any) -> None:
    answer = thinks({"<think>": 0.9}, {"Yes": 0.6, " yes": 0.1, "No": 0.2, "Maybe": 0.1})
    stub, mix = make_judge(lambda _: answer, rubric="yes_no", question="Is {prompt} fun?")
    assert mix.score(clips(1)).terms["judge"][0] == pytest.approx(0.7 / 0.9)
    assert stub.questions[0]["logprobs"] is True and stub.questions[0]["top_logprobs"] == 20
    assert prompt_of(stub.questions[0]) == "Is prompt 0 fun?\nAnswer with one word, Yes or No."


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({}, says("I cannot judge this.")),
        ({}, says("Final Score: 7")),
        ({}, {"choices": []}),
        ({}, ["what"]),
        ({"rubric": "unified"}, says("Alignment Score (1-5): 4\nStyle Score (1-5): 3")),
        ({"rubric": "yes_no"}, says("Yes")),
        ({"rubric": "yes_no"}, thinks({"Maybe": 0.9, "Yes": 0.1})),
        ({"attempts": 1}, 500),
    ],
)
def test_an_answer_without_a_mark_is_a_failed_score(
    make_judge: Any, options: dict[str, Any], answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, mix = make_judge(lambda _: answer, **options)
    with caplog.at_level(logging.WARNING):
        scores = mix.score(clips(1))
    assert np.isnan(scores.terms["judge"]).all() and not scores.valid.any()
    assert "a video was not scored" in caplog.text


def test_an_own_rubric_and_pattern(make_judge: Any) -> None:
    stub, mix = make_judge(
        lambda _: says("beauty=0.25 truth=0.75"),
        rubric="Weigh {prompt} as beauty=x truth=y",
        pattern=r"(?P<part>beauty|truth)=(?P<value>[\d.]+)",
        low=0.0,
        high=1.0,
    )
    assert mix.score(clips(1)).terms["judge"].tolist() == [0.5]
    assert prompt_of(stub.questions[0]) == "Weigh prompt 0 as beauty=x truth=y"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rubric": "nice?"}, "{prompt}"),
        ({"question": "nice?"}, "{prompt}"),
        ({"rubric": "{prompt}", "pattern": "(("}, "cannot be used"),
        ({"rubric": "{prompt}", "pattern": "x"}, "(?P<value>"),
        ({"low": 5.0}, "below high"),
        ({"server": "there"}, "choose one of here"),
        ({"server": ""}, "either server"),
        ({"url": "http://127.0.0.1:1"}, "either server"),
    ],
)
def test_mistakes_in_the_term(make_judge: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(FlashGRPOError) as caught:
        make_judge(lambda _: says(""), **options)
    assert reason in str(caught.value)


def test_a_wrong_key_stops_the_run_and_is_not_shown(make_judge: Any, tmp_path: Path) -> None:
    stub, _ = make_judge(lambda _: says("Final Score: 3"))
    (tmp_path / "key").write_text("sk-other-9876543210")
    term = {"name": "judge", "url": stub.url, "model": "m", "token_file": str(tmp_path / "key")}
    mix = RewardMix([term])
    with pytest.raises(FlashGRPOError, match="401.*bad key") as caught:
        mix.score(clips(1))
    assert "9876543210" not in str(caught.value)
    assert KEY not in repr(find_server("here", "judge"))


def test_every_named_rubric_reads_the_answer_it_asks_for() -> None:
    for name, rubric in RUBRICS.items():
        assert "{prompt}" in rubric.question and rubric.answer, name


# --- the servers file ----------------------------------------------------------------------------


def test_the_servers_file(tmp_path: Path) -> None:
    file = tmp_path / "flashgrpo_servers.json"
    (tmp_path / "token.txt").write_text("  0123456789abcdef\n")
    file.write_text(
        json.dumps(
            {
                "one": {"url": "http://127.0.0.1:8190/"},
                "farm": {"url": ["http://a:1", "https://b"], "token_file": "token.txt"},
                "vlm": {"kind": "judge", "url": "http://127.0.0.1:8000/v1", "model": "m"},
            }
        ),
        encoding="utf-8",
    )
    found = read_servers(file)
    assert found["one"].urls == ("http://127.0.0.1:8190",)
    assert found["farm"].urls == ("http://a:1", "https://b")
    assert found["farm"].token == "0123456789abcdef" and found["vlm"].model == "m"
    before = servers_module.servers_file()
    try:
        use_file(file)
        assert server_names("reward") == ["farm", "one"] and server_names("judge") == ["vlm"]
        with pytest.raises(FlashGRPOError, match="choose one of vlm"):
            find_server("one", "judge")
        use_file(tmp_path / "absent.json")
        assert server_names("reward") == []
        with pytest.raises(FlashGRPOError, match="does not exist"):
            find_server("one", "reward")
    finally:
        use_file(before)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSON"),
        ("[]", "JSON object"),
        ('{"a": "http://x"}', "must be a table"),
        ('{"a": {"url": "http://x", "adress": 1}}', "must be a table of"),
        ('{"a": {"url": "ftp://x"}}', "must be like"),
        ('{"a": {"url": "http://user:pass@x"}}', "must be like"),
        ('{"a": {"url": []}}', "address or a list"),
        ('{"a": {"kind": "oracle", "url": "http://x"}}', "reward, judge"),
        ('{"a": {"url": "http://x", "token_file": "absent"}}', "absent"),
    ],
)
def test_mistakes_in_the_servers_file(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "servers.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FlashGRPOError) as caught:
        read_servers(file)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_line_names_the_file_in_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "servers.json"
    file.write_text('{"one": {"url": "http://127.0.0.1:9"}}')
    monkeypatch.setenv("FLASHGRPO_SERVERS", str(file))
    mix = RewardMix([{"name": "served", "server": "one", "attempts": 1}])
    assert np.isnan(mix.score(clips(1)).total).all()
    monkeypatch.delenv("FLASHGRPO_SERVERS")
    with pytest.raises(FlashGRPOError, match="FLASHGRPO_SERVERS"):
        RewardMix([{"name": "served", "server": "one"}])
