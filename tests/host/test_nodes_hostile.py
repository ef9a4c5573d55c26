"""Hostile workflows: every bad value is rejected by name, nothing leaves the folders, all goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import ComfyServer
from node_graphs import TINY, Graph, node, policy, prompts, step_graph, video

NAN, INFINITY = float("nan"), float("inf")

#: Names that lead out of their folder, or are no name at all.
PATHS = [
    "../evil",
    "..\\evil",
    "../../../../../../tmp/evil",
    "sub/../../evil",
    "/tmp/evil",
    "/etc/passwd",
    "C:\\evil",
    "C:evil",
    "\\\\server\\share\\evil",
    "//server/share/evil",
    "evil\0.safetensors",
    "\0",
    "evil\n",
    "a" * 10_000,
    "b" * 300,
    "..",
    ".",
    "",
    " ",
    "con",
    "nul.txt",
    "evil?",
    "evil:stream",
    "\ud800",
    "%2e%2e%2fevil",
]
#: Values that are in no list.
CHOICES = ["", "../../etc/passwd", "/etc/passwd", "C:\\x.safetensors", "no such", "x" * 10_000, 7]
NUMBERS = [NAN, INFINITY, -INFINITY, 1e300, -1e300]
LITERALS: list[Any] = ["text", 5, None, {}, {"a": 1}, True]


@dataclass
class Case:
    """One prompt that must be rejected at `where`; `value` is what the message must show."""

    where: str
    field: str
    value: Any
    graph: Graph


def shown(graph: Graph, source: str, output: int = 0) -> Graph:
    """The graph with an output node behind `source`, so that it runs."""
    return {**graph, "end": node("TestText", text="", after=[source, output])} | {
        "show": node("PreviewAny", source=["end", 0])
    }


def bases() -> dict[str, Graph]:
    """A small runnable graph for each node under attack; the node's own id is the key."""
    frozen = node("FlashGRPOFrozenLora", lora="good.safetensors", strength=1.0)
    encode = node("FlashGRPOEncodePrompt", text="a red circle", text_encoder=TINY)
    save = node(
        "FlashGRPOSaveLora",
        lora=["load", 1],
        name="fine",
        key_format="comfyui",
        weights="live",
    )
    load = node("FlashGRPOLoadRun", run_name="hostile")
    reward = node("FlashGRPORewardMotion", weight=1.0, enough=0.5, short_side=128)
    technical = {key: 1.0 for key in ("blur", "noise", "exposure", "flicker", "freeze")}
    quality = node("FlashGRPORewardTechnical", weight=1.0, short_side=512, **technical)
    return {
        "policy": shown({"policy": policy("fresh")}, "policy"),
        "prompts": shown({"prompts": prompts()}, "prompts"),
        "video": shown({"video": video()}, "video"),
        "frozen": shown({"frozen": frozen}, "frozen"),
        "encode": shown({"encode": encode}, "encode"),
        "load": {"load": load},
        "save": {"load": load, "save": save},
        "motion": shown({"motion": reward}, "motion"),
        "technical": shown({"technical": quality}, "technical"),
    }


def cases() -> Iterator[Case]:
    """All attacks."""
    targets = {
        # node: (names of files and runs, choices, numbers)
        "policy": (
            ["run_name"],
            ["diffusion_model", "low_noise_model", "vae", "dtype", "continue_from"],
            ["lora_rank", "lora_alpha"],
        ),
        "prompts": ([], ["source", "text_encoder"], ["validation_share", "test_share"]),
        "video": ([], ["preset"], ["width", "fps", "shift", "micro_batch"]),
        "frozen": ([], ["lora"], ["strength"]),
        "encode": ([], ["text_encoder"], []),
        "load": (["run_name"], [], []),
        "save": (["name"], ["key_format", "weights"], []),
        "motion": ([], [], ["weight", "enough", "short_side"]),
        "technical": ([], [], ["blur"]),
    }
    for where, (names, choices, numbers) in targets.items():
        for field, values in [
            *((name, PATHS) for name in names),
            *((choice, CHOICES) for choice in choices),
            *((number, NUMBERS) for number in numbers),
        ]:
            for value in values:
                yield case(where, field, value)
        # The same through a link, where ComfyUI's validation does not look.
        for field in names:
            for value in ("../evil", "/tmp/evil", "", "x" * 600):
                yield linked(where, field, value)
        for field in choices:
            yield linked(where, field, "../../etc/passwd")
        for field in numbers:
            for value in (NAN, INFINITY, -1e300):
                yield linked(where, field, value)
    for where, field in (
        ("policy", "frozen_loras"),
        ("motion", "previous"),
        ("frozen", "previous"),
    ):
        for value in LITERALS:
            if value is not None:  # an optional input without a value
                yield case(where, field, value)
    for value in LITERALS:
        yield case("save", "lora", value)
    for where, field, value in (
        ("policy", "lora_targets", "nothing, at all"),
        ("policy", "lora_targets", " , "),
        ("prompts", "text", ""),
        ("prompts", "text", "# only a comment"),
        ("video", "width", 65),
        ("video", "frames", 8),
        ("video", "guidance", 0.5),
    ):
        yield case(where, field, value)


def case(where: str, field: str, value: Any) -> Case:
    graph = bases()[where]
    graph[where]["inputs"][field] = value
    return Case(where, field, value, graph)


