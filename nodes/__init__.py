"""ComfyUI nodes: thin V3 schemas around `flashgrpo_core`."""
