"""A node for tests only: CONDITIONING without a text encoder.

Installed as `custom_nodes/conditioning_node.py`. No stock node makes Wan conditioning without the
11 GB text encoder.
"""

import torch


class TestConditioning:
    """Seeded noise in the shape of encoded text, `[1, tokens, 4096]`."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**31}),
                "tokens": ("INT", {"default": 32, "min": 1, "max": 512}),
            }
        }

    def make(self, seed, tokens):
        draw = torch.Generator().manual_seed(seed)
        return ([[torch.randn(1, tokens, 4096, generator=draw), {}]],)


NODE_CLASS_MAPPINGS = {"TestConditioning": TestConditioning}
