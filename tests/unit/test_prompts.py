"""Prompt files as people really save them, and splits that hold prompts apart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.groups import prompt_key
from flashgrpo_core.prompts import (
    Prompt,
    disjoint_split,
    parse_prompts,
    read_prompts,
    split_prompts,
)


def written(tmp_path: Path, content: bytes, name: str = "prompts.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def texts(prompts: list[Prompt]) -> list[str]:
    return [p.text for p in prompts]


# Text files.


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["unix", "windows", "old mac"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "open"])
def test_line_ends_marks_comments_and_blanks(
    tmp_path: Path, mark: bytes, end: bytes, last: bool
) -> None:
    lines = [b"a cat", b"", b"# a comment", b"  a dog, running\t", b"   ", b"  # another", b"bird"]
    content = mark + end.join(lines) + (end if last else b"")
    assert texts(read_prompts(written(tmp_path, content))) == ["a cat", "a dog, running", "bird"]


def test_text_that_only_looks_special_is_kept(tmp_path: Path) -> None:
    lines = [
        "高空俯瞰的森林，镜头缓慢推进",
        "눈 내리는 거리",
        "emoji 🐟 and é and e\u0301",
        'quotes "inside" and \\ backslash',
        "number #1 in the middle",
        '{"prompt": "json in a text file"}',
        "line\u2028separator and \x0b tab stay inside one prompt",
        "x" * 20000,
    ]
    path = written(tmp_path, "\n".join(lines).encode())
    assert texts(read_prompts(path)) == lines
    assert all(p.image is None for p in read_prompts(path))


def test_a_path_with_blanks_and_other_letters(tmp_path: Path) -> None:
    folder = tmp_path / "my prompts – 프롬프트"
    folder.mkdir()
    assert texts(read_prompts(str(written(folder, b"a cat")))) == ["a cat"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompt"),
        (b"\xef\xbb\xbf", "holds no prompt"),
        (b"\n\n# only comments\n", "holds no prompt"),
        (b"a cat\nb\0rd\n", "line 2 holds a NUL"),
        (b"caf\xe9\n", r"not UTF-8 \(byte 3\)"),
        ("a cat\n".encode("utf-16"), "not UTF-8"),
        (b"a cat\n\x89PNG\r\n\x1a\n\0\0\xff", "not UTF-8"),
    ],
)
def test_broken_text_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(FlashGRPOError, match=message) as caught:
        read_prompts(path)
    assert "prompts.txt" in str(caught.value) and "\n" not in str(caught.value)


def test_utf16_without_a_mark_is_refused_by_its_nul_characters(tmp_path: Path) -> None:
    with pytest.raises(FlashGRPOError, match="line 1 holds a NUL"):
        read_prompts(written(tmp_path, "a cat".encode("utf-16-le")))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(FlashGRPOError, match=r"nowhere\.txt' does not exist"):
        read_prompts(tmp_path / "nowhere.txt")
    with pytest.raises(FlashGRPOError, match="cannot be read"):
        read_prompts(tmp_path)
    with pytest.raises(FlashGRPOError, match="cannot be read"):
        read_prompts("pro\0mpts.txt")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "video.txt"
    with path.open("wb") as file:
        file.truncate(256 * 2**20 + 1)  # sparse: takes no space
    with pytest.raises(FlashGRPOError, match="larger than 256 MiB"):
        read_prompts(path)


# JSON lines.


def test_json_lines(tmp_path: Path) -> None:
    content = (
        '\ufeff{"prompt": " a cat ", "image": "start.png"}\r\n'
        "\r\n"
        "# comment\r\n"
        '{"prompt": "snow \\u96ea", "note": "ignored", "image": null}\r\n'
        '{"prompt": "two\\nlines"}'
    )
    got = read_prompts(written(tmp_path, content.encode(), "list.JSONL"))
    assert got == [
        Prompt("a cat", str(tmp_path / "start.png")),
        Prompt("snow 雪"),
        Prompt("two\nlines"),
    ]


def test_an_image_path_stands_relative_to_the_file_or_absolute(tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere.png"
    content = f'{{"prompt": "a", "image": "sub/b.png"}}\n{{"prompt": "c", "image": "{outside}"}}'
    got = read_prompts(written(tmp_path, content.encode(), "list.jsonl"))
    assert [p.image for p in got] == [str(tmp_path / "sub" / "b.png"), str(outside)]
    assert parse_prompts('{"prompt": "a", "image": "b.png"}', jsonl=True)[0].image == "b.png"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a cat", "line 3 is not JSON"),
        ('{"prompt": "a"', "line 3 is not JSON"),
        ("[" * 100_000, "line 3 is not JSON"),
        ('["a cat"]', 'line 3 needs a text field "prompt"'),
        ('"a cat"', 'line 3 needs a text field "prompt"'),
        ("17", 'line 3 needs a text field "prompt"'),
        ('{"text": "a cat"}', 'line 3 needs a text field "prompt"'),
        ('{"prompt": 7}', 'line 3 needs a text field "prompt"'),
        ('{"prompt": null}', 'line 3 needs a text field "prompt"'),
        ('{"prompt": "  "}', 'line 3 needs a text field "prompt"'),
        ('{"prompt": "a", "image": 7}', 'line 3: "image" must be a path, not 7'),
        ('{"prompt": "a", "image": ["b"]}', 'line 3: "image" must be a path'),
        ('{"prompt": "a", "image": ""}', 'line 3: "image" must be a path'),
        ('{"prompt": "a\\u0000b"}', "line 3 holds a NUL"),
        ('{"prompt": "a", "image": "b\\u0000.png"}', "line 3 holds a NUL"),
        ('{"prompt": "a \\ud83d b"}', "line 3 holds half a character"),
    ],
)
def test_bad_json_lines_are_named_with_their_number(
    tmp_path: Path, line: str, message: str
) -> None:
    content = f'{{"prompt": "fine"}}\n\n{line}\n'
    with pytest.raises(FlashGRPOError, match=message) as caught:
        read_prompts(written(tmp_path, content.encode(), "list.jsonl"))
    assert "list.jsonl" in str(caught.value) and "\n" not in str(caught.value)


@given(st.text(max_size=200), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_text_is_prompts_or_one_clear_error(text: str, jsonl: bool) -> None:
    try:
        prompts = parse_prompts(text, jsonl=jsonl)
    except FlashGRPOError as exc:
        assert str(exc).startswith("prompts line ")
        return
    for prompt in prompts:
        assert prompt.text == prompt.text.strip() != ""
        assert len(prompt_key(prompt.text)) == 64


# Splits.

MANY = [Prompt(f"prompt {i}") for i in range(40)]


def parts(split) -> list[list[Prompt]]:  # noqa: ANN001
    return [split.train, split.validation, split.test]


@given(
    count=st.integers(0, 60),
    validation=st.floats(0, 0.5),
    test=st.floats(0, 0.5),
    repeats=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_a_split_is_disjoint_and_complete(
    count: int, validation: float, test: float, repeats: int
) -> None:
    unique = [Prompt(f"prompt {i}") for i in range(count)]
    split = split_prompts(unique + unique[:repeats], validation, test)
    together = split.train + split.validation + split.test
    assert sorted(p.text for p in together) == sorted(p.text for p in unique)
    assert len(split.train) >= min(2, count)
    if count >= 4:
        assert (len(split.validation) > 0) == (validation > 0)
        assert (len(split.test) > 0) == (test > 0)


def test_shares() -> None:
    assert [len(p) for p in parts(split_prompts(MANY, 0.1, 0.2))] == [28, 4, 8]
    assert [len(p) for p in parts(split_prompts(MANY, 0.0, 0.0))] == [40, 0, 0]
    assert [len(p) for p in parts(split_prompts(MANY[:3], 0.1, 0.1))] == [2, 0, 1]


def test_a_split_depends_on_the_prompts_not_on_their_order() -> None:
    reference = split_prompts(MANY, 0.2, 0.2)
    assert parts(split_prompts(MANY, 0.2, 0.2)) == parts(reference)
    shuffled = random.Random(1).sample(MANY, len(MANY))
    other = split_prompts(shuffled, 0.2, 0.2)
    for a, b in zip(parts(reference), parts(other), strict=True):
        assert set(a) == set(b)
    # Each part keeps the order of the file.
    assert all(part == [p for p in shuffled if p in part] for part in parts(other))


def test_a_split_follows_the_sha256_of_the_text() -> None:
    split = split_prompts(MANY, 0.2, 0.2)

    def keys(part: list[Prompt]) -> list[str]:
        return [prompt_key(p.text, p.image) for p in part]

    assert max(keys(split.test)) < min(keys(split.validation))
    assert max(keys(split.validation)) < min(keys(split.train))
    # Not simply the first lines of the file.
    assert set(split.test) != set(MANY[:8])


def test_the_same_text_with_another_start_image_is_another_prompt() -> None:
    pair = [Prompt("a cat", "a.png"), Prompt("a cat", "b.png"), Prompt("a cat", "a.png")]
    assert split_prompts(pair, 0.0, 0.0).train == pair[:2]


def test_separate_files_must_not_overlap() -> None:
    a, b, c = MANY[:5], MANY[5:8], MANY[8:10]
    assert parts(disjoint_split(a, b, c)) == [a, b, c]
    assert disjoint_split([*a, a[0]], b, c).train == a
    for train, validation, test, names in (
        (a, [*b, a[1]], c, "both a training and a validation prompt"),
        (a, b, [a[2], *c], "both a training and a test prompt"),
        (a, b, [*c, b[0]], "both a validation and a test prompt"),
    ):
        with pytest.raises(FlashGRPOError, match=rf"'prompt \d' is {names}"):
            disjoint_split(train, validation, test)
