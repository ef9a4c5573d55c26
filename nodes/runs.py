"""Nodes for results: save a LoRA, look at a run."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import InputImpl, io, ui

from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.experts import HIGH, LOW
from ..flashgrpo_core.files import resolve_inside
from ..flashgrpo_core.runs.events import read_events
from ..flashgrpo_core.runs.folder import RunFolder, list_runs
from ..flashgrpo_core.wan.lora import LORA_FORMATS
from . import host, pictures, pool
from .checks import check_lora_name
from .lora_files import newest_loras, write_lora_model, write_policy_loras
from .pictures import to_image
from .settings import run_folder
from .values import Policy, PolicyType, Run, RunType
from .widgets import CATEGORY, advanced, run_name


class SaveLora(host.ComfyNode):
    """Writes a LoRA file that the stock loaders list."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOSaveLora",
            display_name="Save LoRA",
            category=CATEGORY,
            is_output_node=True,
            description="Writes a LoRA into output/loras, where LoraLoader lists it (press R to "
            "refresh the lists). A file of that name is never overwritten.",
            inputs=[
                io.MultiType.Input(
                    "lora",
                    types=[io.LoraModel, PolicyType],
                    tooltip="The LoRA of Train or Load Run, or a policy after a Train Step.",
                ),
                io.String.Input(
                    "name",
                    default="flashgrpo/my_lora",
                    tooltip="File name without ending, below output/loras; '/' makes a subfolder.",
                ),
                io.Combo.Input(
                    "key_format",
                    options=list(LORA_FORMATS),
                    default="comfyui",
                    tooltip="Key names: comfyui for ComfyUI, kohya for its tools (ComfyUI reads them "
                    "too), diffusers for Python scripts.",
                ),
                advanced(
                    io.Combo.Input(
                        "weights",
                        options=["live", "ema"],
                        default="live",
                        tooltip="Which weights of a policy: live (now) or ema (their moving average, "
                        "smoother after many steps). A LoRA has only one kind.",
                    )
                ),
            ],
            outputs=[
                io.String.Output(
                    display_name="lora_name", tooltip="The name as LoraLoader lists it."
                ),
                io.String.Output(
                    display_name="lora_name_low_noise",
                    tooltip="Likewise for the low-noise expert of a policy with two; else blocked.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls, lora: Policy | dict[str, torch.Tensor], name: str, key_format: str, weights: str
    ) -> io.NodeOutput:
        """Write the file under a name that nothing else has."""
        check_lora_name(name)
        # Written beside first: the target must appear complete, and only when its name is free.
        draft = host.temp_folder("loras") / f"{uuid.uuid4().hex}.safetensors"
        written = {"": draft}
        if isinstance(lora, Policy):
            written = write_policy_loras(draft, lora, key_format, weights)
        else:
            write_lora_model(draft, lora, key_format)
        listed = {}
        try:
            for expert, path in written.items():
                listed[expert] = host.publish_lora(path, f"{name}_{expert}" if expert else name)
        finally:
            for path in written.values():
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)
        first = listed.get(HIGH) or listed.get("")
        return io.NodeOutput(
            first or host.blocked(),
            listed.get(LOW) or host.blocked(),
            ui={"text": tuple(listed.values())},
        )


class LoadRun(host.ComfyNode):
    """The result of a run on disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOLoadRun",
            display_name="Load Run",
            category=CATEGORY,
            is_output_node=True,
            description="The newest LoRA, the curve and the sample videos of a run in "
            "output/flashgrpo/runs.",
            inputs=[run_name("my_run")],
            outputs=[
                RunType.Output(display_name="run"),
                io.LoraModel.Output(display_name="lora"),
                io.Image.Output(display_name="curve"),
                io.Video.Output(display_name="samples", is_output_list=True),
                io.LoraModel.Output(
                    display_name="lora_low_noise",
                    tooltip="LoRA of the low-noise expert; blocked when there is none.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, run_name: str, **_: Any) -> list[Any]:
        """The state of the run's log."""
        try:
            return [*pool.stamp(run_folder(run_name).events)]
        except (FlashGRPOError, OSError) as exc:
            return [str(exc)]

    @classmethod
    def execute(cls, run_name: str) -> io.NodeOutput:
        """Read the run folder."""
        folder = run_folder(run_name)
        if not folder.exists():
            known = ", ".join(run.name for run in list_runs(folder.output)[:8]) or "none yet"
            raise FlashGRPOError(f"run {run_name!r} does not exist; runs here: {known}")
        events = read_events(folder.events)
        picture = to_image(pictures.curve(events, f"{run_name}: {folder.status()}"))
        samples = [InputImpl.VideoFromFile(str(path)) for path in _newest_samples(folder)]
        iteration = max((e.get("iteration") or 0 for e in events), default=0)
        loras = newest_loras(folder)
        return io.NodeOutput(
            Run(run_name, iteration),
            loras.get(HIGH) or loras.get("") or host.blocked(),
            picture,
            samples or [host.blocked()],
            loras.get(LOW) or host.blocked(),
            ui=ui.PreviewImage(picture),
        )


def _newest_samples(folder: RunFolder) -> list[Path]:
    """The videos of the newest evaluation."""
    entries = folder.read_samples()
    newest = max((entry["iteration"] for entry in entries), default=0)
    files = [resolve_inside(folder.samples, e["file"]) for e in entries if e["iteration"] == newest]
    return [file for file in files if file.is_file()]
