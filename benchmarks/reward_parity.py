"""Compare a reward model here with the original package, on your own weights and video.

    python benchmarks/reward_parity.py pickscore --model PATH --video clip.mp4 --prompt "a red fox"
    python benchmarks/reward_parity.py hpsv2 --model PATH --python ENV/bin/python ...
    python benchmarks/reward_parity.py hpsv3 --model FOLDER --python ENV/bin/python ...
    python benchmarks/reward_parity.py videoreward --model FOLDER --python ENV/bin/python --repo VideoAlign ...

The original runs in its own process with the interpreter `--python`: an environment with `hpsv2`,
with `hpsv3` (`pip install hpsv3`), or with the requirements of the VideoAlign repository, which
`--repo` names. CLIPScore, PickScore and the aesthetic predictor are compared with the code of
their model cards, for which transformers is enough, so `--python` may be left out.

Prints both scores of every frame (of the video, for videoreward) and ends with status 1 when they
differ by more than `--tolerance` (default 0.02, of bf16; use 1e-3 with --dtype fp32).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flashgrpo_core.rewards import REWARDS, VideoBatch
from flashgrpo_core.video import read_video

_PRELUDE = """
import json, sys
job = json.load(open(sys.argv[1], encoding="utf-8"))
import torch
device = job["device"]
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[job["dtype"]]
"""
_CARD = """
from PIL import Image
from transformers import AutoModel, AutoProcessor
model = AutoModel.from_pretrained(job["model"]).eval().to(device, dtype)
processor = AutoProcessor.from_pretrained(job["model"])
images = [Image.open(path) for path in job["frames"]]
pixels = processor(images=images, return_tensors="pt").to(device)["pixel_values"].to(dtype)
def vector(x):
    x = x if torch.is_tensor(x) else x.pooler_output
    return x.float() / x.float().norm(dim=-1, keepdim=True)
with torch.no_grad():
    seen = vector(model.get_image_features(pixel_values=pixels))
"""
_TEXT = """
words = processor(text=[job["prompt"]], padding=True, truncation=True, max_length=77,
                  return_tensors="pt").to(device)
with torch.no_grad():
    scores = (seen @ vector(model.get_text_features(**words)).T)[:, 0]
"""
_DONE = """
json.dump({"scores": [float(s) for s in scores]}, open(job["answer"], "w"))
"""
#: How the original of each reward scores the frames (or the video) of a job.
ORIGINALS = {
    "clipscore": _CARD + _TEXT + _DONE,
    "pickscore": _CARD + _TEXT + "scores = model.logit_scale.float().exp() * scores / 26" + _DONE,
    "aesthetic": _CARD
    + """
state = torch.load(job["head"], map_location="cpu", weights_only=True)
sizes = [768, 1024, 128, 64, 16, 1]
for place, (wide, narrow) in zip((0, 2, 4, 6, 7), zip(sizes, sizes[1:])):
    layer = torch.nn.Linear(wide, narrow)
    layer.load_state_dict({k: state[f"layers.{place}.{k}"] for k in ("weight", "bias")})
    with torch.no_grad():
        seen = layer.to(device)(seen)
scores = seen[:, 0]
"""
    + _DONE,
    "hpsv2": """
import hpsv2
scores = [hpsv2.score(path, job["prompt"], cp=job["model"], hps_version="v2.1")[0]
          for path in job["frames"]]
"""
    + _DONE,
    "hpsv3": """
from hpsv3 import HPSv3RewardInferencer
original = HPSv3RewardInferencer(device=device, checkpoint_path=job["weights"])
with torch.no_grad():
    scores = [original.reward([path], [job["prompt"]])[0][0] for path in job["frames"]]
"""
    + _DONE,
    "videoreward": """
sys.path.insert(0, job["repo"])
from inference import VideoVLMRewardInference
original = VideoVLMRewardInference(job["model"], device=device, dtype=dtype)
with torch.no_grad():
    row = original.reward([job["video"]], [job["prompt"]], use_norm=True)[0]
scores = [row["VQ"], row["MQ"], row["TA"]]
"""
    + _DONE,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("reward", choices=sorted(ORIGINALS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", default="", help="the aesthetic predictor")
    parser.add_argument("--tokenizer", default="", help="folder of CLIP's vocab.json, merges.txt")
    parser.add_argument("--video", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--every", type=int, default=8, help="compare every n-th frame")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the original")
    parser.add_argument("--repo", default="", help="folder of the VideoAlign repository")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--tolerance", type=float, default=0.02)
    args = parser.parse_args()
    video, fps = read_video(args.video)
    frames = video[:: args.every]
    theirs, ours = original(args, frames), own(args, frames, video, fps)
    for place, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        print(f"{place:4d}  original {a:12.6f}  here {b:12.6f}  difference {b - a:+.6f}")
    worst = float(np.max(np.abs(np.array(theirs) - np.array(ours))))
    good = worst <= args.tolerance
    print(
        f"largest difference {worst:.6f}, tolerance {args.tolerance}: {'ok' if good else 'TOO LARGE'}"
    )
    return 0 if good else 1


def original(args: argparse.Namespace, frames: np.ndarray) -> list[float]:
    """Scores by the original, in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i, frame in enumerate(frames):
            paths.append(str(Path(folder) / f"{i:05d}.png"))
            Image.fromarray(frame).save(paths[-1])
        job: dict[str, Any] = {**vars(args), "frames": paths, "answer": f"{folder}/answer.json"}
        job["video"] = str(Path(args.video).absolute())
        if Path(args.model).is_dir():
            found = sorted(Path(args.model).glob("*.safetensors"))
            job["weights"] = str(found[0]) if found else args.model
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        Path(folder, "original.py").write_text(_PRELUDE + ORIGINALS[args.reward], encoding="utf-8")
        command = [args.python, f"{folder}/original.py", f"{folder}/job.json"]
        subprocess.run(command, check=True, cwd=args.repo or None)
        return json.loads(Path(job["answer"]).read_text(encoding="utf-8"))["scores"]


def own(args: argparse.Namespace, frames: np.ndarray, video: np.ndarray, fps: float) -> list[float]:
    """Scores by this project."""
    options = {"model": args.model, "dtype": args.dtype, "device": args.device}
    if args.reward == "aesthetic":
        options["head"] = args.head
    if args.tokenizer:
        options["tokenizer"] = args.tokenizer
    reward = REWARDS[args.reward](**options)
    if args.reward == "videoreward":
        scores = reward.score(VideoBatch(video[None], [args.prompt], fps, ["parity"]))
        return [float(scores[f"videoreward.{part}"][0]) for part in reward.parts]
    count = len(frames)
    batch = VideoBatch(frames[:, None], [args.prompt] * count, fps, ["parity"] * count)
    return [float(value) for value in reward.score(batch)[args.reward]]


if __name__ == "__main__":
    sys.exit(main())
