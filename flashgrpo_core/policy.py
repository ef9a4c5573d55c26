"""The policy: a frozen Wan transformer and the LoRA that is trained on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer

from .conditioning import StartImage, known_velocity, model_inputs
from .errors import FlashGRPOError
from .seeds import generator
from .wan.context import share_context
from .wan.lora import LoraPair, target_modules
from .wan.recompute import checkpoint_blocks

if TYPE_CHECKING:
    from torch import nn

    from .schedule import Schedule
    from .sharding import Lockstep

ADAPTER = "policy"


class AdapterFacts(Protocol):
    """What writing a LoRA file needs to know of a policy; its network is not among it."""

    @property
    def rank(self) -> int:
        """LoRA rank."""

    @property
    def alpha(self) -> float:
        """LoRA alpha."""

    @property
    def dtype(self) -> Any:
        """Compute type of the frozen weights."""


def adapter_pairs(
    weights: Mapping[str, torch.Tensor],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """`WanPolicy.snapshot`-style tensors as module name -> (A `[r, in]`, B `[out, r]`)."""
    modules = sorted(n.removesuffix(".lora_A") for n in weights if n.endswith(".lora_A"))
    return {m: (weights[f"{m}.lora_A"], weights[f"{m}.lora_B"]) for m in modules}


class WanPolicy:
    """Velocity field of a Wan model with a trainable LoRA.

    The reference policy is the same network with the LoRA switched off, or, when training
    continues from a LoRA, with that LoRA's starting weights. Frozen LoRAs are part of the base
    (merged before the policy is built), so they stay on in both.

    Args:
        transformer: diffusers' `WanTransformer3DModel`, frozen; it is changed in place.
        rank: LoRA rank.
        alpha: LoRA alpha; the update is scaled by alpha / rank.
        targets: `attention`, `ffn` or module-name endings.
        seed: seed of the LoRA's random half.
        gradient_checkpointing: recompute activations in the backward pass.
        blocks_to_keep: with it, number of blocks, from the last, whose activations are kept.
        name: `high_noise` or `low_noise` for one of two experts, else empty.
        trained: False attaches no LoRA: an expert that only takes part in sampling.

    Raises:
        FlashGRPOError: a target matches no module, or more blocks to keep than there are.
    """

    def __init__(
        self,
        transformer: nn.Module,
        *,
        rank: int = 16,
        alpha: float = 32.0,
        targets: list[str] | None = None,
        seed: int = 0,
        gradient_checkpointing: bool = False,
        blocks_to_keep: int = 0,
        name: str = "",
        trained: bool = True,
    ) -> None:
        self.transformer = transformer
        self.name = name
        self.lockstep: Lockstep | None = None  # set when the weights are sharded
        self.rank = rank
        self.alpha = float(alpha)
        transformer.requires_grad_(False)
        transformer.eval()
        self._layers: dict[str, Any] = {}
        self._initial: dict[str, torch.Tensor] | None = None
        self._caching = False
        self.targets: list[str] = []
        if trained:
            self.targets = target_modules(transformer, targets or ["attention"])
            self._attach()
        share_context(transformer)
        self.initialise(seed)
        if gradient_checkpointing:
            checkpoint_blocks(transformer, blocks_to_keep)

    def _attach(self) -> None:
        """Put the LoRA on the target modules."""
        transformer = self.transformer
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=self.targets,
            init_lora_weights=True,
        )
        with torch.random.fork_rng(devices=[]):  # PEFT draws initial weights; ours come from `seed`
            inject_adapter_in_model(config, transformer, adapter_name=ADAPTER)
        self._layers = {
            name: module
            for name, module in transformer.named_modules()
            if isinstance(module, BaseTunerLayer)
        }
        for layer in self._layers.values():
            a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
            # PEFT follows the base's dtype; LoRA weights are fp32 whatever the base is.
            a.float(), b.float()

    @property
    def experts(self) -> dict[str, WanPolicy]:
        """The networks by name: one without a name here, two in `experts.TwoExperts`."""
        return {self.name: self}

    @property
    def trained(self) -> dict[str, WanPolicy]:
        """Those of `experts` that have a LoRA."""
        return self.experts if self._layers else {}

    def stages(self, schedule: Schedule) -> list[tuple[WanPolicy, range]]:
        """Who computes which sampling steps, in order."""
        return [(self, range(schedule.steps))]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set the LoRA to its start, A random and B zero, and the reference policy to the base."""
        self._initial = None
        for name, layer in self._layers.items():
            a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            noise = torch.randn(a.shape, generator=generator(seed, name, "lora"))
            a.copy_(noise / self.rank)
            b.zero_()

    @property
    def device(self) -> torch.device:
        """Where the transformer's weights are."""
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Compute type of the frozen weights."""
        return self.transformer.patch_embedding.weight.dtype  # type: ignore[union-attr,return-value]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained tensors by name, sorted: `<module>.lora_A` `[r, in]`, `<module>.lora_B` `[out, r]`."""
        found = {}
        for name, layer in self._layers.items():
            found[f"{name}.lora_A"] = layer.lora_A[ADAPTER].weight
            found[f"{name}.lora_B"] = layer.lora_B[ADAPTER].weight
        return dict(sorted(found.items()))

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of the trained tensors on the CPU, by name."""
        return {name: p.detach().to("cpu", copy=True) for name, p in self.parameters().items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the trained tensors from `snapshot`-style names, all or none.

        Raises:
            FlashGRPOError: names or shapes do not match this policy's LoRA.
        """
        own = self.parameters()
        missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        if missing or extra:
            raise FlashGRPOError(
                f"adapter does not fit: {len(missing)} tensors missing (first: {missing[:1]}), "
                f"{len(extra)} unknown (first: {extra[:1]}); use the LoRA targets it was made with"
            )
        for name, parameter in own.items():
            if parameter.shape != weights[name].shape:
                raise FlashGRPOError(
                    f"adapter tensor {name} is {tuple(weights[name].shape)}, this policy needs "
                    f"{tuple(parameter.shape)}: set model.lora_rank to the adapter's rank"
                )
        for name, parameter in own.items():
            parameter.copy_(weights[name])

    def set_reference(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Make `weights` the reference policy (used when training continues from a LoRA)."""
        self._initial = {name: w.detach().clone() for name, w in weights.items()}

    def lora_pairs(
        self, weights: Mapping[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """`snapshot`-style tensors as module name -> (A `[r, in]`, B `[out, r]`)."""
        return {
            name: (weights[f"{name}.lora_A"], weights[f"{name}.lora_B"]) for name in self._layers
        }

    @contextmanager
    def using(self, weights: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
        """Run with other adapter weights (EMA, a checkpoint), then restore the live ones."""
        if weights is None:
            yield
            return
        live = self.snapshot()
        self.load(weights)
        try:
            yield
        finally:
            self.load(live)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Run as the reference policy: base and frozen LoRAs only, or the starting LoRA."""
        if self._initial is not None:
            with self.using(self._initial):
                yield
            return
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)
            # enable_adapters(False) clears requires_grad on some PEFT versions.
            for parameter in self.parameters().values():
                parameter.requires_grad_(True)

    def velocity(
        self,
        latents: torch.Tensor,
        timestep: float,
        context: torch.Tensor,
        negative: torch.Tensor | None = None,
        guidance: float = 1.0,
        image: StartImage | None = None,
        *,
        batched: bool = False,
    ) -> torch.Tensor:
        """Guided velocity v ~ noise - x0.

        Args:
            latents: float32 `[B, C, T, H, W]`, normalised.
            timestep: 1000 * sigma.
            context: prompt embedding `[tokens, text_dim]`, shared by the batch.
            negative: embedding of the negative prompt, needed when guidance is not 1.
            guidance: classifier-free guidance g: v_neg + g * (v - v_neg); 1 skips v_neg.
            image: the start image, shared by the batch; None makes videos from text only.
            batched: compute both halves of guidance in one forward of 2 B videos, when the prompt
                embeddings are equally long.

        Returns:
            float32 `[B, C, T, H, W]`.
        """
        if guidance != 1.0 and negative is None:
            raise FlashGRPOError(f"guidance {guidance} needs a negative prompt embedding")
        guided = negative is not None and guidance != 1.0
        together = batched and guided and negative is not None and negative.shape == context.shape
        if self.lockstep is not None:
            self.lockstep.announce(self, guided=guided and not together)
        if not guided or negative is None:
            velocity = self._forward(latents, timestep, context[None], image)
        else:
            if together:
                both = torch.stack([context, negative])
                out = self._forward(torch.cat([latents] * 2), timestep, both, image, "both")
                velocity, unguided = out.chunk(2)
            else:
                velocity = self._forward(latents, timestep, context[None], image)
                unguided = self._forward(latents, timestep, negative[None], image, "negative")
            velocity = unguided + guidance * (velocity - unguided)
        if image is not None and image.first is not None:
            velocity = known_velocity(velocity, latents, image.first, timestep)
        return velocity

    @contextmanager
    def caching(self, threshold: float) -> Iterator[None]:
        """First-block cache of diffusers for the forwards inside: steps that change little are cut.

        When the first block's residual differs from that of the last full forward by less than
        `threshold` (mean absolute difference over mean absolute value, over the batch), the other
        blocks are not computed and their last residual is added. Approximate; only for steps that
        are not trained. It starts empty each time.

        Args:
            threshold: 0 caches nothing; 0.05 to 0.2 are usual.
        """
        if threshold == 0.0:
            yield
            return
        from diffusers import FirstBlockCacheConfig

        transformer: Any = self.transformer
        transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        self._caching = True
        try:
            yield
        finally:
            self._caching = False
            transformer.disable_cache()

    def _forward(
        self,
        latents: torch.Tensor,
        timestep: float,
        context: torch.Tensor,
        image: StartImage | None,
        half: str = "prompt",
    ) -> torch.Tensor:
        """One forward; `context` `[R, tokens, text_dim]` as in wan/context.py."""
        device, dtype = self.device, self.dtype
        batch = latents.shape[0]
        inputs: dict[str, torch.Tensor] = {
            "hidden_states": latents.to(device, dtype),
            "timestep": torch.full((batch,), timestep, device=device, dtype=torch.float32),
        }
        if image is not None:
            patch = self.transformer.config.patch_size  # type: ignore[union-attr]
            inputs = model_inputs(inputs["hidden_states"], timestep, image, patch)  # type: ignore[arg-type]
        tokens = inputs.get("encoder_hidden_states_image")
        if tokens is not None:
            inputs["encoder_hidden_states_image"] = tokens.expand(len(context), -1, -1)
        transformer: Any = self.transformer
        with transformer.cache_context(half) if self._caching else nullcontext():
            out = transformer(
                **inputs, encoder_hidden_states=context.to(device, dtype), return_dict=False
            )[0]
        return out.float()


def forwards_per_velocity(guidance: float) -> int:
    """Transformer forwards of one `velocity` call per video."""
    return 1 if guidance == 1.0 else 2


def policy_weights(policy: WanPolicy, pairs: Mapping[str, LoraPair]) -> dict[str, torch.Tensor]:
    """LoRA pairs as `WanPolicy.load` takes them, each file scale folded into B.

    Raises:
        FlashGRPOError: a pair has another rank than the policy, or is no plain LoRA.
    """
    weights = {}
    for name, pair in pairs.items():
        if pair.A is None or pair.B is None or pair.rank != policy.rank:
            raise FlashGRPOError(
                f"LoRA has rank {pair.rank} in {name}, the policy has {policy.rank}: set "
                f"model.lora_rank = {pair.rank}, or use the file as a frozen LoRA"
            )
        weights[f"{name}.lora_A"] = pair.A.float()
        weights[f"{name}.lora_B"] = pair.B.float() * (pair.scale * policy.rank / policy.alpha)
    return weights
