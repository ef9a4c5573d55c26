"""Presets by model and card: they load, the user's own settings lie above, old names go on."""

from __future__ import annotations

import pytest

from flashgrpo_core.config_io import build_config, dump_toml, load_config
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.presets import FORMER, PRESETS, find_preset, names_for, preset_tables

TINY = {"model": {"transformer": "tiny"}}

#: Names that workflows of earlier versions may hold.
EARLIER = (
    "tiny Wan, any computer",
    "Wan 2.1 1.3B, 12 GB, 416x240",
    "Wan 2.1 1.3B, 24 GB, 416x240",
    "Wan 2.1 1.3B, 24 GB, 832x480",
    "Wan 2.2 5B, 48 GB, 704x384",
    "Wan 14B, 80 GB, 832x480",
    "Wan 2.1 14B I2V, 80 GB, 832x480",
    "Wan 2.2 A14B T2V, 80 GB, 832x480",
    "Wan 2.2 A14B I2V, 80 GB, 832x480",
)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_configuration(name: str) -> None:
    tables = preset_tables(name)
    config = build_config(
        {**tables, "model": {**tables["model"], "transformer": "wan.safetensors"}}
    )
    assert config.rollout.width == tables["rollout"]["width"]
    assert config.model.lora_targets == tables["model"]["lora_targets"]
    multiple = 32 if "5B" in name else 16  # the 2.2 VAE has 16 pixels per latent, patches of two
    assert config.rollout.width % multiple == config.rollout.height % multiple == 0


@pytest.mark.parametrize("name", EARLIER)
def test_saved_names_go_on(name: str) -> None:
    assert find_preset(name).tables["rollout"]["width"] > 0
    assert name in PRESETS or FORMER[name] in PRESETS


def test_values_replace_those_of_the_preset() -> None:
    name = "Wan 2.1 1.3B, 24 GB, 416x240"
    changed = preset_tables(name, {"width": 480, "steps": 0})
    assert changed["rollout"]["width"] == 480 and changed["schedule"]["steps"] == 20
    assert PRESETS[name].tables["rollout"]["width"] == 416


def test_the_tables_of_the_user_lie_above(tmp_path) -> None:
    run = {"model_preset": "Wan 2.1 14B T2V, 24 GB, 624x352"}
    config = build_config({"model": {"transformer": "wan.safetensors"}, "run": run})
    assert (config.rollout.width, config.model.storage) == (624, "fp8")
    own = {"model": {"transformer": "wan.safetensors", "storage": "full"}, "run": run}
    changed = build_config({**own, "rollout": {"width": 416}})
    assert (changed.rollout.width, changed.rollout.height) == (416, 352)
    assert (changed.model.storage, changed.model.blocks_to_swap) == (
        "full",
        config.model.blocks_to_swap,
    )
    # The configuration that a run keeps is complete: it loads the same.
    (tmp_path / "config.toml").write_text(dump_toml(changed), encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == changed


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(FlashGRPOError, match="did you mean 'Wan 2.1 1.3B, 12 GB, 416x240'"):
        build_config({**TINY, "run": {"model_preset": "Wan 2.1 1.3B, 12 GB"}})


def test_each_model_has_presets_from_small_to_large_cards() -> None:
    models = {preset.model for preset in PRESETS.values()} - {""}
    assert len(models) == 6
    for model in models:
        cards = [PRESETS[name].card_gb for name in names_for(model)]
        assert cards == sorted(cards) and {12, 16, 24, 48} <= set(cards)
