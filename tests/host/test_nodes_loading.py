"""The pack in ComfyUI: every node is there, explains itself, and an older host is told why not."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from archive import REPO
from harness import PACK_FOLDER, ComfyServer, run_in_comfy

from flashgrpo_core.rewards import REWARDS

NODES = {
    "FlashGRPOLoadPolicy": "Load Wan Policy",
    "FlashGRPOFrozenLora": "Frozen LoRA",
    "FlashGRPOVideoSettings": "Video Settings",
    "FlashGRPOPrompts": "Prompts",
    "FlashGRPOEncodePrompt": "Encode Prompt",
    "FlashGRPOGroups": "Iso-Temporal Groups",
    "FlashGRPORollout": "Rollout Sampler",
    "FlashGRPOScore": "Score Rollouts",
    "FlashGRPOTrainStep": "Train Step",
    "FlashGRPOTrain": "Train",
    "FlashGRPOTrainAdvanced": "Advanced Training Settings",
    "FlashGRPOSaveLora": "Save LoRA",
    "FlashGRPOCompare": "Compare",
    "FlashGRPOLoadRun": "Load Run",
    "FlashGRPOScoreVideos": "Score Videos",
    "FlashGRPOPlan": "Plan",
    "FlashGRPORewardGate": "Reward: Gate",
    "FlashGRPORewardLimits": "Reward: Limits",
    "FlashGRPORewardWinRate": "Reward: Win rate",
    "FlashGRPORewardInstalled": "Reward: Installed",
}
SNAPSHOT = Path(__file__).with_name("node_schemas.json")


@pytest.fixture(scope="module")
def nodes(probe_server: ComfyServer) -> dict[str, Any]:
    """ComfyUI's description of the pack's nodes."""
    every = probe_server.object_info()
    return {name: info for name, info in every.items() if name.startswith("FlashGRPO")}


def widgets(info: dict[str, Any]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """All inputs of a node, in their order."""
    groups = info["input"]
    return {**groups.get("required", {}), **groups.get("optional", {})}


def test_every_node_is_listed(nodes: dict[str, Any], probe_server: ComfyServer) -> None:
    rewards = {f"FlashGRPOReward{''.join(w.title() for w in n.split('_'))}" for n in REWARDS}
    assert nodes.keys() == NODES.keys() | rewards
    for name, title in NODES.items():
        assert nodes[name]["display_name"] == title
    assert all(info["category"].startswith("Flash-GRPO") for info in nodes.values())
    log = probe_server.log()
    assert "Error while calling comfy_entrypoint" not in log
    folder = str(probe_server.custom_nodes / PACK_FOLDER)
    about = [line for line in log.splitlines() if folder in line]
    assert any(line.endswith(f"seconds: {folder}") for line in about)
    assert [line for line in about if "IMPORT FAILED" in line or "Warning:" in line] == []


def test_every_input_explains_itself(nodes: dict[str, Any]) -> None:
    """A tooltip with the effect, and the range where there is one."""
    for name, info in nodes.items():
        assert info["description"], name
        for key, (kind, options) in widgets(info).items():
            tip = options.get("tooltip", "")
            assert len(tip) > 10, f"{name}.{key} has no tooltip"
            if kind in ("INT", "FLOAT"):
                assert "min" in options and "max" in options, f"{name}.{key} has no range"
                assert any(c.isdigit() for c in tip), f"{name}.{key}: no range in {tip!r}"


def test_seeds_stay_and_run_names_have_no_socket(nodes: dict[str, Any]) -> None:
    for name, info in nodes.items():
        for key, (_, options) in widgets(info).items():
            if key == "seed":
                assert options["control_after_generate"] is False, name
            if key == "run_name":
                assert options["socketless"] is True, name


def test_rare_settings_are_folded_away(nodes: dict[str, Any]) -> None:
    folded = {
        name: [key for key, (_, o) in widgets(info).items() if o.get("advanced")]
        for name, info in nodes.items()
    }
    assert "warmup" in folded["FlashGRPOTrainStep"]
    assert "eta" in folded["FlashGRPOTrainAdvanced"]
    assert not folded["FlashGRPOTrain"]


def test_only_safe_files_are_offered(probe_server: ComfyServer) -> None:
    for kind, name in (
        ("diffusion_models", "old.ckpt"),
        ("vae", "old.pt"),
        ("text_encoders", "old.bin"),
        ("loras", "old.pth"),
        ("loras", "new.sft"),
    ):
        (probe_server.models / kind / name).write_bytes(b"")
    info = probe_server.object_info()
    for node, key in (
        ("FlashGRPOLoadPolicy", "diffusion_model"),
        ("FlashGRPOLoadPolicy", "vae"),
        ("FlashGRPOLoadPolicy", "continue_from"),
        ("FlashGRPOPrompts", "text_encoder"),
        ("FlashGRPOFrozenLora", "lora"),
    ):
        options = info[node]["input"]["required"][key][1]["options"]
        assert not any(o.endswith((".ckpt", ".pt", ".bin", ".pth")) for o in options), (node, key)
    assert "new.sft" in info["FlashGRPOFrozenLora"]["input"]["required"]["lora"][1]["options"]
    (probe_server.models / "loras" / "new.sft").unlink()


def test_widgets_and_outputs_are_only_ever_appended(nodes: dict[str, Any]) -> None:
    """Saved workflows are positional: what was published stays where it is."""
    published = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert nodes.keys() >= published.keys(), "a published node is gone"
    for name, old in published.items():
        info = nodes[name]
        for group in ("required", "optional"):
            now = [[k, str(v[0])] for k, v in info["input"].get(group, {}).items()]
            assert now[: len(old[group])] == old[group], f"{name}: {group} inputs changed"
        outputs = [[str(t), n] for t, n in zip(info["output"], info["output_name"], strict=True)]
        assert outputs[: len(old["outputs"])] == old["outputs"], f"{name}: outputs changed"


def test_node_ids_are_literals() -> None:
    """The registry's scanner reads ids from the source, without running it."""
    found = set()
    for path in (REPO / "nodes").glob("*.py"):
        for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(item, ast.ClassDef) and any(
                isinstance(base, ast.Attribute) and base.attr == "ComfyNode" for base in item.bases
            ):
                found |= {
                    keyword.value.value
                    for call in ast.walk(item)
                    if isinstance(call, ast.Call)
                    for keyword in call.keywords
                    if keyword.arg == "node_id" and isinstance(keyword.value, ast.Constant)
                }
    assert found >= NODES.keys()
    assert len(found) == len(NODES) + len(REWARDS)


