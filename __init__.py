"""Entry point of the Flash-GRPO node pack for ComfyUI."""

import logging
import re

WEB_DIRECTORY = "./web"
_NEEDED = (0, 3, 75)


def _reason_against() -> str | None:
    """Why the nodes cannot be had here, or None."""
    try:
        from comfy_api.latest import ComfyExtension, io, ui  # noqa: F401
    except ImportError as error:
        return f"this Python has no such ComfyUI ({error})"
    try:
        from comfyui_version import __version__ as version
    except ImportError:
        return None  # a host that does not say its version; the interface is there
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return f"this is ComfyUI {version}" if found < _NEEDED else None


_reason = _reason_against()
if _reason is not None:
    logging.getLogger(__name__).error(
        "Flash-GRPO has no nodes here: it needs ComfyUI 0.3.75 or newer, and %s. Update ComfyUI, "
        "then start it again.",
        _reason,
    )
    # An old ComfyUI reports a pack with neither form as broken; a new one would stop at this dict
    # and never call comfy_entrypoint, so it must exist on this branch only.
    NODE_CLASS_MAPPINGS: dict[str, type] = {}
    __all__ = ["NODE_CLASS_MAPPINGS", "WEB_DIRECTORY"]
else:
    from .nodes.extension import comfy_entrypoint

    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
