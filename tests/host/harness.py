"""Drive the real ComfyUI: as a server in a child process, or its modules in one short script.

`ComfyServer` starts ComfyUI on a free loopback port and talks to it over HTTP; `run_in_comfy` runs a
Python snippet with ComfyUI's modules importable. Both use child processes, so that ComfyUI's global
state never enters pytest's own process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fetch import comfy_tree

HOST = "127.0.0.1"
LAUNCHER = Path(__file__).with_name("launch_comfy.py")
PACK_FOLDER = "flashgrpo"
# A path as people have it: a space and a letter outside ASCII.
BASE_NAME = "Größe nodes"


class PromptError(AssertionError):
    """A prompt was refused or failed; `details` is ComfyUI's own answer."""

    def __init__(self, message: str, details: Any) -> None:
        super().__init__(f"{message}\n{json.dumps(details, indent=1, ensure_ascii=False)[:6000]}")
        self.details = details


@dataclass
class PromptResult:
    """What ComfyUI's history says about one prompt."""

    prompt_id: str
    status: str
    outputs: dict[str, Any]
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def message(self, name: str) -> dict[str, Any] | None:
        """Return the last status message `name`, e.g. `execution_error` or `execution_cached`."""
        found = [data for kind, data in self.messages if kind == name]
        return found[-1] if found else None

    @property
    def error(self) -> dict[str, Any] | None:
        """The failing node's record (`node_type`, `exception_message`, ...), or None."""
        return self.message("execution_error")

    @property
    def interrupted(self) -> bool:
        """Whether the user's cancel ended the prompt."""
        return self.message("execution_interrupted") is not None

    @property
    def cached(self) -> set[str]:
        """Ids of the nodes whose result came from the cache."""
        return set((self.message("execution_cached") or {}).get("nodes", []))


