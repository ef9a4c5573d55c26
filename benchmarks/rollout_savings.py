"""What the cheaper rollouts save, against the loop written down straight, on a mid-size Wan.

    python benchmarks/rollout_savings.py [--rounds 3] [--out benchmarks/results/rollout_savings.json]

A Wan of width 512 with 8 blocks on 768 tokens, random weights, CPU, one thread; one group of 4
videos of 6 steps, the third of them stochastic. One update (rollout and gradient) is timed:

- straight: the loop as the paper describes it, written here by hand with the transformer alone:
  every video on its own from the start, the trained forward computed again;
- exact: this package with its exact savings: shared prefix, text once, kept graph;
- guided: the same with guidance 4.5;
- approximate: guided, with half of the suffix and guidance in an interval;
- few_step: 3 steps without guidance, as with a step-distilled LoRA under the policy.

Variants are interleaved, times are CPU seconds of the process, ratios come from medians. Forwards
are counted by a hook, a backward pass counts 2. Checks: the gradient of `exact` is that of
`straight`; the speed-ups of `exact` and `approximate` are at least 0.95 of the ratio of counted
forwards; with the few-step policy too it is at least 2; everything besides the model's own forwards
and backwards costs at most 10 %. The trained step alone is also timed three ways: computed again,
with its graph kept, and as gradients per sample that would be combined with the advantages.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanTransformer3DModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashgrpo_core.config import LossConfig  # noqa: E402
from flashgrpo_core.forwards import rollout_forwards  # noqa: E402
from flashgrpo_core.groups import PromptGroup, make_groups  # noqa: E402
from flashgrpo_core.kept import KeptGraphs  # noqa: E402
from flashgrpo_core.policy import WanPolicy  # noqa: E402
from flashgrpo_core.rollout import Rollout, RolloutSampler, RolloutSettings  # noqa: E402
from flashgrpo_core.schedule import Schedule, make_schedule  # noqa: E402
from flashgrpo_core.sde import sde_transition  # noqa: E402
from flashgrpo_core.seeds import generator, normal  # noqa: E402
from flashgrpo_core.update import policy_gradient, update_units  # noqa: E402

WIDTH, BLOCKS, SHAPE, TEXT = 512, 8, (16, 3, 32, 32), (64, 64)
TOKENS = SHAPE[1] * SHAPE[2] * SHAPE[3] // 4
VIDEOS, STEPS, SDE_STEP, FEW = 4, 6, 2, 3
GUIDANCE, INTERVAL = 4.5, (0.8, 1.0)
Gradient = dict[str, torch.Tensor]


def make_policy() -> WanPolicy:
    torch.manual_seed(0)
    network = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=WIDTH // 128, attention_head_dim=128,
        in_channels=16, out_channels=16, text_dim=TEXT[1], freq_dim=256, ffn_dim=4 * WIDTH,
        num_layers=BLOCKS, rope_max_seq_len=64,
    ).eval()  # fmt: skip
    policy = WanPolicy(network, rank=16, alpha=32.0, targets=["attention"], seed=0)
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            noise = torch.randn(parameter.shape, generator=generator(0, name, "moved"))
            parameter.add_(0.02 * noise)
    return policy


def embedding(prompt: str) -> torch.Tensor:
    return torch.randn(TEXT, generator=generator(prompt, "embedding"))


class Meter:
    """CPU seconds inside the transformer and backward passes, and the forwards of videos."""

    def __init__(self, policy: WanPolicy) -> None:
        self.model = 0.0
        self.videos = self.backwards = 0
        transformer: Any = policy.transformer
        forward, backward = transformer.forward, torch.Tensor.backward

        def timed_forward(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            self.videos += len(kwargs["hidden_states"])
            if torch.is_grad_enabled():
                self.backwards += len(kwargs["hidden_states"])
            out = forward(*args, **kwargs)
            self.model += time.process_time() - started
            return out

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            started = time.process_time()
            backward(*args, **kwargs)
            self.model += time.process_time() - started

        transformer.forward = timed_forward
        torch.Tensor.backward = timed_backward  # type: ignore[method-assign]


def straight(policy: WanPolicy, group: PromptGroup, advantages: np.ndarray) -> Any:
    """One update without any saving; nothing of the package but the formulas of the step."""
    schedule = make_schedule("simple", STEPS, 3.0)
    step = sde_transition(schedule, SDE_STEP)
    transformer: Any = policy.transformer
    text = embedding(group.prompt).repeat(VIDEOS, 1, 1)

    def velocity(x: torch.Tensor, i: int) -> torch.Tensor:
        times = torch.full((VIDEOS,), float(schedule.timesteps[i]))
        return transformer(
            hidden_states=x, timestep=times, encoder_hidden_states=text, return_dict=False
        )[0]

    x = torch.stack([normal(SHAPE, seed) for seed in group.noise_seeds])
    with torch.no_grad():
        for i in range(STEPS):
            v = velocity(x, i)
            if i == SDE_STEP:
                before, mean = x, step.a_x * x + step.a_v * v
                noise = torch.stack([normal(SHAPE, seed) for seed in group.sde_seeds])
                x = after = mean + step.noise_std * noise
                old = -(after - mean).square().flatten(1).mean(1) / (2 * step.noise_std**2)
            else:
                x = x + v * float(schedule.dt[i])
    mean = step.a_x * before + step.a_v * velocity(before, SDE_STEP)
    new = -(after - mean).square().flatten(1).mean(1) / (2 * step.noise_std**2)
    ratio, values = torch.exp(new - old), torch.from_numpy(advantages[0]).float()
    (-(values * ratio).mean()).backward()
    gradient = {}
    for name, parameter in policy.parameters().items():
        assert parameter.grad is not None
        gradient[name], parameter.grad = parameter.grad.double(), None
    return gradient, x


def packaged(
    policy: WanPolicy,
    group: PromptGroup,
    advantages: np.ndarray,
    schedule: Schedule,
    **options: Any,
) -> Any:
    """One update by the package."""
    settings = RolloutSettings(SHAPE, micro_batch=VIDEOS, **options)
    negative = embedding("negative") if settings.guided else None
    sampler = RolloutSampler(policy, schedule, settings, embedding, negative)
    sampler.kept = KeptGraphs(policy, 8.0)
    rollout: Rollout = sampler.sample(group, range(VIDEOS))
    used = np.ones((1, VIDEOS), bool)
    units = update_units(sampler, [group], [rollout], used, world=_alone())
    gradient, stats = policy_gradient(
        policy, sampler, [group], units, advantages, used, LossConfig(rectification="none"),
        (0, schedule.steps - 1),
    )  # fmt: skip
    assert stats.ratio_drift == 0.0 and stats.reused == stats.forwards
    counted = rollout_forwards([group], schedule, settings)
    return gradient, rollout.final, counted


def _alone() -> Any:
    from flashgrpo_core.distributed import World

    return World()


def trained_step(policy: WanPolicy) -> dict[str, float]:
    """CPU seconds of three ways to get the gradient of a shared group's trained step."""
    parameters = list(policy.parameters().values())
    latents, weights = torch.randn(1, *SHAPE), torch.randn(VIDEOS, *SHAPE)

    def clock(action: Any) -> tuple[float, Any]:
        started = time.process_time()
        result = action()
        return time.process_time() - started, result

    kept = KeptGraphs(policy, 8.0)
    forward, velocity = clock(
        lambda: kept.forward("step", lambda: policy.velocity(latents, 850.0, embedding("a")))
    )
    stored = sum(
        clock(lambda w=w: torch.autograd.grad(velocity[0], parameters, w, retain_graph=True))[0]
        for w in weights
    )
    backward, _ = clock(lambda: torch.autograd.grad(velocity[0], parameters, weights.sum(0)))
    lora = sum(p.numel() * 4 for p in parameters)
    return {
        "again": round(forward + backward, 2),
        "kept_graph": round(backward, 2),
        "stored_per_sample": round(stored, 2),
        "kept_graph_mib": round(kept._sizes["step"] / 2**20, 1),
        "stored_per_sample_mib": round(VIDEOS * lora / 2**20, 1),
    }


