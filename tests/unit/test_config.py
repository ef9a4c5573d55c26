"""The configuration: what is written is what is read, and every mistake names its fix."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgrpo_core.config import PAPER, PRESETS, TINY, Config
from flashgrpo_core.config_io import (
    apply_override,
    build_config,
    check_run_name,
    check_size,
    config_hash,
    dump_toml,
    flow_shift,
    identity_differences,
    load_config,
    sde_window,
    to_tables,
)
from flashgrpo_core.errors import FlashGRPOError

MINIMAL: dict[str, Any] = {"model": {"transformer": "wan.safetensors"}}

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
JSONABLE = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**60), 2**60), TEXT, st.floats(-1e9, 1e9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(TEXT.filter(bool), inner, max_size=3)
    ),
    max_leaves=6,
)


def make(**tables: dict[str, Any]) -> Config:
    merged = {name: dict(values) for name, values in MINIMAL.items()}
    for name, values in tables.items():
        merged.setdefault(name, {}).update(values)
    return build_config(merged)


def reread(config: Config) -> Config:
    return build_config(tomllib.loads(dump_toml(config)))


def test_every_field_has_help_that_is_a_sentence() -> None:
    for table in dataclasses.fields(Config):
        for field in dataclasses.fields(getattr(Config(), table.name)):
            text = field.metadata["help"]
            assert text[0].isupper() or text.split()[0].rstrip(",") in {
                "cuda",
                "simple",
                "attention",
                "adamw",
            }, (field.name, text)
            assert text.endswith((".", ")")), field.name


def test_defaults_lie_within_their_own_ranges_and_choices() -> None:
    tables = to_tables(Config())
    tables["model"]["transformer"] = "wan.safetensors"
    assert build_config(tables) == make()


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("transformer", ["tiny", "wan.safetensors"])
def test_round_trip_through_toml(preset: str, transformer: str) -> None:
    config = build_config({"model": {"transformer": transformer}, "run": {"preset": preset}})
    assert reread(config) == config
    assert config_hash(reread(config)) == config_hash(config)


@given(TEXT, TEXT, st.floats(1e-9, 1.0), st.integers(0, 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_any_text_and_number_survives_toml(
    path: str, negative: str, rate: float, seed: int
) -> None:
    config = make(
        model={"transformer": "x" + path, "lora_targets": [path, "ffn"]},
        prompts={"negative": negative},
        optim={"learning_rate": rate},
        run={"seed": seed},
    )
    assert reread(config) == config


@given(st.dictionaries(TEXT.filter(bool), JSONABLE, max_size=4))
@settings(max_examples=50, deadline=None)
def test_any_reward_table_survives_toml(options: dict[str, Any]) -> None:
    table = {**options, "name": "motion", "weight": 0.5}
    config = make(reward={"terms": [table, {"name": "technical"}]})
    assert reread(config).reward.terms == config.reward.terms


def test_file_with_byte_order_mark_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "läuft 1.toml"
    path.write_bytes(
        "\ufeff[model]\r\ntransformer = 'tiny'\r\n[run]\r\nname = \"größe\"\r\n".encode()
    )
    with pytest.raises(FlashGRPOError, match="größe"):
        load_config(path)
    config = load_config(path, ["run.name=a-1", "optim.learning_rate=1", "eval.weights=live"])
    assert config.run.name == "a-1" and config.optim.learning_rate == 1.0
    assert config.eval.weights == "live"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1e-4", 1e-4),
        ("a.b = [0, 5]", [0, 5]),
        ("a.b=true", True),
        ("a.b=C:\\models\\wan.safetensors", "C:\\models\\wan.safetensors"),
        ("a.b='x=y'", "x=y"),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ('a.b=[{name = "motion", weight = 2}]', [{"name": "motion", "weight": 2}]),
    ],
)
def test_overrides(text: str, value: Any) -> None:
    tables: dict[str, Any] = {}
    apply_override(tables, text)
    assert tables == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["", "a", "a.b", "a=1", ".b=1x=", "a.=1"])
def test_bad_overrides_show_the_form(text: str) -> None:
    with pytest.raises(FlashGRPOError, match=r"optim\.learning_rate=1e-4|unknown"):
        tables: dict[str, Any] = {"model": {"transformer": "x"}}
        apply_override(tables, text)
        build_config(tables)


def test_an_override_of_something_that_is_no_table_is_an_error_not_a_crash() -> None:
    tables: dict[str, Any] = {"model": 3}
    with pytest.raises(FlashGRPOError, match="model"):
        apply_override(tables, "model.transformer=tiny")
        build_config(tables)


def test_precedence_tables_over_tiny_over_preset_over_defaults() -> None:
    config = build_config(
        {
            "model": {"transformer": "tiny"},
            "run": {"preset": "paper"},
            "schedule": {"steps": 7},
        }
    )
    assert config.schedule.steps == 7  # the user's table
    assert config.rollout.width == TINY["rollout"]["width"]  # the tiny model
    assert config.schedule.kind == PAPER["schedule"]["kind"]  # the preset
    assert config.rollout.group_size == Config().rollout.group_size  # the default


def test_the_paper_preset_is_the_paper() -> None:
    config = make(run={"preset": "paper"})
    assert (config.schedule.kind, config.schedule.steps, flow_shift(config)) == ("unipc-a", 20, 3.0)
    assert (config.schedule.sde, config.schedule.eta) == ("flash", 1.0)
    assert (config.rollout.prompts_per_iteration, config.rollout.group_size) == (24, 8)
    assert (config.rollout.noise, config.rollout.guidance) == ("independent", 4.5)
    assert (config.loss.clip, config.loss.advantage_clamp, config.loss.kl) == (1e-3, 5.0, 0.0)
    assert config.loss.rectification == "update" and config.loss.advantage_std == "raw_update"
    assert sde_window(config) == (0, 10) and config.schedule.draw == "uniform"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"modle": {}}, ["modle", "did you mean 'model'"]),
        ({"model": {"transfromer": "x"}}, ["model.transfromer", "did you mean 'transformer'"]),
        ({"optim": {"zzz": 1}}, ["optim.zzz", "learning_rate"]),
        ({"run": {"preset": "papr"}}, ["papr", "recommended, paper"]),
        ({"schedule": {"steps": 1}}, ["schedule.steps = 1", "2 to 1000"]),
        ({"schedule": {"steps": 2.5}}, ["schedule.steps = 2.5", "a whole number"]),
        ({"schedule": {"steps": "20"}}, ["schedule.steps = '20'", "a whole number"]),
        ({"schedule": {"kind": "karras"}}, ["schedule.kind = 'karras'", "simple, unipc-a"]),
        ({"schedule": {"window": [0, 20]}}, ["schedule.window = [0, 20]", "19", "last"]),
        ({"schedule": {"window": [3, 3]}}, ["schedule.window = [3, 3]"]),
        ({"schedule": {"window": [1]}}, ["schedule.window = [1]"]),
        ({"schedule": {"window": [0.5, 2]}}, ["schedule.window", "list of whole numbers"]),
        ({"schedule": {"window": [True, 2]}}, ["schedule.window", "list of whole numbers"]),
        ({"optim": {"learning_rate": float("nan")}}, ["optim.learning_rate = nan", "finite"]),
        ({"optim": {"learning_rate": 0}}, ["optim.learning_rate = 0.0", "1e-09 to 1.0"]),
        ({"optim": {"learning_rate": True}}, ["optim.learning_rate = True", "a number"]),
        ({"model": {"offload": 1}}, ["model.offload = 1", "true or false"]),
        ({"model": {"transformer": ""}}, ["model.transformer is empty", "tiny"]),
        ({"model": {"lora_targets": "attention"}}, ["model.lora_targets", "list"]),
        ({"model": {"frozen_loras": [{"strength": 1.0}]}}, ["frozen_loras", "file"]),
        ({"model": {"frozen_loras": [{"file": "a", "scale": 1}]}}, ["frozen_loras", "strength"]),
        (
            {"model": {"frozen_loras": [{"file": "a", "strength": float("inf")}]}},
            ["strength inf", "finite"],
        ),
        ({"rollout": {"width": 830}}, ["width 830", "816 or 832"]),
        ({"rollout": {"height": 100}}, ["height 100", "96 or 112"]),
        ({"model": {"vae_tile": 100}}, ["model.vae_tile = 100", "multiple of 64", "256"]),
        ({"optim": {"kind": "adam4bit"}}, ["optim.kind = 'adam4bit'", "adamw, adamw8bit"]),
        ({"rollout": {"frames": 80}}, ["frame count 80", "77 or 81"]),
        ({"rollout": {"group_size": 1}}, ["rollout.group_size = 1", "2 to"]),
        ({"rollout": {"prompts_per_iteration": 1}}, ["prompts_per_iteration = 1", "2 to"]),
        (
            {"reward": {"terms": ["motion"]}},
            ["reward.terms = ['motion']", "list of tables", "name ="],
        ),
        ({"reward": {"terms": [{"weight": 1}]}}, ["reward.terms", "no name"]),
        ({"reward": {"terms": [{"name": "a", "weight": "1"}]}}, ["'a'", "weight '1'", "finite"]),
        (
            {"eval": {"terms": [{"name": "a", "weight": float("inf")}]}},
            ["eval.terms", "weight inf"],
        ),
        ({"run": {"name": "../x"}}, ["run name '../x'", "letters"]),
        ({"run": {"seed": -1}}, ["run.seed = -1", "0 to"]),
        ({"run": {"seed": 2**63}}, ["run.seed", "outside"]),
    ],
)
def test_every_mistake_is_one_line_that_names_value_and_fix(
    tables: dict[str, dict[str, Any]], words: list[str]
) -> None:
    with pytest.raises(FlashGRPOError) as error:
        make(**tables)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_settings_outside_any_table_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FlashGRPOError, match="'seed' stands outside any table"):
        build_config({**MINIMAL, "seed": 1})
    path = tmp_path / "x.toml"
    with pytest.raises(FlashGRPOError, match="does not exist"):
        load_config(path)
    path.write_text("[model\n", encoding="utf-8")
    with pytest.raises(FlashGRPOError, match="not valid TOML"):
        load_config(path)
    path.write_bytes(b"[model]\ntransformer = '\xff'\n")
    with pytest.raises(FlashGRPOError, match="cannot be read"):
        load_config(path)
    with pytest.raises(FlashGRPOError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "x" * 64, "0", "con1", "community"])
def test_good_run_names(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a b",
        "-a",
        ".a",
        "a.",
        "x" * 65,
        "con",
        "CON",
        "nul.txt",
        "com1",
        "lpt9.x",
        "a/b",
        "é",
        "a\n",
    ],
)
def test_bad_run_names(name: str) -> None:
    with pytest.raises(FlashGRPOError, match="run name"):
        check_run_name(name)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 1025))
@settings(max_examples=60, deadline=None)
def test_the_sizes_an_error_proposes_are_accepted(width: int, height: int, frames: int) -> None:
    for _ in range(4):
        try:
            check_size(width, height, frames)
            break
        except FlashGRPOError as exc:
            label, first, second = re.match(r"(\w+).* use (\d+) or (\d+)", str(exc)).groups()  # type: ignore[union-attr]
            assert int(first) <= int(second)
            if label == "width":
                width = int(first)
            elif label == "height":
                height = int(second)
            else:
                frames = int(first)
    check_size(width, height, frames)


@pytest.mark.parametrize(("steps", "window"), [(20, (0, 10)), (5, (0, 2)), (3, (0, 2))])
def test_the_window_defaults_to_the_first_half(steps: int, window: tuple[int, int]) -> None:
    assert sde_window(make(schedule={"steps": steps})) == window
    assert sde_window(make(schedule={"steps": 20, "window": [2, 6]})) == (2, 6)


@pytest.mark.parametrize(
    ("width", "height", "shift", "expected"),
    [
        (832, 480, 0.0, 3.0),
        (1280, 720, 0.0, 5.0),
        (720, 1280, 0.0, 5.0),
        (1280, 704, 0.0, 3.0),
        (1280, 720, 8.0, 8.0),
    ],
)
def test_flow_shift_follows_the_size(
    width: int, height: int, shift: float, expected: float
) -> None:
    config = make(rollout={"width": width, "height": height}, schedule={"shift": shift})
    assert flow_shift(config) == expected


def test_identity_is_what_decides_the_training() -> None:
    old = make()
    longer = make(run={"iterations": 500, "name": "b", "keep": 9}, eval={"every": 3})
    assert identity_differences(old, longer) == [] and config_hash(old) == config_hash(longer)
    other = make(optim={"learning_rate": 1e-5}, run={"seed": 4})
    assert identity_differences(old, other) == [
        "optim.learning_rate: 3e-05 -> 1e-05",
        "run.seed: 0 -> 4",
    ]
    assert config_hash(old) != config_hash(other)


def test_configurations_do_not_share_lists() -> None:
    first, second = make(), make()
    first.model.lora_targets.append("ffn")
    first.reward.terms.append({"name": "motion"})
    assert second.model.lora_targets == ["attention"] and second.reward.terms == []
    tables = {"model": {"transformer": "x", "lora_targets": ["ffn"]}}
    build_config(tables).model.lora_targets.append("attention")
    assert PRESETS["recommended"] == {} and Config().model.lora_targets == ["attention"]
