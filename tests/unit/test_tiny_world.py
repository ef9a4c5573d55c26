"""The tiny world, its reward, and the trained tiny Wan that ships with the pack."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import flashgrpo_core
from flashgrpo_core import tiny_world
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards.batch import VideoBatch
from flashgrpo_core.rewards.tiny_world import TinyWorldReward
from flashgrpo_core.wan.decode import decode_latents
from flashgrpo_core.wan.text import load_text_encoder
from flashgrpo_core.wan.transformer import load_transformer
from flashgrpo_core.wan.vae import encode_video, load_vae

ASSETS = Path(flashgrpo_core.__file__).parent / "assets" / "tiny_wan"
T2V = ASSETS / "tiny_wan_t2v.safetensors"
VAE = ASSETS / "tiny_wan_vae.safetensors"
UMT5 = ASSETS / "tiny_wan_umt5.safetensors"
MEGABYTE = 1_000_000


def clips_of(prompts: list[str], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([tiny_world.render_clip(*tiny_world.parse_prompt(p), rng) for p in prompts])


def score(videos: np.ndarray, prompts: list[str]) -> dict[str, np.ndarray]:
    return TinyWorldReward().score(VideoBatch(videos, prompts, 8.0, prompts))


@pytest.fixture(scope="module")
def vae() -> object:
    return load_vae(VAE, torch.float32, "cpu")


def test_captions_can_be_parsed_and_the_split_is_disjoint_complete_and_balanced() -> None:
    every = tiny_world.all_prompts()
    assert len(set(every)) == 72
    for prompt in every:
        assert tiny_world.caption(*tiny_world.parse_prompt(prompt)) == prompt
    split = tiny_world.split_prompts()
    assert {name: len(part) for name, part in split.items()} == {
        "train": 48,
        "validation": 12,
        "test": 12,
    }
    assert sorted(sum(split.values(), [])) == sorted(every)
    for name in ("validation", "test"):
        words = Counter(word for prompt in split[name] for word in prompt.split())
        assert {words[c] for c in tiny_world.COLOURS} == {2}
        assert {words[s] for s in tiny_world.SHAPES} == {4}
        assert {words[d] for d in tiny_world.DIRECTIONS} == {3}
    assert tiny_world.parse_prompt("Two dogs, RED; going Up!") == ("red", None, "up")


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_prompt_files_hold_the_split(name: str) -> None:
    lines = (ASSETS / f"prompts_{name}.txt").read_text(encoding="utf-8").splitlines()
    assert lines == tiny_world.split_prompts()[name]


def test_clips_are_repeatable_and_the_shape_stays_inside() -> None:
    prompts = tiny_world.all_prompts()
    clips = clips_of(prompts, 7)
    assert clips.shape == (72, 9, 64, 64, 3) and clips.dtype == np.uint8
    assert np.array_equal(clips, clips_of(prompts, 7))
    assert not np.array_equal(clips, clips_of(prompts, 8))
    border = np.concatenate([clips[:, :, [0, -1]], clips[:, :, :, [0, -1]].swapaxes(2, 3)], 2)
    assert border.max() < 60 < 190 < clips.max((1, 2, 3, 4)).min()


def test_reward_is_one_for_the_right_caption_and_half_for_a_wrong_word() -> None:
    prompts = tiny_world.all_prompts()
    clips = clips_of(prompts, 1)
    right = score(clips, prompts)
    assert right["tiny_world"].min() > 0.97 and right["tiny_world"].dtype == np.float64

    colours, ways = list(tiny_world.COLOURS), list(tiny_world.DIRECTIONS)
    next_colour = dict(zip(colours, colours[1:] + colours[:1], strict=True))
    next_way = dict(zip(ways, ways[1:] + ways[:1], strict=True))
    fields = [tiny_world.parse_prompt(p) for p in prompts]
    recoloured = [tiny_world.caption(next_colour[c], s, d) for c, s, d in fields]
    turned = [tiny_world.caption(c, s, next_way[d]) for c, s, d in fields]
    both = [tiny_world.caption(next_colour[c], s, next_way[d]) for c, s, d in fields]

    wrong_colour, wrong_way = score(clips, recoloured), score(clips, turned)
    assert wrong_colour["tiny_world.colour"].max() < 0.03
    assert wrong_colour["tiny_world.direction"].min() > 0.97
    assert wrong_way["tiny_world.direction"].max() < 0.03
    assert wrong_way["tiny_world.colour"].min() > 0.97
    assert score(clips, both)["tiny_world"].max() < 0.03
    for scores in (right, wrong_colour, wrong_way):
        mean = (scores["tiny_world.colour"] + scores["tiny_world.direction"]) / 2
        np.testing.assert_allclose(scores["tiny_world"], mean)


def test_reward_grows_steadily_with_hue_and_with_speed() -> None:
    prompt = "a red circle moving right"
    clip = clips_of([prompt], 3)[0]
    lit = (clip.max(-1) > 150)[..., None]
    mixed = [
        np.where(lit, np.array([235, 40 + 195 * share, 40], np.uint8), clip)
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)  # red turns into yellow
    ]
    colour = score(np.stack(mixed).astype(np.uint8), [prompt] * 5)["tiny_world.colour"]
    assert np.all(np.diff(colour) < -0.05) and colour[0] > 0.97 and colour[-1] < 0.05

    still = np.repeat(clip[:1], 9, axis=0)
    shifts = [[np.roll(f, int(t * speed), 1) for t, f in enumerate(still)] for speed in (0, 0.5, 2)]
    way = score(np.array(shifts), [prompt] * 3)["tiny_world.direction"]
    assert way[0] < 1e-9 and 0.2 < way[1] < 0.7 and way[2] > 0.97


def test_reward_gives_nothing_for_noise_flat_colour_or_darkness() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3)).astype(np.uint8)
    red = np.broadcast_to(np.array([235, 40, 40], np.uint8), noise.shape)
    videos = np.stack([noise, red, np.zeros_like(noise)])
    assert np.all(score(videos, ["a red circle moving left"] * 3)["tiny_world"] == 0.0)


@pytest.mark.parametrize(
    ("prompt", "missing"), [("a circle moving left", "colour"), ("a red circle", "direction")]
)
def test_reward_refuses_prompts_it_cannot_judge(prompt: str, missing: str) -> None:
    clip = clips_of(["a red circle moving left"], 0)
    with pytest.raises(FlashGRPOError, match=f"names no {missing}"):
        score(clip, [prompt])


def test_asset_files_are_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 16 * MEGABYTE


def test_vae_reconstructs_clips_and_has_the_latent_statistics_of_wan(vae: object) -> None:
    prompts = tiny_world.all_prompts()[5::6]
    clips = clips_of(prompts, 42)
    latents = encode_video(vae, clips)
    assert latents.shape == (12, 16, 3, 8, 8)
    # Over all clips of the world mean 0 and variance 1; a dozen clips scatter around that.
    assert latents.mean((0, 2, 3, 4)).abs().max() < 0.15
    assert (latents.std((0, 2, 3, 4)) - 1.0).abs().max() < 0.2
    videos = decode_latents(vae, latents)
    error = np.square((videos.astype(np.float64) - clips) / 127.5).mean()
    assert error < 0.02, f"MSE {error:.4f} in -1..1 units"
    assert score(videos, prompts)["tiny_world"].mean() > 0.93


def test_text_encoder_gives_whole_words_and_different_embeddings() -> None:
    encoder = load_text_encoder(UMT5, torch.float32, "cpu")
    ids = encoder.tokenize("a red circle moving left")
    assert len(ids) == 6 and ids[-1] == 1  # five words and the end of text
    assert 2 not in encoder.tokenize("Grüße, 猫!")  # byte fallback: nothing is unknown
    left, right = encoder.encode(["a red circle moving left", "a red circle moving right"], 32)
    assert left.shape == (32, 4096) and torch.all(left[6:] == 0)
    assert 0.5 < left[:6].std() < 2.0
    distance = (left - right).norm(dim=1)
    assert distance[4] > 0.5 * left[4].norm() > 2 * distance[0]


@torch.no_grad()
def test_base_model_follows_prompts_imperfectly(vae: object) -> None:
    prompts = tiny_world.all_prompts()[::5]  # 15 prompts that differ in every word
    context = load_text_encoder(UMT5, torch.float32, "cpu").encode(prompts, 32)
    model, _ = load_transformer(T2V, torch.float32, "cpu")
    x = torch.stack(
        [torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(s)) for s in range(15)]
    )
    u = 1.0 - torch.arange(11) / 10
    sigmas = 3.0 * u / (1.0 + 2.0 * u)
    for now, then in zip(sigmas[:-1], sigmas[1:], strict=True):
        velocity = model(x, (1000.0 * now).expand(15), context, return_dict=False)[0]
        x = x + (then - now) * velocity
    videos = decode_latents(vae, x)
    asked = score(videos, prompts)["tiny_world"].mean()
    # Room to improve, and much better than the same videos under other prompts.
    assert 0.60 < asked < 0.90, asked
    assert asked > score(videos, prompts[4:] + prompts[:4])["tiny_world"].mean() + 0.3
