"""Train with run_on = workers: the node follows a real worker as if it trained itself."""

from __future__ import annotations

import shlex
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ComfyServer, Messages, PromptError
from node_graphs import Graph, checkpoint_state, node, train_graph

from flashgrpo_core.runs.queue import Queue
from tests.worker_process import WorkerProcess, events, wait_until


def graph_of(run: str, run_on: str = "workers", **inputs: Any) -> Graph:
    """Two iterations, prompts encoded by a CLIP object that no worker has."""
    graph = train_graph(run, **{"iterations": 2, "evaluate_every": 2, "run_on": run_on, **inputs})
    graph["clip"] = node("TestClip", file="tiny_wan_umt5.safetensors")
    graph["prompts"]["inputs"] |= {"text_encoder": "the connected CLIP", "clip": ["clip", 0]}
    return graph


@pytest.fixture(scope="module")
def started() -> Iterator[list[WorkerProcess]]:
    """Workers that a test has started; they end with the module."""
    workers: list[WorkerProcess] = []
    yield workers
    for worker in workers:
        worker.stop()


def shown_texts(messages: Messages) -> list[str]:
    """The texts that were shown on nodes, in order."""
    texts = []
    for kind, data in messages.drain():
        if kind != "binary" or struct.unpack(">I", data[:4])[0] != 3:  # 3 = progress text
            continue
        length = struct.unpack(">I", data[4:8])[0]  # of the node's name, which comes first
        texts.append(data[8 + length :].decode("utf-8"))
    return texts


def job_of(server: ComfyServer, run: str) -> Any:
    return next(e for e in reversed(Queue(server.output).entries()) if e.job().run == run)


def test_the_node_says_the_command_and_follows(
    probe_server: ComfyServer, started: list[WorkerProcess]
) -> None:
    """Without a worker it waits with the exact command; with one it shows what training here shows."""
    with probe_server.listen() as messages:
        prompt_id = probe_server.submit(graph_of("by_worker"))
        warning = wait_until(
            lambda: next(
                (text for text in shown_texts(messages) if "no worker is running" in text), None
            ),
            what="the message without a worker",
        )
        seen = probe_server.get("/flashgrpo/runs/by_worker")
        assert seen["training"] and warning == seen["warnings"][-1]
        program, *command = shlex.split(warning.partition(": ")[2])
        assert program == "flashgrpo"
        started.append(WorkerProcess(probe_server.output, command=command))
        result = probe_server.wait(prompt_id)
        texts = shown_texts(messages)
    assert result.status == "success", result.error
    for words in ("sampling videos", "judging on held-out prompts", "iteration 2 of 2"):
        assert any(words in text for text in texts), (words, texts)
    assert any(kind == "progress_state" for kind, _ in messages.seen)
    run = probe_server.get("/flashgrpo/runs/by_worker")
    assert run["status"] == "finished" and not run["training"]
    assert [iteration for iteration, _ in run["rewards"]] == [1, 2]
    assert probe_server.request("GET", run["filmstrip"])[1][:3] == b"\xff\xd8\xff"
    names = probe_server.object_info("LoraLoaderModelOnly")["input"]["required"]["lora_name"][0]
    assert [n for n in names if n.startswith("flashgrpo/by_worker/")]
    # The same run, trained here, ends with the same weights.
    probe_server.queue(graph_of("by_comfy", run_on="this ComfyUI"))
    here, there = (
        checkpoint_state(probe_server.output, run, 2) for run in ("by_comfy", "by_worker")
    )
    assert here["optimizer_steps"] == there["optimizer_steps"] == 2
    assert here["weights"] == there["weights"]


def test_cancel_reaches_the_worker(probe_server: ComfyServer, started: list[WorkerProcess]) -> None:
    prompt_id = probe_server.submit(graph_of("cancelled", iterations=500, evaluate_every=0))
    wait_until(
        lambda: any(e["event"] == "iteration" for e in events(probe_server.output, "cancelled"))
    )
    assert probe_server.get("/flashgrpo/runs/cancelled")["phase"] != "wait"
    pressed = time.monotonic()
    probe_server.interrupt()
    assert probe_server.wait(prompt_id).interrupted
    job = job_of(probe_server, "cancelled")
    wait_until(job.result, 30, "the end of the job")
    assert time.monotonic() - pressed < 30
    assert job.result()["status"] == "stopped"
    ends = [e for e in events(probe_server.output, "cancelled") if e["event"] == "run_finished"]
    assert [e["status"] for e in ends] == ["stopped"]
    assert started[0].process.poll() is None, started[0].log()


def test_comfyui_restarts_and_follows_again(
    probe_server: ComfyServer, started: list[WorkerProcess]
) -> None:
    """The worker goes on meanwhile; the monitor knows, another way to train the run is refused."""
    run, output = "followed_again", probe_server.output
    probe_server.submit(graph_of(run, iterations=500, evaluate_every=0))
    wait_until(lambda: any(e["event"] == "iteration" for e in events(output, run)))
    probe_server.restart()
    before = max(e["iteration"] for e in events(output, run))
    listed = probe_server.get(f"/flashgrpo/runs/{run}")
    assert listed["training"] and listed["node_id"] is None
    with pytest.raises(PromptError) as failure:
        probe_server.queue(graph_of(run, run_on="this ComfyUI", iterations=500, evaluate_every=0))
    assert "is in the queue of the workers" in failure.value.details["exception_message"]
    with pytest.raises(PromptError) as failure:
        probe_server.queue(graph_of(run, iterations=500, evaluate_every=0, seed=4))
    assert "run.seed: 3 -> 4" in failure.value.details["exception_message"]
    prompt_id = probe_server.submit(graph_of(run, iterations=500, evaluate_every=0))
    wait_until(lambda: probe_server.get(f"/flashgrpo/runs/{run}")["node_id"] == "train")
    assert probe_server.request("POST", f"/flashgrpo/runs/{run}/finish")[0] == 200
    result = probe_server.wait(prompt_id)
    assert result.status == "success", result.error
    found = events(output, run)
    assert len([e for e in found if e["event"] == "job"]) == 1, "a second job was submitted"
    ends = [e for e in found if e["event"] == "run_finished"]
    assert [e["status"] for e in ends] == ["finished"]
    assert before <= ends[0]["iteration"] < 500
    assert (Path(output) / "loras" / "flashgrpo" / run).is_dir()


def test_a_failure_names_its_reason(
    probe_server: ComfyServer, started: list[WorkerProcess]
) -> None:
    """A worker that lacks a model file says which, on the node."""
    graph = graph_of("no_file")
    transformer = probe_server.models / "diffusion_models" / "only_here.safetensors"
    shared = probe_server.models / "diffusion_models" / "tiny_wan_t2v.safetensors"
    transformer.write_bytes(shared.read_bytes())
    graph["policy"]["inputs"] |= {
        "diffusion_model": "only_here.safetensors",
        "vae": "tiny_wan_vae.safetensors",
    }
    started[0].send(19)  # SIGSTOP: the file must be gone before the worker looks for it
    prompt_id = probe_server.submit(graph)
    wait_until(lambda: Queue(probe_server.output).active("no_file"))
    transformer.unlink()
    started[0].send(18)  # SIGCONT
    result = probe_server.wait(prompt_id)
    assert result.error and "only_here.safetensors" in result.error["exception_message"]
    assert probe_server.get("/flashgrpo/runs/no_file")["status"] == "failed"
