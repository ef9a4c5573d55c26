"""The only module that touches ComfyUI: folders, memory, progress, cancel, and every `execute`.

All nodes derive from `ComfyNode` here, which wraps `execute` once: inference mode is switched off
(networks and adapters made under it could never be trained), inputs are checked, and after an
error or a cancel nothing of ours stays in memory.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import re
import traceback
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import comfy.model_management as memory
import comfy.utils
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image

from ..flashgrpo_core.errors import Cancelled, FlashGRPOError
from ..flashgrpo_core.files import resolve_inside, sha256_file, write_bytes_atomic
from ..flashgrpo_core.wan.storage import resident_bytes
from .checks import check_inputs, check_list_inputs, copy_new
from .values import CLASSES

log = logging.getLogger(__name__)

TINY_CHOICE = "tiny (embedded)"
NONE_CHOICE = "none"
#: The only choice where no model is found.
NO_MODEL = "none found"
Interrupted = memory.InterruptProcessingException

#: Called after an error or a cancel, before it reaches ComfyUI.
on_failure: list[Callable[[], None]] = []


class _Running:
    """The node that runs now, and its phase: for messages."""

    node_id: str | None = None
    phase: str = "load"
    #: Whether it has loaded or moved a network, so that memory must be collected after a failure.
    heavy: bool = False


running = _Running()

folder_paths.add_model_folder_path(
    "flashgrpo_rewards", os.path.join(folder_paths.models_dir, "flashgrpo_rewards")
)


class ComfyNode(io.ComfyNode):
    """Base of all nodes of the pack; wraps `execute` of each subclass."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = cls.__dict__.get("execute")
        # ComfyUI subclasses a node for each run; what it copies is wrapped already.
        if isinstance(own, classmethod) and not hasattr(own.__func__, "__wrapped__"):
            cls.execute = classmethod(_guarded(own.__func__))


def _guarded(function: Callable[..., io.NodeOutput]) -> Callable[..., io.NodeOutput]:
    @functools.wraps(function)
    def execute(cls: type[ComfyNode], **inputs: Any) -> io.NodeOutput:
        running.node_id = getattr(getattr(cls, "hidden", None), "unique_id", None)
        running.phase, running.heavy = "load", False
        failure: BaseException
        try:
            with torch.inference_mode(False), torch.enable_grad():
                schema = cls.define_schema()
                check = check_list_inputs if schema.is_input_list else check_inputs
                return function(cls, **check(schema.inputs, inputs, CLASSES))
        except (Interrupted, Cancelled):
            failure = Interrupted()
        except (memory.OOM_EXCEPTION, MemoryError) as exc:
            # On builds without a GPU error class, OOM_EXCEPTION is plain Exception.
            failure = exc
            if isinstance(exc, MemoryError) or memory.OOM_EXCEPTION is not Exception:
                _forget_frames(exc)
                failure = FlashGRPOError(_out_of_memory(str(exc)))
        except Exception as exc:
            failure = exc
        finally:
            running.node_id = None
        # Outside the handlers: a traceback that ComfyUI keeps would keep our tensors.
        _forget_frames(failure)
        for action in on_failure:
            action()
        if running.heavy:
            give_back()
        raise failure

    return execute


def _forget_frames(exc: BaseException | None) -> None:
    while exc is not None:
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__cause__ or exc.__context__


def _out_of_memory(message: str) -> str:
    wanted = re.search(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]i?B)", message)
    device = memory.get_torch_device()
    free, total = memory.get_free_memory(device), memory.get_total_memory(device)
    lower = {
        "encode": "choose an fp8 text encoder file",
        "rollout": "lower micro_batch, frames or the size in Video Settings",
        "evaluate": "lower micro_batch, decode_batch, frames or the size in Video Settings",
        "score": "lower decode_batch, frames or the size in Video Settings",
        "update": "switch on gradient_checkpointing in Advanced Training Settings, or lower frames, "
        "the size or lora_rank",
    }.get(
        running.phase,
        "choose a smaller model file (fp8), or close other programs that use the card",
    )
    return (
        f"out of memory in the {running.phase} phase: {wanted[1] if wanted else 'more'} was needed, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GB were free: {lower}; finished iterations are "
        "saved, queue again to go on"
    )


# --- folders ------------------------------------------------------------------------------------


