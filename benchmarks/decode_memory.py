"""What decoding takes with the real VAE's widths: at once, in pieces, in tiles.

    python benchmarks/decode_memory.py [--side 128] [--frames 17] [--base-dim 96]

Random weights in fp32 on the CPU. Counts every allocation of torch, prints bytes per pixel of a frame
(features) and per pixel of the video (what grows with its length), and from them the figures of an
81-frame video of 832x480 in bf16. JSON; the figures of the last run are in `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashgrpo_core.wan.decode import decode_latents, to_bytes, use_tiles  # noqa: E402
from flashgrpo_core.wan.weights import finish  # noqa: E402
from tests.unit._memory import peak_bytes  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--base-dim", type=int, default=96)
    asked = parser.parse_args()
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=asked.base_dim)
    finish(vae)
    side = asked.side // 8
    latents = torch.randn(1, 16, (asked.frames - 1) // 4 + 1, side, side)

    def at_once() -> None:
        with torch.no_grad():
            to_bytes(vae.decode(latents).sample)

    found = {
        "at once": peak_bytes(at_once),
        "in pieces": peak_bytes(lambda: decode_latents(vae, latents)),
    }
    use_tiles(vae, asked.side // 2)
    host = asked.frames * asked.side**2 * 12  # the fp32 video that tiles are put together in
    found["in tiles of half the side"] = peak_bytes(lambda: decode_latents(vae, latents)) - host
    frame, video = asked.side**2, asked.frames * asked.side**2
    features = found["in pieces"] / frame
    grows = (found["at once"] - found["in pieces"]) / video
    real, half = 832 * 480, 2  # pixels; bytes of bf16 against fp32: half of the features
    print(
        json.dumps(
            {
                "settings": vars(asked),
                "peak_mib": {name: round(size / 2**20, 1) for name, size in found.items()},
                "features_bytes_per_pixel_of_a_frame": round(features, 1),
                "further_bytes_per_pixel_of_the_video_at_once": round(grows, 1),
                "832x480x81_bf16_gib": {
                    "in pieces": round(real * features / half / 2**30, 2),
                    "further at once": round(81 * real * grows / 2**30, 2),
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
