"""Names of the Wan transformer's modules: original (ComfyUI) layout <-> diffusers layout.

Beware of the norms: the affine norm before cross-attention is `norm3` in the original and `norm2`
in diffusers, and the two without weights move accordingly.
"""

from __future__ import annotations

import re

#: Modules and parameters of one block, without `blocks.N.`; original -> diffusers.
BLOCK: dict[str, str] = {
    **{
        f"{theirs}.{old}": f"{ours}.{new}"
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for old, new in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "norm1": "norm1",
    "norm2": "norm3",
    "norm3": "norm2",
    "modulation": "scale_shift_table",
}

#: Everything outside the blocks; original -> diffusers.
OUTSIDE: dict[str, str] = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}

_BLOCK_BACK = {new: old for old, new in BLOCK.items()}
_OUTSIDE_BACK = {new: old for old, new in OUTSIDE.items()}
_BLOCK_FLAT = {name.replace(".", "_"): new for old, new in BLOCK.items() for name in (old, new)}
_OUTSIDE_FLAT = {name.replace(".", "_"): new for old, new in OUTSIDE.items() for name in (old, new)}
# `norm2` and `norm3` mean other modules in the two layouts; kohya files use the original's.
_BLOCK_FLAT.update({old: new for old, new in BLOCK.items() if old.startswith("norm")})
_IN_BLOCK = re.compile(r"^(blocks\.\d+\.)(.+)$")
_IN_BLOCK_FLAT = re.compile(r"^blocks_(\d+)_(.+)$")


def to_diffusers(name: str) -> str | None:
    """Diffusers name of an original module or parameter name; None when Wan has no such module."""
    return _translate(name, BLOCK, OUTSIDE)


def to_original(name: str) -> str | None:
    """Original name of a diffusers module or parameter name; None when Wan has no such module."""
    return _translate(name, _BLOCK_BACK, _OUTSIDE_BACK)


def _translate(name: str, block: dict[str, str], outside: dict[str, str]) -> str | None:
    match = _IN_BLOCK.match(name)
    head, tail, table = (match[1], match[2], block) if match else ("", name, outside)
    # A name is a module followed by nothing, `.weight`, `.lora_A.weight`, ...: try it whole, then
    # shorter. Whole dotted parts only, so `ffn.2` never matches `ffn.20`.
    module, rest = tail, ""
    while module:
        if module in table:
            return f"{head}{table[module]}{rest}"
        module, dot, last = module.rpartition(".")
        rest = f"{dot}{last}{rest}"
    return None


def is_module(name: str) -> bool:
    """Whether a diffusers name is exactly one of Wan's modules (or bare parameters)."""
    match = _IN_BLOCK.match(name)
    return match[2] in _BLOCK_BACK if match else name in _OUTSIDE_BACK


def flatten(original: str) -> str:
    """Kohya spelling of an original module name: dots become underscores."""
    return original.replace(".", "_")


def unflatten(flat: str) -> str | None:
    """Diffusers module name of a kohya spelling; None when Wan has no such module.

    The words themselves contain underscores (`self_attn`, `k_img`), so this is a table look-up.
    Spellings made from diffusers names (`attn1_to_q`) are read too.
    """
    match = _IN_BLOCK_FLAT.match(flat)
    if match:
        inner = _BLOCK_FLAT.get(match[2])
        return f"blocks.{match[1]}.{inner}" if inner else None
    return _OUTSIDE_FLAT.get(flat)
