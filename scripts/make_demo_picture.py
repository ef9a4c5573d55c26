"""Before/after picture of a demo run, for the README.

    python scripts/make_demo_picture.py output/flashgrpo/runs/demo docs/images/demo.jpg

Each row is one test prompt: five frames of the starting policy's video and of the trained one's,
from the same noise, with the reward of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashgrpo_core.video import read_video  # noqa: E402

SIZE, GAP, LINE, FRAMES, ROWS = 72, 6, 22, 5, 6


def main() -> None:
    run, target = Path(sys.argv[1]), Path(sys.argv[2])
    entries = json.loads((run / "samples" / "index.json").read_text(encoding="utf-8"))
    entries = [e for e in entries if e["split"] == "test"]
    # All kept videos in order, not the best ones.
    rows = entries[:ROWS]
    strip = FRAMES * (SIZE + 2)
    width = 2 * strip + 3 * GAP + 24
    height = LINE + len(rows) * (SIZE + LINE + GAP)
    sheet = Image.new("RGB", (width, height), "#16181d")
    draw = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(14), ImageFont.load_default(13)
    left, right = GAP, strip + 2 * GAP + 24
    draw.text((left, 3), "before", fill="#9aa3b2", font=font)
    draw.text((right, 3), "after, same noise", fill="#9aa3b2", font=font)
    for row, entry in enumerate(rows):
        top = LINE + row * (SIZE + LINE + GAP)
        draw.text((left, top + 2), entry["prompt"], fill="#e8ebf0", font=small)
        for x, name, reward in (
            (left, entry["baseline_file"], entry["baseline_reward"]),
            (right, entry["file"], entry["reward"]),
        ):
            video, _ = read_video(run / "samples" / name)
            for i, frame in enumerate(np.linspace(0, len(video) - 1, FRAMES).round().astype(int)):
                picture = Image.fromarray(video[frame]).resize(
                    (SIZE, SIZE), Image.Resampling.LANCZOS
                )
                sheet.paste(picture, (x + i * (SIZE + 2), top + LINE))
            text = f"reward {reward:.2f}"
            place = x + strip - draw.textlength(text, font=small) - 2
            draw.text(
                (place, top + 2), text, fill="#7fd4a8" if reward > 0.8 else "#e0a878", font=small
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target, quality=90)


if __name__ == "__main__":
    main()
