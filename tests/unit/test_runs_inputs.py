"""A run goes on only with the files and prompts it began with, wherever they lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashgrpo_core.build import build_prompts
from flashgrpo_core.config import Config
from flashgrpo_core.config_io import build_config, config_hash
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.keeping import prepare_folder
from flashgrpo_core.lookup import find_file
from flashgrpo_core.runs.checkpoint import save_checkpoint
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.runs.inputs import fingerprint, inputs_of, read_inputs


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with model files of three megabytes and prompts."""
    folder = tmp_path / "models"
    folder.mkdir()
    for seed, name in enumerate(("wan", "vae", "clip")):
        (folder / f"{name}.safetensors").write_bytes(bytes([seed]) * 3_000_000)
    lines = [f"prompt number {i}" for i in range(6)]
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def config_of(folder: Path, output: Path) -> Config:
    return build_config(
        {
            "model": {
                "transformer": str(folder / "wan.safetensors"),
                "vae": str(folder / "vae.safetensors"),
                "text_encoder": "elsewhere.safetensors",
                "frozen_loras": [{"file": str(folder / "clip.safetensors"), "strength": 0.5}],
            },
            "prompts": {
                "file": str(folder / "prompts.txt"),
                "validation_share": 0.0,
                "test_share": 0.0,
            },
            "run": {"name": "run", "output": str(output)},
        }
    )


def begin(config: Config) -> RunFolder:
    """A run with a checkpoint."""
    folder = RunFolder(config.run.output, config.run.name)
    prepare_folder(folder, config, "auto")
    save_checkpoint(folder.checkpoints, 1, {}, {})
    return folder


def test_the_same_files_elsewhere_are_the_same_run(files: Path, tmp_path: Path) -> None:
    first = config_of(files, tmp_path)
    begin(first)
    moved = files.rename(tmp_path / "on another disk")
    (moved / "wan.safetensors").rename(moved / "renamed.safetensors")
    second = config_of(moved, tmp_path)
    second.model.transformer = str(moved / "renamed.safetensors")
    prepare_folder(RunFolder(tmp_path, "run"), second, "auto")
    third = config_of(moved, tmp_path)
    third.model.transformer = str(moved / "renamed.safetensors")
    prepare_folder(RunFolder(tmp_path, "run"), third, "latest")


def test_another_file_under_the_same_path_is_refused_by_name(files: Path, tmp_path: Path) -> None:
    config = config_of(files, tmp_path)
    folder = begin(config)
    before = folder.config_path.read_bytes()
    path = files / "wan.safetensors"
    data = bytearray(path.read_bytes())
    data[1_500_000:1_700_000] = b"\x07" * 200_000  # same size, same header, other weights
    path.write_bytes(data)
    with pytest.raises(FlashGRPOError) as caught:
        prepare_folder(folder, config, "auto")
    text = str(caught.value)
    assert "model.transformer: 'wan.safetensors (content " in text
    assert "model.vae" not in text and "frozen" not in text
    assert folder.config_path.read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["new"], "training prompts: 1 added ('new'), 0 removed"),
        ([None], "training prompts: 0 added, 1 removed"),
        (["a", "b", None], "training prompts: 2 added ('a', ...), 1 removed"),
    ],
)
def test_edited_prompts_are_refused_by_name(
    files: Path, tmp_path: Path, lines: list[str | None], says: str
) -> None:
    config = config_of(files, tmp_path)
    folder = begin(config)
    path = files / "prompts.txt"
    old = path.read_text(encoding="utf-8").splitlines()
    old = old[: len(old) - lines.count(None)] + [line for line in lines if line]
    path.write_text("\n".join(old), encoding="utf-8")
    with pytest.raises(FlashGRPOError) as caught:
        prepare_folder(folder, config, "auto")
    assert says in str(caught.value) and "'run-2'" in str(caught.value)


def test_another_order_matters_and_comments_do_not(files: Path, tmp_path: Path) -> None:
    config = config_of(files, tmp_path)
    folder = begin(config)
    path = files / "prompts.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("# a note\n\n" + "\r\n".join(lines), encoding="utf-8")
    prepare_folder(folder, config, "auto")
    path.write_text("\n".join(reversed(lines)), encoding="utf-8")
    with pytest.raises(FlashGRPOError, match="training prompts: the same in another order"):
        prepare_folder(folder, config, "auto")


def test_a_run_from_before_gets_its_fingerprints_and_nothing_trained_is_free(
    files: Path, tmp_path: Path
) -> None:
    config = config_of(files, tmp_path)
    folder = begin(config)
    (folder.path / "inputs.json").unlink()
    prepare_folder(folder, config, "auto")
    assert read_inputs(folder.path) == inputs_of(config, build_prompts(config))
    (folder.path / "inputs.json").write_text("{", encoding="utf-8")
    with pytest.raises(FlashGRPOError, match="delete it"):
        prepare_folder(folder, config, "auto")
    (folder.path / "inputs.json").unlink()
    for path in (folder.checkpoints / "000001").iterdir():
        path.unlink()
    (folder.checkpoints / "000001").rmdir()
    config.model.lora_rank = 4
    prepare_folder(folder, config, "auto")


def test_a_fingerprint_sees_each_part_and_reads_little(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    size = 1 << 31  # sparse: takes no space
    with open(path, "wb") as file:
        file.truncate(size)
    whole = fingerprint(path)
    for place in (0, (1 << 20) - 1, size - 1):
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert fingerprint(path) != whole
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\0")
        assert fingerprint(path) == whole
    os.truncate(path, size - 1)
    assert fingerprint(path) != whole


def test_a_folder_goes_by_its_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "transformer").mkdir(parents=True)
        for part in (1, 2):
            shard = tmp_path / name / "transformer" / f"model-{part}.safetensors"
            shard.write_bytes(bytes([part]) * 100)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
    (tmp_path / "two" / "transformer" / "model-2.safetensors").write_bytes(b"\2" * 99 + b"\3")
    assert fingerprint(tmp_path / "one") != fingerprint(tmp_path / "two")


def test_the_hash_of_a_configuration_knows_no_folders(files: Path, tmp_path: Path) -> None:
    one, two = config_of(files, tmp_path), config_of(tmp_path / "elsewhere", tmp_path)
    assert config_hash(one) == config_hash(two)
    two.model.transformer = r"C:\models\wan.safetensors"
    assert config_hash(one) == config_hash(two)
    two.model.transformer = str(files / "other.safetensors")
    assert config_hash(one) != config_hash(two)


def test_a_file_that_is_gone_is_found_by_name_among_the_models(tmp_path: Path) -> None:
    there = tmp_path / "models" / "diffusion_models" / "wan.safetensors"
    there.parent.mkdir(parents=True)
    there.touch()
    gone = str(tmp_path / "old" / "wan.safetensors")
    found = find_file(gone, "transformer", "model.transformer", tmp_path, tmp_path / "models")
    assert found == str(there)
    with pytest.raises(FlashGRPOError, match="point --models"):
        find_file(gone, "transformer", "model.transformer", tmp_path)
