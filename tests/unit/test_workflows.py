"""The shared workflow files: made from the nodes, and what people need is in them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flashgrpo_core.presets import PRESETS

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))
sys.path.insert(0, str(REPO / "tests" / "host"))

import make_workflows  # noqa: E402
import workflow_graph  # noqa: E402
import workflow_pages  # noqa: E402
from api_prompt import api_prompt  # noqa: E402
from workflow_graph import Graph  # noqa: E402

NAMES = sorted(workflow_pages.PAGES)
FOLDER = make_workflows.FOLDER


@pytest.fixture(scope="module")
def info() -> dict[str, Any]:
    """Descriptions of the nodes from the real ComfyUI."""
    return make_workflows.describe()


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def notes(name: str) -> str:
    nodes = load(name)["nodes"]
    return "\n".join(n["widgets_values"][0] for n in nodes if n["type"] == "MarkdownNote")


def test_making_them_again_changes_nothing(info: dict[str, Any]) -> None:
    made = make_workflows.build(info)
    assert sorted(made) == sorted(path.name for path in FOLDER.glob("*.json"))
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, (
            f"{name} is out of date: run python scripts/make_workflows.py"
        )


@pytest.mark.parametrize("name", NAMES)
def test_nodes_and_links_fit(name: str, info: dict[str, Any]) -> None:
    """Both ends of every link agree, and every required input has one."""
    document = load(name)
    nodes = {node["id"]: node for node in document["nodes"]}
    for number, source, slot, target, into, kind in document["links"]:
        output, place = nodes[source]["outputs"][slot], nodes[target]["inputs"][into]
        assert output["type"] == kind and number in output["links"]
        assert kind in place["type"].split(",") and place["link"] == number
        assert nodes[source]["order"] < nodes[target]["order"]
    for node in nodes.values():
        if node["type"] == "MarkdownNote":
            continue
        specs = workflow_graph.widget_specs(info[node["type"]])
        linked = {place["name"] for place in node["inputs"] if place["link"]}
        for required in info[node["type"]]["input_order"]["required"]:
            assert specs[required][2] or required in linked, f"{node['type']}.{required}"
        more = [workflow_graph.companions(k, v[0], v[1]) for k, v in specs.items()]
        expected = sum(spec[2] for spec in specs.values()) + sum(map(len, more))
        assert len(node["widgets_values"]) == expected, node["type"]


@pytest.mark.parametrize("name", NAMES)
def test_seeds_stay(name: str) -> None:
    for node in load(name)["nodes"]:
        assert not {"randomize", "increment", "decrement"} & set(
            v for v in node["widgets_values"] if isinstance(v, str)
        )


@pytest.mark.parametrize("name", NAMES)
def test_nothing_overlaps_and_all_is_on_the_screen(name: str) -> None:
    document = load(name)
    boxes = [
        (x, y - 30, x + w, y + (0 if folded else h))
        for (x, y), (w, h), folded in (
            (n["pos"], n["size"], n["flags"].get("collapsed")) for n in document["nodes"]
        )
    ]
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) <= max(a[1], b[1])
    titles = [(x, y, x + w, y + 34) for x, y, w, _ in (g["bounding"] for g in document["groups"])]
    for title in titles:
        for b in boxes:
            covered = min(title[2], b[2]) > max(title[0], b[0]) and min(title[3], b[3]) > max(
                title[1], b[1]
            )
            assert not covered, "a node covers the title of a group"
    scale, (dx, dy) = document["extra"]["ds"]["scale"], document["extra"]["ds"]["offset"]
    assert scale >= 0.62, "below 0.6 the classic renderer leaves the texts out"
    spread = workflow_graph.SPREAD
    for box in boxes:
        assert (box[0] + dx) * scale >= 60 and (box[1] + dy) * scale >= 90
        left, top = (min(b[0] for b in boxes) + dx) * scale, (min(b[1] for b in boxes) + dy) * scale
        assert left + (box[2] - min(b[0] for b in boxes)) * scale * spread <= 1920
        assert top + (box[3] - min(b[1] for b in boxes)) * scale * spread <= 1080


@pytest.mark.parametrize("name", NAMES)
def test_titles_of_folded_nodes_are_not_cut(name: str) -> None:
    """The classic renderer shows 20 letters of them."""
    for node in load(name)["nodes"]:
        if node["flags"].get("collapsed"):
            assert len(node["title"]) <= 19, node["title"]


@pytest.mark.parametrize("name", NAMES)
def test_groups_titles_and_notes_are_there(name: str) -> None:
    document = load(name)
    assert len(document["groups"]) >= 3 and all(g["title"] for g in document["groups"])
    for group in document["groups"]:
        # A letter of a group's title is 13 wide on average; the rest would lie on the next group.
        assert 13 * len(group["title"]) <= group["bounding"][2], group["title"]
    assert len(notes(name)) > 200


def test_missing_files_are_described() -> None:
    """Every loader of a real file says its name, folder and official address."""
    counts = {"03": 3, "04": 3, "05": 3, "06": 4, "07": 3, "08": 4}
    for name in NAMES:
        if name[:2] not in counts or name == "04b_use_lora_tiny":
            continue
        found = {}
        for node in load(name)["nodes"]:
            files = [
                v
                for v in node["widgets_values"]
                if isinstance(v, str) and v.endswith(".safetensors") and "/" not in v
            ]
            models = {m["name"]: m for m in node["properties"].get("models", [])}
            assert sorted(models) == sorted(files), node["type"]
            found |= models
        assert len(found) == counts[name[:2]], name
        for model in found.values():
            folder, file = model["directory"], model["name"]
            assert folder in ("diffusion_models", "text_encoders", "vae", "clip_vision")
            version = r"2\.2_ComfyUI_R" if file.startswith("wan2.2") else r"2\.1_ComfyUI_r"
            assert re.fullmatch(
                rf"https://huggingface\.co/Comfy-Org/Wan_{version}epackaged/resolve/main/"
                rf"split_files/{folder}/{re.escape(file)}",
                model["url"],
            )


#: Workflows that train, and those that render with their LoRA.
PAIRS = {
    "01_tiny_demo": "04b_use_lora_tiny",
    "03_wan21_1.3b_train": "04_use_lora",
    "05_wan21_14b_train": "05b_wan21_14b_use",
    "06_wan22_a14b_train": "06b_wan22_a14b_use",
    "07_wan22_5b_train": "07b_wan22_5b_use",
    "08_wan21_i2v_train": "08b_wan21_i2v_use",
}


def test_using_a_lora_needs_no_node_of_ours() -> None:
    for name in set(PAIRS.values()) - {"04b_use_lora_tiny"}:
        types = {node["type"] for node in load(name)["nodes"]} - {"MarkdownNote"}
        assert types <= workflow_pages.STOCK_NODES, name
        assert {"UNETLoader", "CLIPLoader", "CLIPTextEncode", "LoraLoaderModelOnly"} <= types
        assert types & {"KSampler", "KSamplerAdvanced"} and "VAEDecode" in types
    tiny = {node["type"] for node in load("04b_use_lora_tiny")["nodes"]} - {"MarkdownNote"}
    assert {t for t in tiny if t.startswith("FlashGRPO")} == {"FlashGRPOEncodePrompt"}


@pytest.mark.parametrize("train", list(PAIRS))
def test_training_and_rendering_agree(train: str, info: dict[str, Any]) -> None:
    """The LoRA workflows take the files that the training ones write, at the same settings."""
    use = PAIRS[train]
    saved = [node["name"] for node in values_of(train, "FlashGRPOSaveLora", info)]
    loaded = [node["lora_name"] for node in values_of(use, "LoraLoaderModelOnly", info)]
    assert loaded == [f"{name}.safetensors" for name in saved]
    (preset,) = values_of(train, "FlashGRPOVideoSettings", info)
    tables = PRESETS[preset["preset"]].tables
    rollout, schedule = tables["rollout"], tables["schedule"]
    size = (rollout["width"], rollout["height"], rollout["frames"])
    (latent,) = [
        found
        for kind in ("EmptyHunyuanLatentVideo", "Wan22ImageToVideoLatent", "WanImageToVideo")
        for found in values_of(use, kind, info)
    ]
    assert (latent["width"], latent["height"], latent["length"]) == size
    # 0 in a preset is the model's own shift, 3 below 720p.
    shifts = [node["shift"] for node in values_of(use, "ModelSamplingSD3", info)]
    assert shifts == [schedule["shift"] or 3.0] * len(saved)
    samplers = values_of(use, "KSampler", info) + values_of(use, "KSamplerAdvanced", info)
    assert [node["cfg"] for node in samplers] == [
        rollout["guidance"],
        rollout["guidance_low"],
    ][: len(saved)]
    for node in samplers:
        assert node["steps"] == schedule["steps"]
        assert (node["sampler_name"], node["scheduler"]) == ("euler", "simple")
    (fps,) = [node["fps"] for node in values_of(use, "CreateVideo", info)]
    assert fps == rollout["fps"]
    if train[:2] < "05":
        return
    (policy,) = values_of(train, "FlashGRPOLoadPolicy", info)
    model = tables["model"]
    assert policy["lora_targets"].split(", ") == model["lora_targets"]
    assert (policy["lora_rank"], policy["lora_alpha"]) == (model["lora_rank"], model["lora_alpha"])
    files = [node["unet_name"] for node in values_of(use, "UNETLoader", info)]
    assert files == [policy["diffusion_model"], policy["low_noise_model"]][: len(saved)]


def test_the_experts_change_where_the_sigma_falls_below_the_boundary(info: dict[str, Any]) -> None:
    """Two samplers, the second where the first ends; at 20 steps and shift 5 that is step 9."""
    high, low = values_of("06b_wan22_a14b_use", "KSamplerAdvanced", info)
    sigma = [5 * t / (1 + 4 * t) for t in (1 - i / 20 for i in range(20))]
    switch = next(i for i, value in enumerate(sigma) if value < 0.875)
    assert (high["start_at_step"], high["end_at_step"], low["start_at_step"]) == (0, switch, switch)
    assert switch == 9 and low["end_at_step"] >= 20
    assert (high["add_noise"], low["add_noise"]) == ("enable", "disable")
    assert high["return_with_leftover_noise"] == "enable"
    assert low["return_with_leftover_noise"] == "disable"
    assert f"step {switch} of 20" in notes("06b_wan22_a14b_use")


def values_of(name: str, kind: str, info: dict[str, Any]) -> list[dict[str, Any]]:
    """Widget values of all nodes of a kind, by name."""
    prompt = api_prompt(load(name), info)
    return [node["inputs"] for node in prompt.values() if node["class_type"] == kind]


def node_of(name: str, kind: str) -> dict[str, Any]:
    found = [node for node in load(name)["nodes"] if node["type"] == kind]
    assert len(found) == 1, kind
    return found[0]


def test_notes_answer_the_usual_questions() -> None:
    assert "trigger word" in notes("03_wan21_1.3b_train") + notes("04_use_lora")
    for part in ("trigger word", "0.5 to 1.5", "size, steps, shift and guidance"):
        assert part in notes("04_use_lora")
    assert "size you render" in notes("03_wan21_1.3b_train")
    assert "01_tiny_demo" in notes("04b_use_lora_tiny") and "press R" in notes("04b_use_lora_tiny")


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("03_wan21_1.3b_train", 3, 9),
        ("05_wan21_14b_train", 8, 30),
        ("06_wan22_a14b_train", 8, 30),
        ("07_wan22_5b_train", 3, 9),
        ("08_wan21_i2v_train", 8, 30),
    ],
)
def test_the_hours_add_up(name: str, least: float, most: float) -> None:
    """The numbers in the note multiply to the hours of one night, of a day for 14B."""
    text = notes(name)
    match = re.search(
        r"about ([\d,]+) transformer forwards per iteration.* (\d+) iterations are ([\d,]+) "
        r"forwards; at about ([\d.]+) s each .* that is \*\*(\d+) hours\*\*",
        text,
    )
    assert match is not None, text
    each, iterations, total, seconds, hours = (float(v.replace(",", "")) for v in match.groups())
    assert iterations == node_of(name, "FlashGRPOTrain")["widgets_values"][1]
    assert abs(each * iterations - total) <= 0.03 * total
    assert abs(total * seconds / 3600 - hours) <= 0.03 * hours + 0.5
    assert least <= hours <= most


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_picture(name: str) -> None:
    path = FOLDER / f"{name}.jpg"
    assert path.stat().st_size < 300_000
    with Image.open(path) as picture:
        assert picture.format == "JPEG"
        assert picture.width >= 480 and picture.height >= 270


def test_wrong_values_are_refused(info: dict[str, Any]) -> None:
    graph = Graph(info, "broken")
    for values, message in (
        ({"no_such_input": 1}, "has no input"),
        ({"strength": 11.0, "lora": "x"}, "outside"),
        ({"strength": 1.0}, "list differs"),
        ({"lora": "x", "previous": "text"}, "takes a link"),
    ):
        with pytest.raises(ValueError, match=message):
            graph.add("FlashGRPOFrozenLora", listed=False, **values)
    with pytest.raises(ValueError, match="needs 'policy'"):
        graph.add("FlashGRPOTrain")
    with pytest.raises(ValueError, match="is not one of"):
        graph.add("FlashGRPOVideoSettings", fields={"preset": "huge"})
