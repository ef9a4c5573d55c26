"""Every Wan family, small: loaded from ComfyUI keys, trained, exported; two experts in one run.

Random weights of the real layouts; the text encoder and the 2.1 VAE are the embedded ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flashgrpo_core.build import build_prompts, load_networks, preflight
from flashgrpo_core.config import Config
from flashgrpo_core.config_io import build_config
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.experts import HIGH, LOW, TwoExperts, expert_weights
from flashgrpo_core.files import open_tensors, save_tensors
from flashgrpo_core.runs.checkpoint import load_checkpoint, newest_checkpoint
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.training import train
from flashgrpo_core.wan.lora import read_lora
from tests.training._family import FAMILIES, job
from tests.training._small import Recorder


def config_of(folder: Path, family: str, **tables: dict[str, object]) -> Config:
    folder.mkdir(exist_ok=True)
    return build_config(job(folder, family, **tables))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "wan2.2-t2v-a14b"])
def test_a_family_trains_and_exports(family, tmp_path):
    config = config_of(tmp_path, family)
    host = Recorder()
    result = train(config, host)
    assert result.status == "finished"
    names = ["high_noise", "low_noise"] if FAMILIES[family][1] == 2 else [""]
    assert len(result.loras) == len(names)
    for name, path in zip(names, result.loras, strict=True):
        pairs = read_lora(path)
        assert all(pair.B is not None and pair.B.abs().max() > 0 for pair in pairs.values())
        header = open_tensors(path).metadata
        assert header["flashgrpo.base_family"] == family
        assert header.get("flashgrpo.expert", "") == name
        if family == "wan2.1-i2v":
            assert {n.rpartition(".")[2] for n in pairs} >= {"add_k_proj", "add_v_proj"}
    iterations = [e for e in host.events if e["event"] == "iteration"]
    assert all(e["ratio_drift"] == 0.0 for e in iterations[:1]) and len(iterations) == 2


@pytest.fixture(scope="module")
def experts_run(tmp_path_factory):
    """Two iterations with both experts, and what was brought to the device in which phase."""
    folder = tmp_path_factory.mktemp("experts")
    config = config_of(folder, "wan2.2-t2v-a14b", optim={"learning_rate": 1e-3, "warmup": 0})
    networks = load_networks(config)
    host = Phases()
    return config, train(config, host, networks=networks), host, networks


class Phases(Recorder):
    """Remembers which networks each phase of each iteration needed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.by_phase: dict[tuple[str, int], list[torch.nn.Module]] = {}

    def bring(self, network: torch.nn.Module) -> None:
        self.by_phase.setdefault(self.current, []).append(network)


def test_each_phase_changes_networks_once(experts_run):
    """All groups pass the high-noise expert before the low-noise one is needed."""
    _, _, host, networks = experts_run
    high, low = networks.transformers
    for iteration in (1, 2):
        for phase in ("rollout", "update"):
            # The VAE is brought for what follows before that phase is announced.
            brought = [n for n in host.by_phase[phase, iteration] if n in (high, low)]
            assert brought == [high, low]


def test_both_experts_are_trained_in_one_run(experts_run):
    _, result, _, networks = experts_run
    assert isinstance(networks.policy, TwoExperts)
    high, low = result.loras
    assert high.name == "family_high_noise_000002.safetensors"
    assert low.name == "family_low_noise_000002.safetensors"
    for path, expert, sigmas in ((high, HIGH, (1.0, 0.875)), (low, LOW, (0.875, 0.0))):
        header = open_tensors(path).metadata
        assert header["flashgrpo.expert"] == expert
        assert header["ss_sd_model_name"].endswith(f"{expert}.safetensors")
        assert float(header["flashgrpo.expert_sigma_high"]) == sigmas[0]
        assert float(header["flashgrpo.expert_sigma_low"]) == sigmas[1]
        trained = [float(header[f"flashgrpo.trained_sigma_{end}"]) for end in ("high", "low")]
        assert sigmas[0] >= trained[0] > trained[1] >= sigmas[1]
        assert all(pair.B.abs().max() > 0 for pair in read_lora(path).values())
    # 8 steps, shift 5: sigma 1, .972, .9375, .893 | .833, .75, ...
    started = next(e for e in read_events(result.folder / "events.jsonl") if "windows" in e)
    assert started["windows"] == {HIGH: [0, 4], LOW: [4, 6]}
    # The two start from draws of their own.
    tensors, _ = load_checkpoint(newest_checkpoint(result.folder / "checkpoints"))
    one, two = (expert_weights(tensors["adapter"], name) for name in (HIGH, LOW))
    assert one.keys() == two.keys()
    assert not any(torch.equal(one[key], two[key]) for key in one)
    assert {key.partition(".")[0] for key in tensors["ema"]} == {HIGH, LOW}


