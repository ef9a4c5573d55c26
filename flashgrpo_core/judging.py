"""Judging a run: validation chooses the weights, the test reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .advantage import check_masked
from .evaluation import EvalScores, evaluate, paired_interval
from .prompts import Prompt
from .video import write_mp4

if TYPE_CHECKING:
    from .trainer import Trainer

#: Videos of an evaluation that are kept.
KEPT_VIDEOS = {"validation": 4, "test": 8}

Weights = dict[str, torch.Tensor]


def judged_weights(trainer: Trainer) -> Weights | None:
    """The weights that evaluations judge: the EMA's, or None for the live ones."""
    if trainer.config.eval.weights == "ema" and trainer.config.optim.ema_decay > 0:
        return trainer.optimizer.ema
    return None


def chosen_weights(trainer: Trainer) -> tuple[Weights, int]:
    """The weights to test and export, and their iteration: the best on validation, else the newest."""
    state = trainer.state
    if trainer.best is not None and state.best_iteration > 0:
        return trainer.best, state.best_iteration
    if state.best_iteration == 0 and state.iteration > 0:
        trainer.warn(
            state.iteration,
            "no_gain",
            "no evaluation was better than the starting policy, the newest weights are exported: "
            "train longer, lower optim.learning_rate, or check that the reward can be raised",
        )
    return latest_weights(trainer), trainer.state.iteration


def latest_weights(trainer: Trainer) -> Weights:
    """Copies of the weights that an evaluation would judge now."""
    return _copy(trainer, judged_weights(trainer))


def validate_run(trainer: Trainer, iteration: int) -> None:
    """Validation evaluation; keeps the best weights."""
    record = judge(trainer, "validation", iteration, judged_weights(trainer))
    reward, state = record["reward_mean"], trainer.state
    if reward is None or not np.isfinite(reward):
        return
    _hold_back(trainer, record)
    if state.best_reward is None or reward > state.best_reward:
        state.best_reward, state.best_iteration = reward, iteration
        state.evaluations_without_gain = 0
        trainer.best = latest_weights(trainer)
    else:
        state.evaluations_without_gain += 1


def _hold_back(trainer: Trainer, record: dict[str, Any]) -> None:
    """Switch on `loss.kl_on_drop` when the reward is below its best by more than its interval."""
    loss, state = trainer.config.loss, trainer.state
    if not loss.kl_on_drop or state.kl_since >= 0 or state.best_reward is None:
        return
    low, high = record["ci_low"], record["ci_high"]
    known = low is not None and high is not None and np.isfinite(high - low)
    drop = state.best_reward - record["reward_mean"]
    if drop > ((high - low) / 2 if known else 0.0):
        state.kl_since = record["iteration"]
        trainer.warn(
            state.kl_since,
            "kl_on",
            f"the validation reward fell by {drop:.4g} below its best: from now on the policy is held "
            f"by loss.kl_on_drop = {loss.kl_on_drop:g}",
        )


def out_of_patience(trainer: Trainer) -> bool:
    """Whether the last evaluations brought no gain for as long as `eval.patience` allows."""
    patience = trainer.config.eval.patience
    return bool(patience and trainer.state.evaluations_without_gain >= patience)


def judge(trainer: Trainer, split: str, iteration: int, weights: Weights | None) -> dict[str, Any]:
    """Judge weights (None = the live ones) on held-out prompts, against the starting policy.

    Args:
        trainer: the run.
        split: `validation` or `test`.
        iteration: iteration of the weights; 0 is the starting policy itself.
        weights: adapter weights.

    Returns:
        The `evaluation` event.
    """
    e, state = trainer.config.eval, trainer.state
    if split == "validation":
        held, seeds = trainer.prompts.validation[: e.prompts], e.seeds
    else:
        held, seeds = trainer.prompts.test[: e.test_prompts], e.test_seeds
    known = state.baselines.get(split)
    policies = (known is None) + (iteration > 0)
    with trainer.phase("evaluate", 2 * policies * len(trainer.world.deal(held)) * seeds, iteration):
        if known is None:
            with trainer.policy.reference():
                baseline = _sample(trainer, split, held, seeds, 0)
            state.baselines[split] = baseline.to_json()
        else:
            baseline = EvalScores.from_json(known)
        scores = baseline
        if iteration > 0:
            with trainer.policy.using(weights):
                scores = _sample(trainer, split, held, seeds, iteration, baseline)
    difference, low, high = paired_interval(
        scores.total, baseline.total, seed=trainer.config.run.seed
    )
    return trainer.event(
        "evaluation",
        iteration,
        split=split,
        weights="live" if judged_weights(trainer) is None else "ema",
        reward_mean=scores.mean,
        baseline_mean=baseline.mean,
        difference=difference,
        ci_low=low,
        ci_high=high,
        prompts=len(held),
        seeds=seeds,
        terms={k: float(np.nanmean(v)) for k, v in scores.terms.items()},
        baseline_terms={k: float(np.nanmean(v)) for k, v in baseline.terms.items()},
        sampler="ode",
        steps=trainer.schedule.steps,
        guidance=trainer.settings.guidance,
    )


def _copy(trainer: Trainer, weights: Weights | None) -> Weights:
    if weights is None:
        return trainer.policy.snapshot()
    return {name: tensor.clone() for name, tensor in weights.items()}


def _sample(
    trainer: Trainer,
    split: str,
    held: list[Prompt],
    seeds: int,
    iteration: int,
    baseline: EvalScores | None = None,
) -> EvalScores:
    """Sample and score; keeps the first video of the first prompts beside the starting policy's."""
    folder = "base" if iteration == 0 else f"{iteration:06d}"
    fps, entries = trainer.config.rollout.fps, []

    def keep(p: int, s: int, video: np.ndarray, reward: float) -> None:
        if s > 0 or p >= KEPT_VIDEOS[split]:
            return
        name = f"{split}_{p:03d}_{s}.mp4"
        write_mp4(trainer.folder.samples / folder / name, video, fps)
        if baseline is None:
            return
        trainer.control.preview(video, held[p].text)
        entries.append(
            {
                "iteration": iteration,
                "split": split,
                "prompt": held[p].text,
                "seed": s,
                "file": f"{folder}/{name}",
                "reward": reward,
                "baseline_file": f"base/{name}",
                "baseline_reward": float(baseline.total[p, s]),
            }
        )

    if trainer.world.is_main:
        (trainer.folder.samples / folder).mkdir(parents=True, exist_ok=True)
    scores = evaluate(
        trainer.policy,
        trainer.networks.vae,
        held,
        seeds,
        trainer.eval_reward,
        trainer.schedule,
        trainer.settings,
        trainer.context,
        trainer.negative,
        run_seed=trainer.config.run.seed,
        split=split,
        fps=fps,
        decode_batch=trainer.config.rollout.decode_batch,
        control=trainer.control,
        world=trainer.world,
        keep=keep if trainer.world.is_main else None,
        images=trainer.images,
    )
    check_masked(~np.isnan(scores.total), least=0)
    if entries:
        trainer.folder.add_samples(entries)
    return scores