def linked(where: str, field: str, value: str | float) -> Case:
    graph = bases()[where]
    if isinstance(value, str):
        graph["link"] = node("TestText", text=value)
    else:
        graph["link"] = node("TestNumber", value=str(value))
    graph[where]["inputs"][field] = ["link", 0]
    return Case(where, field, value, graph)


@pytest.fixture(scope="module")
def server(probe_server: ComfyServer) -> ComfyServer:
    """A server with one step taken by the run `hostile`, and a LoRA in the loras folder."""
    graph = step_graph("hostile")
    graph["save"] = node(
        "FlashGRPOSaveLora",
        lora=["step", 0],
        name="hostile",
        key_format="comfyui",
        weights="live",
    )
    name = probe_server.queue(graph).outputs["save"]["text"][0]
    good = probe_server.models / "loras" / "good.safetensors"
    good.write_bytes((probe_server.output / "loras" / name).read_bytes())
    return probe_server


def files_of(server: ComfyServer) -> set[str]:
    """Every file around the server, except those it may write."""
    root = server.base.parent
    allowed = (server.output / "flashgrpo", server.temp, server.user, server.output / "loras")
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if not any(path.is_relative_to(folder) for folder in allowed)
        and "__pycache__" not in path.parts
    }


def test_every_attack_is_rejected_by_name(server: ComfyServer) -> None:
    attacks = list(cases())
    assert len(attacks) >= 200
    before, loras = files_of(server), set((server.output / "loras").rglob("*"))
    waiting: dict[str, Case] = {}
    refused = 0
    for attack in attacks:
        status, answer = server.post("/prompt", {"prompt": attack.graph})
        if status != 200 or attack.where in answer["node_errors"]:
            refused += 1
        else:
            waiting[answer["prompt_id"]] = attack
    results = finished(server, waiting)
    wrong = []
    for prompt_id, attack in waiting.items():
        error = results[prompt_id].error
        if error is None:
            wrong.append((attack.where, attack.field, str(attack.value)[:60], "accepted"))
            continue
        message, kind = error["exception_message"], error["exception_type"]
        good = kind.endswith("FlashGRPOError") and len(message) < 700
        if not good or error["node_id"] != attack.where or not names_the_fix(message, attack):
            text = (attack.where, attack.field, str(attack.value)[:60], error["node_id"], message)
            wrong.append(text)
    assert not wrong, "\n".join(map(str, wrong))
    assert refused + len(waiting) == len(attacks)
    assert files_of(server) == before
    assert set((server.output / "loras").rglob("*")) == loras
    assert not Path("/tmp/evil").exists() and not list(Path("/tmp").glob("evil*"))
    # The server lives, and works.
    server.queue(step_graph("after_all"))


def finished(server: ComfyServer, waiting: dict[str, Case]) -> dict[str, Any]:
    """The results of all prompts, once the last one is done: the queue is worked off in order."""
    server.wait(list(waiting)[-1], timeout=900)
    return {prompt_id: server.wait(prompt_id) for prompt_id in waiting}


def names_the_fix(message: str, attack: Case) -> bool:
    """The message shows the value (or its field) and says what to do or what is allowed."""
    advice = (
        "choose", "must be", "is outside", "not usable", "holds", "shorten", "connect", "write",
        "use ", "set ", "does not exist", "the limit is", "type it again",
    )  # fmt: skip
    value = repr(attack.value)[1:20] if isinstance(attack.value, str) else str(attack.value)
    named = attack.field.lower() in message.lower() or value in message
    return named and any(words in message for words in advice)


def test_links_out_of_the_folders(server: ComfyServer, tmp_path: Path) -> None:
    """Symbolic links that lead out are not followed, neither for reading nor for writing."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("a red circle moving left\n", encoding="utf-8")
    (server.input / "linked.txt").symlink_to(outside / "secret.txt")
    (server.output / "flashgrpo" / "runs" / "linked").symlink_to(outside)
    (server.output / "loras" / "linked").symlink_to(outside)
    assert (
        "linked.txt"
        not in server.object_info("FlashGRPOPrompts")["input"]["required"]["source"][1]["options"]
    )
    attacks = [
        case("prompts", "source", "linked.txt"),
        case("policy", "run_name", "linked"),
        case("load", "run_name", "linked"),
        case("save", "name", "linked/evil"),
    ]
    for attack in attacks:
        error = server.wait(server.submit(attack.graph)).error
        assert error is not None and error["node_id"] == attack.where, attack
        assert error["exception_type"].endswith("FlashGRPOError")
    assert [path.name for path in outside.iterdir()] == ["secret.txt"]


@pytest.mark.parametrize("image", ["../secret.png", "/etc/passwd", "C:\\secret.png", "gone.png"])
def test_start_images_stay_in_the_input_folder(server: ComfyServer, image: str) -> None:
    import json

    (server.input.parent / "secret.png").write_bytes(b"secret")
    lines = [{"prompt": "a red circle moving left", "image": image}, {"prompt": "another"}]
    text = "\n".join(json.dumps(line) for line in lines)
    (server.input / "images.jsonl").write_text(text, encoding="utf-8")
    attack = case("prompts", "source", "images.jsonl")
    error = server.wait(server.submit(attack.graph)).error
    assert error is not None and error["exception_type"].endswith("FlashGRPOError")
    assert image[-8:] in error["exception_message"] or ".." in error["exception_message"]