def test_half_of_the_groups_train_each_expert(experts_run):
    _, result, _, _ = experts_run
    lines = (result.folder / "rewards.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for iteration in (1, 2):
        steps = {row["group_id"]: row["sde_step"] for row in rows if row["iteration"] == iteration}
        assert sorted(step < 4 for step in steps.values()) == [False, False, True, True]
        assert len(set(steps.values())) == 4  # no expert sees one noise level twice


def test_a_resumed_run_of_two_experts_ends_with_the_same_bytes(experts_run, tmp_path):
    config, whole, _, _ = experts_run
    again = config_of(tmp_path, "wan2.2-t2v-a14b")
    # The same files under the same paths, in another run.
    again.model, again.prompts = config.model, config.prompts
    again.run.output = str(tmp_path)
    stopped = train(again, Recorder(stop_at=("update", 2)))
    assert stopped.status == "stopped"
    resumed = train(again)
    for one, two in zip(whole.loras, resumed.loras, strict=True):
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("chosen", [HIGH, LOW])
def test_one_expert_can_be_trained_alone(chosen, tmp_path):
    """The other samples too, without a LoRA."""
    config = config_of(tmp_path, "wan2.2-t2v-a14b", run={"iterations": 1}, eval={"test_prompts": 0})
    config.model.train_experts = chosen
    networks = load_networks(config)
    other = networks.policy.experts[LOW if chosen == HIGH else HIGH]
    before = {key: value.clone() for key, value in other.transformer.state_dict().items()}
    result = train(config, networks=networks)
    assert [path.name for path in result.loras] == [f"family_{chosen}_000001.safetensors"]
    after = other.transformer.state_dict()
    assert before.keys() == after.keys() and not other.parameters()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


# ------------------------------------------------------------------------- what does not go together


def refused(config: Config, *words: str) -> None:
    with pytest.raises(FlashGRPOError) as info:
        preflight(config)
    assert all(word in str(info.value) for word in words), str(info.value)


def test_the_lora_of_the_other_expert_is_refused(experts_run, tmp_path):
    config, result, _, _ = experts_run
    config = build_config({"model": vars(config.model), "prompts": vars(config.prompts)})
    high, low = (str(path) for path in result.loras)
    config.model.continue_from, config.model.continue_from_low = low, high
    refused(config, "put on the high_noise expert", "its header says low_noise")
    config.model.continue_from, config.model.continue_from_low = high, low
    preflight(config)
    config.model.frozen_loras = [{"file": high, "expert": LOW}]
    refused(config, "put on the low_noise expert", "its header says high_noise")
    # A file of another trainer says it by its name only.
    foreign = tmp_path / "speed_low_noise.safetensors"
    tensors = open_tensors(low)
    save_tensors(foreign, {key: tensors.get(key) for key in tensors.keys()})
    config.model.frozen_loras = [{"file": str(foreign), "expert": HIGH}]
    refused(config, "put on the high_noise expert", "its file name says low_noise")
    config.model.frozen_loras = [{"file": str(foreign), "expert": LOW}]
    preflight(config)
    # Without an expert it would go on both.
    config.model.frozen_loras = [{"file": str(foreign)}]
    refused(config, "goes on both", "set expert = 'low_noise'")
    # One expert alone, known by its file's name.
    alone = tmp_path / "wan_high_noise.safetensors"
    alone.write_bytes(Path(config.model.transformer).read_bytes())
    config.model.transformer, config.model.transformer_low = str(alone), ""
    config.model.continue_from = config.model.continue_from_low = ""
    refused(config, "put on the high_noise expert", "its file name says low_noise")


def test_blocks_that_are_not_there_are_refused_before_anything_loads(tmp_path):
    config = config_of(tmp_path, "wan2.1-t2v")
    config.model.blocks_to_swap = 99
    refused(config, "model.blocks_to_swap = 99, but this model has", "use 0 to")
    config.model.blocks_to_swap, config.model.blocks_to_keep = 0, 99
    refused(config, "model.blocks_to_keep = 99, but this model has", "use 0 to")


def test_the_lora_of_another_family_is_refused(experts_run, tmp_path):
    _, result, _, _ = experts_run
    config = config_of(tmp_path, "wan2.2-ti2v-5b")
    config.model.frozen_loras = [{"file": str(result.loras[0])}]
    refused(config, "was made for wan2.2-t2v-a14b", "the model is wan2.2-ti2v-5b")


def test_files_that_are_no_pair_are_refused(tmp_path):
    config = config_of(tmp_path, "wan2.2-t2v-a14b")
    high, low = config.model.transformer, config.model.transformer_low
    config.model.transformer, config.model.transformer_low = low, high
    refused(config, "experts are swapped")
    config.model.transformer, config.model.transformer_low = high, high
    refused(config, "same file")
    other = config_of(tmp_path / "i2v", "wan2.2-i2v-a14b")
    config.model.transformer_low = other.model.transformer_low
    refused(config, "model.transformer_low is wan2.2-i2v-a14b", "wan2.1-t2v")


def test_images_and_model_must_agree(tmp_path):
    text = config_of(tmp_path / "t2v", "wan2.1-t2v")
    image = config_of(tmp_path / "i2v", "wan2.2-i2v-a14b")
    text.prompts, image.prompts = image.prompts, text.prompts
    refused(image, "have no start image, which wan2.2-i2v-a14b needs", ".jsonl")
    refused(text, "makes videos from text only")
    needs = config_of(tmp_path / "clip", "wan2.1-i2v")
    needs.model.clip_vision = ""
    refused(needs, "clip_vision_h.safetensors")


def test_an_image_is_known_by_its_content(tmp_path):
    """A renamed image gives the same groups, a changed one gives others."""
    from flashgrpo_core.groups import prompt_key

    config = config_of(tmp_path, "wan2.2-i2v-a14b")
    first = build_prompts(config).train[0]
    moved = tmp_path / "renamed.png"
    moved.write_bytes(Path(first.image).read_bytes())
    assert prompt_key(first.text, str(moved)) == prompt_key(first.text, first.image)
    moved.write_bytes(moved.read_bytes() + b"x")
    assert prompt_key(first.text, str(moved)) != prompt_key(first.text, first.image)


# -------------------------------------------------------------------------- the first frame of the 5B


@torch.no_grad()
def test_a_5b_video_ends_on_its_start_image(tmp_path):
    """The given latent frame is reached without a mask, and the rest is a video of its own."""
    from flashgrpo_core.build import build_schedule, latent_layout, rollout_settings
    from flashgrpo_core.conditioning import StartImage
    from flashgrpo_core.ode import sample_ode
    from flashgrpo_core.seeds import normal

    config = config_of(tmp_path, "wan2.2-ti2v-5b", rollout={"guidance": 1.0})
    networks = load_networks(config)
    settings = rollout_settings(config, *latent_layout(networks))
    assert settings.latent_shape == (48, 2, 4, 4)
    first = normal((48, 1, 4, 4), 9)
    context = normal((32, 4096), 2)
    schedule = build_schedule(config)
    image = StartImage(first=first)
    video = sample_ode(networks.policy, [1], schedule, settings, context, image=image)[0]
    assert float((video[:, :1] - first).abs().max()) < 1e-5
    free = sample_ode(networks.policy, [1], schedule, settings, context)[0]
    assert float((video[:, 1:] - free[:, 1:]).abs().max()) > 1e-2
    assert np.isfinite(video.numpy()).all()