def model_choices(kind: str, *, tiny: bool = False) -> list[str]:
    """Names of the safetensors files of a kind, with `/` on every system."""
    names = [name.replace("\\", "/") for name in folder_paths.get_filename_list(kind)]
    files = sorted(n for n in names if n.lower().endswith((".safetensors", ".sft")))
    return [TINY_CHOICE, *files] if tiny else files


def model_path(kind: str, name: str) -> str:
    """Path of a listed file. Links are followed: people keep models on other disks.

    Raises:
        FlashGRPOError: it is not in the list of its kind.
    """
    path = folder_paths.get_full_path(kind, name) if name in model_choices(kind) else None
    if path is None:
        raise FlashGRPOError(
            f"{name[:80]!r} is not in ComfyUI's {kind} folder: choose a listed .safetensors file"
        )
    return os.path.abspath(path)


def models_folder() -> Path:
    """ComfyUI's models folder."""
    return Path(folder_paths.models_dir)


def model_place(path: str) -> tuple[Path, str]:
    """The folder in which ComfyUI lists a model file, and the file's name below it.

    Raises:
        FlashGRPOError: it lies in none of ComfyUI's model folders.
    """
    found: list[Path] = []
    for kind in folder_paths.folder_names_and_paths:
        if kind not in ("custom_nodes", "configs"):
            found += [Path(os.path.abspath(f)) for f in folder_paths.get_folder_paths(kind)]
    inside = [folder for folder in found if Path(path).is_relative_to(folder)]
    if not inside:
        raise FlashGRPOError(
            f"{path!r} lies in none of ComfyUI's model folders: workers could not find it"
        )
    folder = max(inside, key=lambda folder: len(folder.parts))
    return folder, Path(path).relative_to(folder).as_posix()


def reward_choices(*kinds: str) -> list[str]:
    """Names of reward models: model folders, and weights files, below ComfyUI's folders.

    Args:
        *kinds: `flashgrpo_rewards`, and others that hold fitting files.
    """
    found = [name for kind in kinds for name in _reward_models(kind)]
    return list(dict.fromkeys(found)) or [NO_MODEL]


def reward_path(name: str, *kinds: str) -> str:
    """Path of a listed reward model.

    Raises:
        FlashGRPOError: it is not listed.
    """
    for kind in kinds:
        path = _reward_models(kind).get(name)
        if path is not None:
            return str(path.absolute())
    raise FlashGRPOError(
        f"{name[:80]!r} is not in ComfyUI's {' or '.join(kinds)} folder: put the model there and "
        "press R"
    )


def _reward_models(kind: str) -> dict[str, Path]:
    """Reward models below the folders of a kind, by their names with `/`. Links are followed."""
    found: dict[str, Path] = {}

    def look(folder: Path, prefix: str) -> None:
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            return
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir():
                if any((entry / n).is_file() for n in ("config.json", "model_config.json")):
                    found.setdefault(name, entry)
                elif prefix.count("/") < 2:
                    look(entry, f"{name}/")
            elif entry.suffix.lower() in (".safetensors", ".sft", ".pt", ".pth"):
                found.setdefault(name, entry)

    for base in folder_paths.get_folder_paths(kind):
        look(Path(base), "")
    return found


def clip_tokenizer() -> str:
    """Folder of CLIP's tokenizer, made from the one that ComfyUI ships; empty when it ships none.

    It lies in a models folder, where workers and the command line find it, too.

    Raises:
        FlashGRPOError: the folder cannot be written.
    """
    source = Path(memory.__file__).with_name("sd1_tokenizer")
    target = Path(folder_paths.get_folder_paths("flashgrpo_rewards")[0]) / "clip_tokenizer"
    for name in ("vocab.json", "merges.txt"):
        if not (target / name).is_file():
            if not (source / name).is_file():
                return ""
            copy_new(source / name, target / name)
    return str(target)


def lora_file(name: str) -> str | None:
    """Path of the file that LoraLoader takes for `name`, or None when there is none."""
    return folder_paths.get_full_path("loras", name)


