"""The extension object that ComfyUI asks for the pack's nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io


class FlashGRPOExtension(ComfyExtension):
    """Lists the nodes of the pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the node classes in the order in which menus show them."""
        return []


async def comfy_entrypoint() -> ComfyExtension:
    """Return the extension; ComfyUI calls this once at start-up."""
    return FlashGRPOExtension()
