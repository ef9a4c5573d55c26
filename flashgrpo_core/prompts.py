"""Prompt files and the split into training, validation and test prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .errors import FlashGRPOError
from .groups import prompt_key

_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Prompt:
    """A prompt and, for image-to-video, the path of its start image."""

    text: str
    image: str | None = None


@dataclass(frozen=True)
class PromptSplit:
    """Disjoint prompts; duplicates were removed."""

    train: list[Prompt]
    validation: list[Prompt]
    test: list[Prompt]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read `.txt` (one prompt a line) or `.jsonl` (`{"prompt": ..., "image": ...}` a line).

    UTF-8 with or without byte order mark; blank lines and lines starting with `#` are skipped.
    Image paths are relative to the file.

    Raises:
        FlashGRPOError: missing, unreadable or empty file, or a malformed line (with its number).
    """
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise FlashGRPOError(f"prompts file {str(path)!r} is larger than 256 MiB: split it")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise FlashGRPOError(f"prompts file {str(path)!r} does not exist: check the path") from None
    except UnicodeDecodeError as exc:
        raise FlashGRPOError(
            f"prompts file {str(path)!r} is not UTF-8 (byte {exc.start}): save it as UTF-8"
        ) from None
    except (OSError, ValueError) as exc:  # ValueError: the path itself holds a NUL
        reason = getattr(exc, "strerror", None) or exc
        raise FlashGRPOError(f"prompts file {str(path)!r} cannot be read: {reason}") from None
    prompts = parse_prompts(
        text, jsonl=path.suffix.lower() == ".jsonl", folder=path.parent, where=str(path)
    )
    if not prompts:
        raise FlashGRPOError(f"prompts file {str(path)!r} holds no prompt: write one per line")
    return prompts


def parse_prompts(
    text: str, *, jsonl: bool = False, folder: Path | None = None, where: str = "prompts"
) -> list[Prompt]:
    """Prompts of a text; see `read_prompts`.

    Raises:
        FlashGRPOError: a line that is not as described.
    """
    prompts = []
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        _check_text(line, f"{where} line {number}")
        if not jsonl:
            prompts.append(Prompt(line))
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise FlashGRPOError(f"{where} line {number} is not JSON: {exc}") from None
        if (
            not isinstance(record, dict)
            or not isinstance(record.get("prompt"), str)
            or not record["prompt"].strip()
        ):
            raise FlashGRPOError(f'{where} line {number} needs a text field "prompt"')
        image = record.get("image")
        if image is not None and (not isinstance(image, str) or not image.strip()):
            raise FlashGRPOError(f'{where} line {number}: "image" must be a path, not {image!r}')
        # JSON escapes can spell what no text file holds.
        _check_text(record["prompt"] + (image or ""), f"{where} line {number}")
        if image is not None and folder is not None:
            image = str(folder / image)
        prompts.append(Prompt(record["prompt"].strip(), image))
    return prompts


def _check_text(text: str, where: str) -> None:
    if "\0" in text:
        raise FlashGRPOError(f"{where} holds a NUL character: it is not a text file")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise FlashGRPOError(f"{where} holds half a character (a lone surrogate): retype it")


def split_prompts(prompts: list[Prompt], validation_share: float, test_share: float) -> PromptSplit:
    """Split prompts by the order of the hashes of their texts.

    So the split depends neither on the order of the lines nor on chance. Shares are rounded, but a
    share above 0 holds out at least one prompt while enough remain to train on. Duplicates count
    once.
    """
    unique = list({prompt_key(p.text, p.image): p for p in prompts}.values())
    order = sorted(unique, key=lambda p: prompt_key(p.text, p.image))
    spare = max(len(unique) - 2, 0)
    # One is left for validation when both are asked for and there is enough.
    reserved = 1 if validation_share > 0 and spare > 1 else 0
    n_test = min(max(round(test_share * len(unique)), 1 if test_share > 0 else 0), spare - reserved)
    spare -= n_test
    n_val = min(max(round(validation_share * len(unique)), 1 if validation_share > 0 else 0), spare)
    held = {p: "test" for p in order[:n_test]} | {
        p: "validation" for p in order[n_test : n_test + n_val]
    }
    return PromptSplit(
        [p for p in unique if p not in held],
        [p for p in unique if held.get(p) == "validation"],
        [p for p in unique if held.get(p) == "test"],
    )


def disjoint_split(
    train: list[Prompt], validation: list[Prompt], test: list[Prompt]
) -> PromptSplit:
    """A split from separate files.

    Raises:
        FlashGRPOError: the same prompt stands in two parts.
    """
    parts = [list(dict.fromkeys(part)) for part in (train, validation, test)]
    names = ("training", "validation", "test")
    for i in range(3):
        for j in range(i + 1, 3):
            common = set(parts[i]) & set(parts[j])
            if common:
                text = sorted(p.text for p in common)[0]
                raise FlashGRPOError(
                    f"prompt {text[:80]!r} is both a {names[i]} and a {names[j]} prompt: remove it from "
                    "one file, or the result would flatter"
                )
    return PromptSplit(*parts)
