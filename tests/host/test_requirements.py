"""A user's ComfyUI still starts after the pack's requirements are installed.

The real installations, and more versions of transformers, are in `tests/soak/requirements_matrix.py`.
The other tests run beside transformers 5.x.
"""

from __future__ import annotations

from pathlib import Path

from fresh_environment import replaced_packages, requirement_lines


def test_no_line_replaces_what_transformers_4_57_needs(tmp_path: Path) -> None:
    """Only these lines share packages with transformers; each may resolve to its newest."""
    lines = [x for x in requirement_lines() if x.startswith(("diffusers", "accelerate", "peft"))]
    assert len(lines) == 3
    # That the check can tell: the first diffusers that moves huggingface-hub to 2.
    too_new = "diffusers==0.40.*"
    replaced = replaced_packages(tmp_path, "==4.57.*", [*lines, too_new])
    assert [text for text in replaced if not text.startswith(too_new)] == []
    assert [text for text in replaced if "huggingface" in text] != []