class ComfyServer:
    """One ComfyUI server process and its folders.

    Args:
        folder: ComfyUI's base directory is made inside it. What already lies in its
            `custom_nodes` (the pack) is loaded at the start.
        frontend_root: another built frontend than the installed one.
        arguments: further ComfyUI arguments.
    """

    def __init__(
        self,
        folder: Path,
        *,
        frontend_root: Path | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.base = folder / BASE_NAME
        self.models = self.base / "models"
        self.input = self.base / "input"
        self.output = self.base / "output"
        self.temp = self.base / "temp"
        self.user = self.base / "user"
        self.custom_nodes = self.base / "custom_nodes"
        kinds = ("diffusion_models", "vae", "text_encoders", "loras", "clip_vision")
        for path in (self.input, self.output, self.temp, self.user, self.custom_nodes):
            path.mkdir(parents=True, exist_ok=True)
        for kind in kinds:
            (self.models / kind).mkdir(parents=True, exist_ok=True)
        self._frontend_root = frontend_root
        self._arguments = arguments
        self._log_path = self.base / "comfyui.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.client_id = uuid.uuid4().hex

    # --- process ---------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Address of the web interface."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self, timeout: float = 300.0) -> ComfyServer:
        """Start the process and wait until it answers.

        Raises:
            AssertionError: when it ends or stays silent; the message carries its log.
        """
        assert self._process is None, "the server is already running"
        command = [sys.executable, "-u", str(LAUNCHER), str(comfy_tree()), "--cpu"]
        command += ["--listen", HOST, "--port", str(self.port), "--disable-auto-launch"]
        command += ["--base-directory", str(self.base), "--disable-api-nodes"]
        command += ["--database-url", "sqlite:///:memory:"]
        if self._frontend_root is not None:
            command += ["--front-end-root", str(self._frontend_root)]
        command += self._arguments
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.base,
                env=_child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + timeout
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise AssertionError(f"ComfyUI did not start:\n{self.log()[-6000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.get("/system_stats")
                return self
            time.sleep(0.2)

    def stop(self) -> None:
        """End the process; the folders stay."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def kill(self) -> None:
        """End the process the hard way, as a power cut does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """Stop and start again: an empty cache, the same folders and address."""
        self.stop()
        self.start()

    def log(self) -> str:
        """Return everything that the server has printed so far."""
        if not self._log_path.exists():
            return ""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    # --- HTTP ------------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send one request and return (status, body)."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            payload = None if body is None else json.dumps(body)
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, quote(path, safe="/?&=%"), payload, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """GET a JSON resource; anything but status 200 is an error."""
        status, body = self.request("GET", path)
        assert status == 200, f"GET {path}: {status} {body[:500]!r}"
        return json.loads(body)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """POST JSON and return (status, decoded answer or None)."""
        status, answer = self.request("POST", path, body)
        return status, json.loads(answer) if answer.strip().startswith((b"{", b"[")) else None

    def object_info(self, node: str | None = None) -> dict[str, Any]:
        """Return ComfyUI's description of all node types, or of one."""
        if node is None:
            return self.get("/object_info")
        return self.get(f"/object_info/{node}").get(node, {})

    # --- prompts ---------------------------------------------------------------------------------

    def submit(self, prompt: dict[str, Any], **extra: Any) -> str:
        """Queue an API-format prompt and return its id.

        Raises:
            PromptError: ComfyUI's validation refused it.
        """
        body = {"prompt": prompt, "client_id": self.client_id, **extra}
        status, answer = self.post("/prompt", body)
        if status != 200:
            raise PromptError(f"the prompt was refused with status {status}", answer)
        return answer["prompt_id"]

    def result(self, prompt_id: str) -> PromptResult | None:
        """Return the finished prompt's record, or None while it waits or runs."""
        record = self.get(f"/history/{prompt_id}").get(prompt_id)
        if record is None:
            return None
        status = record["status"]
        messages = [(kind, data) for kind, data in status["messages"]]
        return PromptResult(prompt_id, status["status_str"], record["outputs"], messages)

    def wait(self, prompt_id: str, timeout: float = 300.0) -> PromptResult:
        """Wait for a prompt's end, however it ends."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self._process is None or self._process.poll() is not None:
                raise AssertionError(f"ComfyUI ended during a prompt:\n{self.log()[-6000:]}")
            result = self.result(prompt_id)
            if result is not None:
                return result
            time.sleep(0.1)
        raise AssertionError(
            f"prompt not finished after {timeout:.0f} s; log:\n{self.log()[-4000:]}"
        )

    def queue(self, prompt: dict[str, Any], timeout: float = 300.0) -> PromptResult:
        """Queue a prompt and wait; return its record when it succeeded.

        Raises:
            PromptError: it was refused, failed or was interrupted.
        """
        result = self.wait(self.submit(prompt), timeout)
        if result.status != "success":
            raise PromptError("the prompt failed", result.error or result.messages)
        return result

    def wait_running(self, prompt_id: str, timeout: float = 60.0) -> None:
        """Wait until the prompt has left the queue and runs."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if any(entry[1] == prompt_id for entry in self.get("/queue")["queue_running"]):
                return
            assert self.result(prompt_id) is None, "the prompt ended before it was seen running"
            time.sleep(0.02)
        raise AssertionError(f"prompt not running after {timeout:.0f} s")

    def interrupt(self) -> None:
        """Press Cancel."""
        self.post("/interrupt", {})

    def free(self) -> None:
        """Ask for models and caches to be released before the next prompt."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    @contextlib.contextmanager
    def listen(self, client_id: str | None = None) -> Iterator[Messages]:
        """Collect websocket messages while the block runs."""
        messages = Messages(f"ws://{HOST}:{self.port}/ws?clientId={client_id or self.client_id}")
        try:
            yield messages
        finally:
            messages.close()


class Messages:
    """Websocket messages of one client, collected by a thread of its own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self.seen: list[tuple[str, Any]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30), "no websocket connection within 30 s"

    def wait_for(self, name: str, timeout: float = 60.0) -> Any:
        """Return the data of the next message `name`; `binary` is a preview image's bytes."""
        end = time.monotonic() + timeout
        while True:
            try:
                kind, data = self._queue.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                kinds = [kind for kind, _ in self.seen]
                raise AssertionError(f"no {name!r} within {timeout:.0f} s; saw {kinds}") from None
            self.seen.append((kind, data))
            if kind == name:
                return data

    def drain(self) -> list[tuple[str, Any]]:
        """Return every message that has arrived so far, in order."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.seen.append(self._queue.get_nowait())
        return self.seen

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        import asyncio

        asyncio.run(self._collect())

    async def _collect(self) -> None:
        import aiohttp

        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(self._address, max_msg_size=0) as socket_,
        ):
            self._ready.set()
            while not self._stop.is_set():
                try:
                    message = await socket_.receive(timeout=0.2)
                except TimeoutError:
                    continue
                if message.type == aiohttp.WSMsgType.TEXT:
                    record = json.loads(message.data)
                    self._queue.put((record["type"], record.get("data")))
                elif message.type == aiohttp.WSMsgType.BINARY:
                    self._queue.put(("binary", message.data))
                else:
                    return


def run_in_comfy(
    script: str, folder: Path, *, pack: Path | None = None, timeout: float = 300.0, **values: Any
) -> dict[str, Any]:
    """Run a Python snippet in a child process in which ComfyUI's modules can be imported.

    The snippet sees `values` (JSON) as variables and reports by calling `report(name=value, ...)`.
    With `pack` it also has `pack`: the node pack imported as ComfyUI imports it.

    Returns:
        Everything that was reported, and `log`: what the process printed.

    Raises:
        AssertionError: the process failed; the message carries what it printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / BASE_NAME
    base.mkdir(exist_ok=True)
    answer = folder / f"answer-{uuid.uuid4().hex}.json"
    program = folder / f"script-{uuid.uuid4().hex}.py"
    job = {
        "tree": str(comfy_tree()),
        "base": str(base),
        "pack": None if pack is None else str(pack),
        "answer": str(answer),
        "values": values,
    }
    program.write_text(
        f"JOB = {json.dumps(job)!r}\n{_PRELUDE}\n{textwrap.dedent(script)}\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=base,
        env=_child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        check=False,
    )
    text = done.stdout.decode("utf-8", errors="replace")
    assert done.returncode == 0, f"the script ended with status {done.returncode}:\n{text[-6000:]}"
    reported = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    return {**reported, "log": text}


# ComfyUI's tree comes first on the path: its own `nodes` module must win over every other.
_PRELUDE = """
import json as _json
import logging
import os
import sys

_job = _json.loads(JOB)
sys.path[0] = _job["tree"]
sys.argv = ["main.py", "--cpu", "--base-directory", _job["base"], "--disable-api-nodes"]

import comfy.options

comfy.options.enable_args_parsing()
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
_reported = {}


def report(**values):
    _reported.update(values)
    with open(_job["answer"], "w", encoding="utf-8") as file:
        _json.dump(_reported, file)


def _load_pack(folder):
    # The name that ComfyUI 0.3.75 gives a pack: its full path with the dots replaced.
    import importlib.util

    sys.modules["flashgrpo_core"] = None
    name = folder.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


globals().update(_job["values"])
if _job["pack"]:
    pack = _load_pack(_job["pack"])
"""


def _child_environment() -> dict[str, str]:
    """Environment of a ComfyUI process: never a hub, no folder of ours on the module path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUTF8": "1"}
    environment.setdefault("OMP_NUM_THREADS", "2")
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
