"""Entry point of the Flash-GRPO node pack for ComfyUI."""

import logging

WEB_DIRECTORY = "./web"

try:
    from comfy_api.latest import ComfyExtension, io, ui  # noqa: F401
except ImportError as error:
    logging.getLogger(__name__).error(
        "Flash-GRPO has no nodes here: it needs ComfyUI 0.3.75 or newer, and this Python has none "
        "(%s). Update ComfyUI, then start it again.",
        error,
    )
    # An old ComfyUI reports a pack with neither form as broken; a new one would stop at this dict
    # and never call comfy_entrypoint, so it must exist on this branch only.
    NODE_CLASS_MAPPINGS: dict[str, type] = {}
    __all__ = ["NODE_CLASS_MAPPINGS", "WEB_DIRECTORY"]
else:
    from .nodes.extension import comfy_entrypoint

    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
