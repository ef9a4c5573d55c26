"""Qwen2-VL as the body of a reward model, the way HPSv3 and VideoReward were trained.

Both were trained with transformers 4.45 and a `forward` of their own that leaves `position_ids`
empty, which that version filled with 0, 1, 2, ... on all three axes. Later versions compute
multimodal positions there, which gives other hidden states; so the positions are passed here.
The names of the weights changed with transformers 4.52 and are mapped. The pictures are prepared
here with PIL and torch: the processor of transformers needs torchvision.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import FlashGRPOError
from .checkpoint import Tensors, build, load_weights, read_json
from .clip import normalise

#: Largest ratio of the sides of a picture.
MAX_RATIO = 200

_TURN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{text}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


class RewardNetwork(nn.Module):
    """The language and vision model with a reward head in place of its own.

    Args:
        config: `Qwen2VLConfig`.
        head: the reward head.
    """

    def __init__(self, config: Any, head: nn.Module) -> None:
        super().__init__()
        from transformers import Qwen2VLForConditionalGeneration

        whole = Qwen2VLForConditionalGeneration(config)
        inner = whole.model
        # Until transformers 4.51 the vision model lay beside the language model.
        self.visual = inner.visual if hasattr(inner, "visual") else whole.visual
        self.language = inner.language_model if hasattr(inner, "language_model") else inner
        self.rm_head = head

    def forward(
        self, ids: torch.Tensor, patches: torch.Tensor, grid: torch.Tensor, pad: int, at: list[int]
    ) -> torch.Tensor:
        """Head outputs fp32 `[B, len(at), n]` at the positions of the reward tokens.

        Args:
            ids: token ids `[B, L]`, all of one length.
            patches: pixels `[N, 3 * 2 * 14 * 14]` of all pictures, see `to_patches`.
            grid: patches per picture or clip along time, height and width, `[B, 3]`.
            pad: id of the token that stands for a merged patch.
            at: places of the reward tokens, 0 to L - 1.
        """
        embeddings = self.language.embed_tokens(ids)  # [B, L, D]
        seen = self.visual(patches.to(embeddings.dtype), grid_thw=grid)
        seen = seen if torch.is_tensor(seen) else seen.pooler_output  # [N / 4, D]
        mask = (ids == pad).unsqueeze(-1).expand_as(embeddings)
        embeddings = embeddings.masked_scatter(mask, seen.to(embeddings.dtype))
        count, length = ids.shape
        positions = torch.arange(length, device=ids.device).view(1, 1, -1).expand(3, count, -1)
        hidden = self.language(
            inputs_embeds=embeddings,
            attention_mask=torch.ones_like(ids),
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        # The head keeps its own dtype.
        wanted = next(self.rm_head.parameters()).dtype
        return self.rm_head(hidden[:, at].to(wanted)).float()


@dataclass
class QwenReward:
    """A loaded reward model.

    Attributes:
        network: the network.
        tokenizer: `tokenizers.Tokenizer` with the reward tokens.
        rewards: ids of the reward tokens.
        patch: side of a patch, pixels.
        merge: patches along a side that become one token.
        pads: ids of the tokens that stand for a merged patch, by `image` and `video`.
    """

    network: RewardNetwork
    tokenizer: Any
    rewards: list[int]
    patch: int
    merge: int
    pads: dict[str, int]

    def __call__(self, kind: str, text: str, planes: torch.Tensor, clip: bool) -> torch.Tensor:
        """Head outputs fp32 `[n, tokens, outputs]` for one text.

        Args:
            kind: `image` or `video`.
            text: what follows the picture in the user's turn, with every reward token once.
            planes: pixels 0..1, fp32 `[n, 3, H, W]`, sides divisible by `patch * merge`.
            clip: whether the planes are the frames of one clip, else `n` pictures.
        """
        patches, one = to_patches(planes, self.patch, self.merge, clip)
        count = 1 if clip else len(planes)
        tokens = math.prod(one) // self.merge**2
        words = _TURN.format(pads=f"<|{kind}_pad|>" * tokens, text=text)
        row = self.tokenizer.encode(words, add_special_tokens=False).ids
        device = self.network.visual.patch_embed.proj.weight.device
        ids = torch.tensor([row] * count, device=device)  # [n, L]
        grid = torch.tensor([one] * count, device=device)
        at = [row.index(token) for token in self.rewards]
        return self.network(ids, patches.to(device), grid, self.pads[kind], at)


def plain(prompt: str) -> str:
    """A prompt that cannot bring special tokens of its own."""
    return prompt.replace("<|", "< |")


# --- preprocessing ------------------------------------------------------------------------------


def fit_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Qwen2-VL's size rule: multiples of `factor`, area within limits, shape kept.

    Raises:
        FlashGRPOError: the picture is more than 200 times as long as wide.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise FlashGRPOError(
            f"frames of {width}x{height} are too narrow for this reward: one side may be at most "
            f"{MAX_RATIO} times the other"
        )
    new = [max(factor, round(side / factor) * factor) for side in (height, width)]
    area = height * width
    if new[0] * new[1] > max_pixels:
        scale = math.sqrt(area / max_pixels)
        new = [max(factor, math.floor(s / scale / factor) * factor) for s in (height, width)]
    elif new[0] * new[1] < min_pixels:
        scale = math.sqrt(min_pixels / area)
        new = [math.ceil(s * scale / factor) * factor for s in (height, width)]
    return new[0], new[1]


def to_patches(
    planes: torch.Tensor, patch: int, merge: int, clip: bool
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Normalised pixels in the order in which Qwen2-VL reads them.

    Two frames make one patch in time; a picture is taken twice. Patches that are merged into one
    token lie next to each other.

    Args:
        planes: pixels 0..1, fp32 `[n, 3, H, W]`.
        patch: side of a patch.
        merge: patches along a side that become one token.
        clip: whether the planes are the frames of one clip (an even number), else `n` pictures.

    Returns:
        `[n / 2 or n, ...]` flattened to `[N, 3 * 2 * patch * patch]`, and the grid (time, height,
        width) of one clip or picture.
    """
    pixels = normalise(planes)
    pixels = pixels if clip else pixels.repeat_interleave(2, dim=0)
    frames, channels, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    cut = pixels.reshape(
        frames // 2, 2, channels, rows // merge, merge, patch, columns // merge, merge, patch
    )
    # [t, row, column, row in token, column in token, channel, 2, patch, patch]
    cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    grid = (frames // 2 if clip else 1, rows, columns)
    return cut.reshape(-1, channels * 2 * patch * patch), grid


# --- loading ------------------------------------------------------------------------------------


def load_qwen_reward(
    folder: Path,
    tensors: Tensors,
    source: Path,
    tokens: list[str],
    dtype: torch.dtype,
    head: nn.Module,
    fp32_head: bool,
) -> QwenReward:
    """Load a reward model on the CPU.

    Args:
        folder: where config.json and tokenizer.json of the base model lie.
        tensors: all weights, under the names of any version of transformers.
        source: where they come from, for messages.
        tokens: the reward tokens, in the order in which they were added.
        dtype: dtype of the weights.
        head: the reward head, without weights.
        fp32_head: whether the head stays fp32.

    Raises:
        FlashGRPOError: something is missing or does not fit.
    """
    from transformers import Qwen2VLConfig

    tokenizer = _tokenizer(folder, tokens)
    names = {key: name for name in tensors if (key := canonical(name)) is not None}
    embedding = names.get("language.embed_tokens.weight")
    if embedding is None:
        raise FlashGRPOError(f"{source}: no Qwen2-VL weights: use the checkpoint of this reward")
    vocabulary = int(tensors[embedding].shape[0])
    if vocabulary < tokenizer.get_vocab_size():
        raise FlashGRPOError(
            f"{source}: {vocabulary} token embeddings for a tokenizer of "
            f"{tokenizer.get_vocab_size()} tokens with the reward's own: use the tokenizer.json of "
            "the base model"
        )
    settings = read_json(folder / "config.json")
    if settings.get("model_type") != "qwen2_vl":
        raise FlashGRPOError(
            f"{folder / 'config.json'}: model_type is {settings.get('model_type')!r}, expected "
            "'qwen2_vl': use the config.json of the base model"
        )
    config = Qwen2VLConfig.from_dict(settings)
    # The reward's own tokens have changed the number of embeddings.
    getattr(config, "text_config", config).vocab_size = vocabulary
    config._attn_implementation = "sdpa"
    network = build(lambda: RewardNetwork(config, head))
    kept = ("rm_head.",) if fp32_head else ()
    load_weights(network, tensors, names, dtype, source, fp32=kept)
    vision = config.vision_config
    pads = {kind: tokenizer.token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video")}
    ids = [tokenizer.token_to_id(token) for token in tokens]
    return QwenReward(
        network, tokenizer, ids, int(vision.patch_size), int(vision.spatial_merge_size), pads
    )


def _tokenizer(folder: Path, tokens: list[str]) -> Any:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FlashGRPOError(f"{path} is missing: put the tokenizer.json of the base model there")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception
        raise FlashGRPOError(f"{path}: no readable tokenizer ({exc}); download it again") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.add_special_tokens(tokens)
    if tokenizer.token_to_id("<|image_pad|>") is None:
        raise FlashGRPOError(f"{path}: no token <|image_pad|>: use the tokenizer of Qwen2-VL")
    return tokenizer


def canonical(name: str) -> str | None:
    """The name of a weight in `RewardNetwork`; None for the unused language head.

    Args:
        name: its name in a checkpoint of any version of transformers.
    """
    if re.fullmatch(r"(model\.)?lm_head\.weight", name):
        return None
    if name.startswith("rm_head."):
        return name
    inner = re.sub(r"^(model\.)?visual\.", "visual.", name)
    if inner.startswith("visual."):
        return inner
    return re.sub(
        r"^(model\.language_model|language_model\.model|language_model|model)\.", "language.", name
    )