def relative(a: Gradient, b: Gradient) -> float:
    """Norm of the difference over the norm of the second."""
    norm = math.sqrt(sum(float(t.square().sum()) for t in b.values()))
    return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in b)) / norm


def measure(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    policy = make_policy()
    meter = Meter(policy)
    groups = make_groups(
        ["a red ball", "a blue box"], iteration=1, run_seed=0, group_size=VIDEOS, window=(0, 4)
    )
    group = replace(groups[0], sde_step=SDE_STEP)
    few = replace(group, sde_step=1)
    advantages = np.array([[1.5, -0.5, -1.2, 0.2]])
    fine, short = make_schedule("simple", STEPS, 3.0), make_schedule("simple", FEW, 3.0)
    guided = {"guidance": GUIDANCE, "guidance_batched": "sequential"}
    variants = {
        "straight": lambda: straight(policy, group, advantages),
        "exact": lambda: packaged(policy, group, advantages, fine),
        "guided": lambda: packaged(policy, group, advantages, fine, **guided),
        "approximate": lambda: packaged(
            policy, group, advantages, fine, **guided, suffix_share=0.5, guidance_interval=INTERVAL
        ),
        "few_step": lambda: packaged(policy, few, advantages, short),
    }
    with torch.no_grad():  # the first calls of a process are slow
        policy.velocity(torch.zeros(VIDEOS, *SHAPE), 500.0, embedding("warm"))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    model: dict[str, list[float]] = {name: [] for name in variants}
    counted, found = {}, {}
    for turn in range(rounds):
        for name, run in variants.items():
            meter.model, meter.videos, meter.backwards = 0.0, 0, 0
            started = time.process_time()
            found[name] = run()
            seconds[name].append(time.process_time() - started)
            model[name].append(meter.model)
            counted[name] = meter.videos + 2 * meter.backwards
            print(f"round {turn + 1} {name}: {seconds[name][-1]:.1f} s", flush=True)
    for name in variants:
        if name != "straight":  # the hook's count is the closed formula and the backward passes
            trained = 2 if name in ("guided", "approximate") else 1
            assert counted[name] == found[name][2] + 2 * trained, name
    time_of = {name: statistics.median(values) for name, values in seconds.items()}
    finals = {name: result[1] for name, result in found.items()}

    def error(name: str) -> float:
        difference = finals[name] - finals["guided"]
        return float(difference.square().mean().sqrt() / finals["guided"].square().mean().sqrt())

    def against(name: str, other: str) -> dict[str, float]:
        ratio, forwards = time_of[other] / time_of[name], counted[other] / counted[name]
        return {
            "speed_up": round(ratio, 3),
            "counted": round(forwards, 3),
            "share_of_counted": round(ratio / forwards, 3),
        }

    bare = {name: statistics.median(values) for name, values in model.items()}
    return {
        "model": {"width": WIDTH, "blocks": BLOCKS, "tokens": TOKENS},
        "group": {"videos": VIDEOS, "steps": STEPS, "sde_step": SDE_STEP, "rounds": rounds},
        "machine": {"platform": platform.platform(), "torch": torch.__version__, "threads": 1},
        "cpu_seconds": {name: round(value, 2) for name, value in time_of.items()},
        "forwards": counted,
        "exact_over_straight": against("exact", "straight"),
        "gradient_difference": relative(found["exact"][0], found["straight"][0]),
        "video_difference": float((finals["exact"] - finals["straight"]).abs().max()),
        "approximate_over_guided": against("approximate", "guided")
        | {"latent_error": round(error("approximate"), 4)},
        "few_step_over_guided": against("few_step", "guided")
        | {"latent_error": round(error("few_step"), 4)},
        "trained_step_cpu_seconds": trained_step(policy),
        "overhead_share": {name: round(time_of[name] / bare[name] - 1, 4) for name in variants},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = measure(args.rounds)
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    exact, approximate = report["exact_over_straight"], report["approximate_over_guided"]
    goals = {
        "exact savings give 0.95 of the counted ratio": exact["share_of_counted"] >= 0.95,
        "approximate savings do too": approximate["share_of_counted"] >= 0.95,
        "with the few-step policy: 2x": report["few_step_over_guided"]["speed_up"] >= 2.0,
        "the same gradient (1e-4 of its norm)": report["gradient_difference"] < 1e-4,
        "overhead at most 10 %": max(report["overhead_share"].values()) <= 0.10,
    }
    for goal, reached in goals.items():
        print(f"{'reached' if reached else 'MISSED '}  {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
