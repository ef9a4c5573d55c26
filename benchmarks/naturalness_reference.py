"""The reference of the `naturalness` reward: its ten features over public photographs.

    python -m pip install scikit-image scikit-learn   # they ship the photographs
    python benchmarks/naturalness_reference.py

Prints the two tables of `flashgrpo_core/rewards/naturalness.py`. Used are eight photographs
(scikit-image: astronaut, camera, chelsea, coffee, rocket, motorcycle; scikit-learn: china, flower),
each at three sizes (short side 512, 360 and 256) and cut into overlapping squares of 192 pixels with
enough contrast.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashgrpo_core.rewards.flow import luma  # noqa: E402
from flashgrpo_core.rewards.naturalness import features  # noqa: E402

PHOTOS = {
    "skimage": ["astronaut.png", "camera.png", "chelsea.png", "coffee.png", "rocket.jpg"]
    + ["motorcycle_left.png"],
    "sklearn": ["china.jpg", "flower.jpg"],
}
FOLDERS = {"skimage": "data", "sklearn": "datasets/images"}
PATCH = 192


def photos() -> list[np.ndarray]:
    found = []
    for package, names in PHOTOS.items():
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin, f"pip install {package}"
        folder = Path(spec.origin).parent / FOLDERS[package]
        found += [np.asarray(Image.open(folder / name).convert("RGB")) for name in names]
    return found


def main() -> None:
    rows = []
    for photo in photos():
        for side in (512, 360, 256):
            scale = min(1.0, side / min(photo.shape[:2]))
            size = (round(photo.shape[1] * scale), round(photo.shape[0] * scale))
            picture = np.asarray(Image.fromarray(photo).resize(size, Image.Resampling.LANCZOS))
            grey = luma(picture[None].copy())[0]
            squares = [
                grey[y : y + PATCH, x : x + PATCH]
                for y in range(0, grey.shape[0] - PATCH + 1, PATCH // 2)
                for x in range(0, grey.shape[1] - PATCH + 1, PATCH // 2)
            ]
            rows += [features(s) for s in squares if float(s.std()) > 15]
    table = torch.stack(rows)
    centred = table - table.mean(0)
    covariance = centred.T @ centred / (len(table) - 1)
    values, vectors = torch.linalg.eigh(covariance)
    whiten = vectors @ torch.diag(values.clamp(min=1e-4).rsqrt()) @ vectors.T
    print(len(table), "squares")
    print(f"_MEAN = ({', '.join(f'{v:.4f}' for v in table.mean(0))})")
    print("_WHITEN = (")
    for row in whiten:
        print(f"    ({', '.join(f'{v:.3f}' for v in row)}),")
    print(")")


if __name__ == "__main__":
    main()