def publish_lora(source: Path, name: str) -> str:
    """Put a LoRA file where the stock loaders list it; never over another one.

    Args:
        source: the file.
        name: wanted name below output/loras, without ending.

    Returns:
        The name as LoraLoader lists it, with a number when the wanted one was taken.

    Raises:
        FlashGRPOError: the name leads out of the folder, or it cannot be written.
    """
    base = output_folder() / "loras"
    if os.path.realpath(base) not in map(os.path.realpath, folder_paths.get_folder_paths("loras")):
        folder_paths.add_model_folder_path("loras", str(base))
    content, number = sha256_file(source), 1
    while True:
        listed = f"{name}.safetensors" if number == 1 else f"{name}-{number}.safetensors"
        target = resolve_inside(base, listed)
        # ComfyUI may have mapped an existing file, and another loras folder may come first.
        other = folder_paths.get_full_path("loras", listed)
        if other is None and not target.exists():
            copy_new(source, target)
            return listed
        if other is not None and os.path.realpath(other) == os.path.realpath(target):
            if sha256_file(target) == content:
                return listed
        number += 1


def publish_model(kind: str, source: Path) -> str:
    """Put a model file of the pack where the stock loaders list it; returns its name there.

    Args:
        kind: `diffusion_models` or `vae`.
        source: the file.

    Raises:
        FlashGRPOError: it cannot be written.
    """
    base, listed = output_folder() / kind, f"flashgrpo/{source.name}"
    if os.path.realpath(base) not in map(os.path.realpath, folder_paths.get_folder_paths(kind)):
        folder_paths.add_model_folder_path(kind, str(base))
    target = resolve_inside(base, listed)
    # A newer version of the pack may bring another file under the same name.
    if not target.is_file() or sha256_file(target) != sha256_file(source):
        copy_new(source, target)
    return listed


def prompt_files() -> list[str]:
    """Prompt files directly in the input folder; links that lead out of it are left out."""
    folder, found = input_folder(), []
    for entry in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if entry.lower().endswith((".txt", ".jsonl")):
            try:
                if resolve_inside(folder, entry).is_file():
                    found.append(entry)
            except FlashGRPOError:
                continue
    return found


def media_folder(name: str) -> Path:
    """A folder that a user names: `input` or `output`, or a folder below one of them.

    Raises:
        FlashGRPOError: it is another one, or it does not exist.
    """
    top, _, rest = name.replace("\\", "/").strip("/ ").partition("/")
    bases = {"input": input_folder(), "output": output_folder()}
    if top not in bases:
        raise FlashGRPOError(
            f"folder {name[:80]!r} must be input or output, or a folder in one of them such as "
            "output/video"
        )
    folder = resolve_inside(bases[top], rest) if rest else bases[top]
    if not folder.is_dir():
        raise FlashGRPOError(f"folder {name[:80]!r} does not exist: check the name")
    return folder


def user_file(name: str) -> Path:
    """A file directly in ComfyUI's user folder, where no request can write: only the user can."""
    return Path(folder_paths.get_user_directory()) / name


def input_folder() -> Path:
    """ComfyUI's input folder."""
    return Path(folder_paths.get_input_directory())


def output_folder() -> Path:
    """ComfyUI's output folder."""
    return Path(folder_paths.get_output_directory())


def inside_output(path: Path) -> Path:
    """Check that a path of ours really lies in the output folder, links resolved.

    Raises:
        FlashGRPOError: a link leads out of it.
    """
    return resolve_inside(output_folder(), path.relative_to(output_folder()).as_posix())


def keep_image(image: torch.Tensor) -> str:
    """Path of a PNG of an image `[H, W, 3]` in 0..1, named by its content; written once.

    Raises:
        FlashGRPOError: it cannot be written.
    """
    pixels = image[..., :3].detach().cpu().float().clamp(0, 1).mul(255).round().to(torch.uint8)
    digest = hashlib.sha256(repr(tuple(pixels.shape)).encode() + pixels.numpy().tobytes())
    folder = output_folder() / "flashgrpo" / "prompts"
    path = inside_output(folder / f"{digest.hexdigest()[:32]}.png")
    if not path.is_file():
        data = BytesIO()
        Image.fromarray(pixels.numpy()).save(data, "PNG")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, data.getvalue())
    return str(path)