def test_host_alone_touches_comfyui() -> None:
    """`comfy_api` describes nodes; everything else of ComfyUI goes through host.py."""
    banned = {"comfy", "folder_paths", "server", "nodes", "execution", "comfy_execution"}
    for path in (REPO / "nodes").glob("*.py"):
        if path.name == "host.py":
            continue
        for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in item.names] if isinstance(item, ast.Import) else []
            if isinstance(item, ast.ImportFrom) and item.level == 0:
                names.append(item.module or "")
            assert not {name.split(".")[0] for name in names} & banned, f"{path.name}: {names}"


@pytest.mark.parametrize("trouble", ["hidden", "old"])
def test_an_older_comfyui_gets_a_clear_message(
    pack_folder: Path, tmp_path: Path, trouble: str
) -> None:
    answer = run_in_comfy(
        """
        import importlib.util
        import comfyui_version

        if trouble == "hidden":
            sys.modules["comfy_api.latest"] = None
        else:
            comfyui_version.__version__ = "0.3.60"
        file = os.path.join(pack_path, "__init__.py")
        spec = importlib.util.spec_from_file_location("pack_x", file, submodule_search_locations=[pack_path])
        module = importlib.util.module_from_spec(spec)
        sys.modules["pack_x"] = module
        spec.loader.exec_module(module)
        report(nodes=module.NODE_CLASS_MAPPINGS, entry=hasattr(module, "comfy_entrypoint"))
        """,
        tmp_path,
        pack_path=str(pack_folder),
        trouble=trouble,
    )
    assert answer["nodes"] == {} and not answer["entry"]
    assert "Flash-GRPO has no nodes here: it needs ComfyUI 0.3.75 or newer" in answer["log"]
    if trouble == "old":
        assert "this is ComfyUI 0.3.60" in answer["log"]
