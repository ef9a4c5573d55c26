"""Make the embedded tiny Wan: ``python scripts/make_tiny_wan --out DIR``.

Everything is trained from random weights on clips of ``flashgrpo_core/tiny_world.py``, on a CPU.
Each stage leaves its result in ``DIR/work`` and is skipped when that is there, so an interrupted
run goes on with the stage it was in; delete a file to redo its stage:

1. codec: principal components of pixel blocks, the latent space (``codec.py``);
2. encoder and decoder: learn the codec, one process each (``vae.py``);
3. text encoder: random frozen weights and a tokenizer (``text.py``);
4. latents: 14400 encoded clips (``wan.py``);
5. wan_first: flow matching on mostly true captions;
6. wan: a short second training with 28 % wrong colours and 28 % wrong directions;
7. the files, in fp16 and ComfyUI's key layout (``keys.py``), checked by ``check.py``.

Measured for the files in ``flashgrpo_core/assets/tiny_wan`` (seed 0, one thread per process):

- encoder: 1200 steps of 6 crops, squared error against the codec 0.011 (variance 1 over whole
  clips, about 2.8 around the shape), 0.4 s of CPU time per step;
- decoder: 800 steps, squared error 0.0073 on crops in -1..1, 0.65 s per step;
- both together, fp16 files, 72 whole clips: reconstruction MSE 0.0037; normalised latents have
  |mean| <= 0.03 and standard deviation 0.97 to 1.05 in every channel;
- wan_first: 3000 steps of 32 clips, running loss 1.36 at step 100, 0.342 at the end,
  0.37 s per step; base reward 0.896 (72 captions x 1 seed);
- wan: 400 steps, loss 0.372 (wrong captions cannot be predicted); base reward 0.743 (colour
  0.709, direction 0.776, standard deviation over samples 0.25; 72 captions x 4 seeds, 10 Euler
  steps, shift 3, no guidance). With 35 % wrong words 0.68, with 45 % 0.58;
- files: 3.55 MB transformer, 1.87 MB VAE, 6.16 MB text encoder.

Tried before: shapes anywhere in the frame, Muon rate 0.01 and 22 % wrong words gave loss 0.459 and
base reward 0.47 after 3000 steps, with shapes that fell apart between latent frames.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import check  # noqa: E402
import keys  # noqa: E402
import text  # noqa: E402
import torch  # noqa: E402
import vae  # noqa: E402
import wan  # noqa: E402
from codec import PatchCodec, render_clips  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from flashgrpo_core import tiny_world  # noqa: E402
from flashgrpo_core.files import save_tensors  # noqa: E402

log = logging.getLogger("make_tiny_wan")


def main() -> None:
    """Run the stages whose result is not in DIR/work yet, then check the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encoder-steps", type=int, default=1200)
    parser.add_argument("--decoder-steps", type=int, default=800)
    parser.add_argument("--wan-steps", type=int, default=3000)
    parser.add_argument("--wan-second-steps", type=int, default=400)
    parser.add_argument("--clips", type=int, default=14400, help="training clips of the Wan")
    parser.add_argument("--threads", type=int, default=1, help="more: faster, other last bits")
    parser.add_argument("--picture", type=Path, help="write a contact sheet of base samples here")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    out, work, seed = options.out, options.out / "work", options.seed
    work.mkdir(parents=True, exist_ok=True)

    if not (work / "codec.safetensors").exists():
        clips, _ = render_clips(720, seed + 1, anywhere=True)
        PatchCodec.fit(clips).save(work / "codec.safetensors")

    # Two cores, two processes: the parts of the VAE do not need each other.
    spawn = multiprocessing.get_context("spawn")
    parts = [
        spawn.Process(target=vae.train_part, args=(part, str(work), steps, 6, seed + offset))
        for part, steps, offset in (
            ("encoder", options.encoder_steps, 12),
            ("decoder", options.decoder_steps, 11),
        )
        if not (work / f"{part}.safetensors").exists()
    ]
    for process in parts:
        process.start()
    for process in parts:
        process.join()
        if process.exitcode:
            sys.exit(f"training a part of the VAE failed with exit code {process.exitcode}")

    out_text = out / check.FILES[2]
    save_tensors(out_text, text.make_tensors(seed + 3), {"format": "pt"})
    for name, prompts in tiny_world.split_prompts().items():
        (out / f"prompts_{name}.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")

    if not (work / "latents.safetensors").exists():
        codec = PatchCodec.load(work / "codec.safetensors")
        data = wan.make_latents(codec, options.clips, seed + 1000)
        save_file(data, work / "latents.safetensors")
    context = text.embed(out_text, tiny_world.all_prompts())
    first, second = "wan_first.safetensors", "wan.safetensors"
    if not (work / first).exists():
        wan.train(
            work,
            context,
            options.wan_steps,
            seed + 21,
            options.threads,
            lr=wan.LR_FIRST,
            wrong=wan.WRONG_FIRST,
            result=first,
        )
    if not (work / second).exists():
        wan.train(
            work,
            context,
            options.wan_second_steps,
            seed + 22,
            options.threads,
            lr=wan.LR_SECOND,
            wrong=wan.WRONG_SECOND,
            start=first,
            result=second,
        )
    finish(work, out)
    check.report(out, options.picture)


def finish(work: Path, out: Path) -> None:
    """Write the trained weights as fp16 in the original key layout."""
    states = {
        check.FILES[0]: keys.transformer_to_original(load_file(work / "wan.safetensors")),
        check.FILES[1]: keys.vae_to_original(vae.assemble(work).state_dict()),
    }
    for name, state in states.items():
        save_tensors(out / name, {k: v.half() for k, v in state.items()}, {"format": "pt"})


if __name__ == "__main__":
    main()
