"""Cancel and out of memory in every phase: the run can be resumed and nothing stays in memory."""

from __future__ import annotations

import struct
import time

import pytest
from harness import ComfyServer, Messages
from node_graphs import Graph, checkpoint_state, live, node, step_graph, train_graph, trouble

#: Phase -> what the text below the node says, and the work that is slowed down to be hit.
PHASES = {
    "rollout": ("sampling videos", "rollout"),
    "decode": ("scoring videos", "decode"),
    "score": ("scoring videos", "score"),
    "backward": ("updating the LoRA", "update"),
    "save": ("saving", "save"),
}
#: A piece of slowed work; after it a cancel must take effect.
PIECE = 0.5
#: Seconds after which a cancel counts as ignored, on a machine that does much else.
BOUND = 30.0


def short_graph(run: str) -> Graph:
    """Two iterations without evaluations."""
    graph = train_graph(run, iterations=2, evaluate_every=0)
    graph["advanced"]["inputs"]["test_prompts"] = 0
    return graph


@pytest.fixture(scope="module")
def undisturbed(probe_server: ComfyServer) -> str:
    """Hash of the LoRA after two iterations without trouble."""
    probe_server.queue(short_graph("undisturbed"))
    return checkpoint_state(probe_server.output, "undisturbed", 2)["weights"]


def wait_for_text(messages: Messages, text: str, after: str = "") -> None:
    """Wait until the node shows a text; with `after` only once that text has been shown."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        data = messages.wait_for("binary", timeout=240)
        if struct.unpack(">I", data[:4])[0] != 3:  # 3 = progress text
            continue
        shown = data[8:].decode("utf-8", errors="replace")
        if after:
            after = "" if after in shown else after
        elif text in shown:
            return
    raise AssertionError(f"{text!r} was never shown")


def assert_nothing_left(server: ComfyServer) -> None:
    left = live(server)
    for name in ("WanTransformer3DModel", "AutoencoderKLWan", "UMT5EncoderModel", "Resident"):
        assert left[name] == 0, left


@pytest.mark.parametrize("phase", PHASES)
def test_cancel(probe_server: ComfyServer, undisturbed: str, phase: str) -> None:
    text, work = PHASES[phase]
    run = f"cancel_{phase}"
    trouble(probe_server, work, seconds=PIECE)
    with probe_server.listen() as messages:
        prompt_id = probe_server.submit(short_graph(run))
        # In the second iteration: the first is saved and must survive. Once the second is saved
        # the run is done, so a cancel in that phase comes in the first.
        wait_for_text(messages, text, after=f"iteration {1 if phase == 'save' else 2} of 2")
        pressed = time.monotonic()
        probe_server.interrupt()
        result = probe_server.wait(prompt_id)
    assert result.interrupted, result.messages
    assert time.monotonic() - pressed < BOUND
    trouble(probe_server, "none")
    assert_nothing_left(probe_server)
    listed = probe_server.get(f"/flashgrpo/runs/{run}")
    assert listed["status"] == "unfinished" and not listed["training"]
    assert checkpoint_state(probe_server.output, run, 1)["optimizer_steps"] == 1
    probe_server.queue(short_graph(run))
    assert checkpoint_state(probe_server.output, run, 2)["weights"] == undisturbed


@pytest.mark.parametrize("work", ["rollout", "decode", "update"])
def test_out_of_memory_in_train(probe_server: ComfyServer, undisturbed: str, work: str) -> None:
    run = f"memory_{work}"
    trouble(probe_server, work, left=3)
    error = probe_server.wait(probe_server.submit(short_graph(run))).error
    assert error is not None
    phase = {"rollout": "rollout", "decode": "score", "update": "update"}[work]
    message = error["exception_message"]
    assert f"out of memory in the {phase} phase: 2.50 GiB was needed" in message
    assert "lower" in message and "queue again to go on" in message
    trouble(probe_server, "none")
    assert_nothing_left(probe_server)
    probe_server.queue(short_graph(run))
    assert checkpoint_state(probe_server.output, run, 2)["weights"] == undisturbed


def test_cancel_in_single_steps(probe_server: ComfyServer) -> None:
    trouble(probe_server, "rollout", seconds=PIECE)
    with probe_server.listen() as messages:
        prompt_id = probe_server.submit(step_graph("cancel_step"))
        wait_for_text(messages, "sampling videos")
        probe_server.interrupt()
        result = probe_server.wait(prompt_id)
    assert result.interrupted
    trouble(probe_server, "none")
    assert_nothing_left(probe_server)
    probe_server.queue(step_graph("cancel_step"))
    assert checkpoint_state(probe_server.output, "cancel_step", 1)["optimizer_steps"] == 1


def test_finish_now(probe_server: ComfyServer) -> None:
    """Stops after the current iteration, judges it, and returns the LoRA."""
    trouble(probe_server, "rollout", seconds=PIECE)
    graph = train_graph("finished_early", iterations=50, evaluate_every=50)
    graph["show"] = node("PreviewImage", images=["train", 3])
    with probe_server.listen() as messages:
        prompt_id = probe_server.submit(graph)
        wait_for_text(messages, "updating the LoRA", after="iteration 1 of 50")
        run = probe_server.get("/flashgrpo/runs/finished_early")
        assert run["training"] and run["node_id"] == "train" and run["phase"]
        status, _ = probe_server.post("/flashgrpo/runs/finished_early/finish", None)
        assert status == 200
        trouble_free = probe_server.wait(prompt_id)
    trouble(probe_server, "none")
    assert trouble_free.status == "success"
    run = probe_server.get("/flashgrpo/runs/finished_early")
    assert run["status"] == "finished" and 1 <= run["iteration"] < 50
    assert [row[0] for row in run["validation"]] == [0, run["iteration"]]
    # Another queue gives the same result instead of training on.
    probe_server.queue(graph)
    assert probe_server.get("/flashgrpo/runs/finished_early")["iteration"] == run["iteration"]