def temp_folder(*parts: str) -> Path:
    """A folder below ComfyUI's temporary one, which is emptied at the next start."""
    folder = Path(folder_paths.get_temp_directory()).joinpath("flashgrpo", *parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def saved_result(path: Path) -> dict[str, str]:
    """What the interface needs to show a file below the output or temporary folder."""
    for kind, base in (
        ("output", output_folder()),
        ("temp", Path(folder_paths.get_temp_directory())),
    ):
        if path.is_relative_to(base):
            parent = path.parent.relative_to(base).as_posix()
            return {
                "filename": path.name,
                "subfolder": "" if parent == "." else parent,
                "type": kind,
            }
    raise FlashGRPOError(f"{str(path)!r} lies outside ComfyUI's output and temporary folders")


# --- memory -------------------------------------------------------------------------------------


class Resident(torch.nn.Module):
    """A network in the form that ModelPatcher manages: it writes to `device`, diffusers forbids it."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self.device = offload_device()


def compute_device() -> torch.device:
    """Where networks run."""
    return memory.get_torch_device()


def offload_device() -> torch.device:
    """Where networks wait."""
    return memory.unet_offload_device()


def managed(network: torch.nn.Module) -> ModelPatcher:
    """Put a network under ComfyUI's memory management."""
    size = resident_bytes(network)
    return ModelPatcher(Resident(network), compute_device(), offload_device(), size=size)


def sizes(patcher: ModelPatcher) -> tuple[int, int]:
    """Bytes of a network's weights, and of the whole compute device."""
    return patcher.model_size(), memory.get_total_memory(compute_device())


def make_resident(patcher: ModelPatcher, working_memory: int = 0) -> None:
    """Bring a network to the compute device as a whole, with room to work in."""
    memory.load_models_gpu([patcher], memory_required=working_memory, force_full_load=True)
    # ComfyUI may have moved it inside another node, under inference mode.
    for module in patcher.model.modules():
        for key, value in list(module._parameters.items()):
            if value is not None and value.is_inference():
                module._parameters[key] = torch.nn.Parameter(
                    value.clone(), requires_grad=value.requires_grad
                )
        for key, value in list(module._buffers.items()):
            if value is not None and value.is_inference():
                module._buffers[key] = value.clone()


def dismiss(patcher: ModelPatcher) -> None:
    """Take a network off the device and out of ComfyUI's books."""
    for loaded in list(memory.current_loaded_models):
        if loaded.model is patcher:
            memory.current_loaded_models.remove(loaded)
            loaded.model_unload()


def unload_others() -> None:
    """Send every model of other nodes away: training needs all the memory there is."""
    memory.unload_all_models()
    give_back()
    if compute_device().type == "cuda":
        torch.cuda.reset_peak_memory_stats(compute_device())


def give_back() -> None:
    """Collect what is no longer used and return it to the system."""
    gc.collect()
    memory.soft_empty_cache()


def encode_with_clip(clip: Any, text: str) -> torch.Tensor:
    """Embedding of a prompt by a CLIP object of CLIPLoader, fp32 `[n, width]` without padding."""
    with torch.no_grad():
        conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(text))
    embedding = conditioning[0][0][0].detach().float().cpu().clone()  # [tokens, width]
    used = embedding.abs().sum(-1).nonzero()
    return embedding[: int(used[-1]) + 1 if len(used) else 1].clone()


def clip_fingerprint(clip: Any) -> str:
    """What tells text encoders apart: names, shapes and a few values of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(clip.cond_stage_model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 8)][:8].float().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{some.tolist()}".encode())
    if clip.patcher.patches:
        digest.update(str(clip.patcher.patches_uuid).encode())
    return digest.hexdigest()


# --- progress and cancel ------------------------------------------------------------------------


def check_interrupt() -> None:
    """Raise ComfyUI's own exception when the user pressed Cancel."""
    memory.throw_exception_if_processing_interrupted()


def progress_bar(total: int) -> comfy.utils.ProgressBar:
    """A bar on the running node; moving it also listens to Cancel."""
    return comfy.utils.ProgressBar(max(total, 1), node_id=running.node_id)


def blocked() -> ExecutionBlocker:
    """An output without a value: nodes behind it do not run, without an error."""
    return ExecutionBlocker(None)


def show_text(text: str) -> None:
    """Show a line of text on the running node."""
    server = prompt_server()
    if server is not None and running.node_id is not None:
        server.send_progress_text(text, running.node_id)


def prompt_server() -> Any:
    """ComfyUI's running server, or None outside of one."""
    try:
        from server import PromptServer
    except ImportError:
        return None
    return getattr(PromptServer, "instance", None)


def add_route(method: str, path: str, handler: Callable[..., Any]) -> None:
    """Add a route to ComfyUI's server, when there is one."""
    server = prompt_server()
    if server is not None:
        server.routes.route(method, path)(handler)
