"""Nodes for tests only: look into the server's process, and bring trouble into it.

Installed as `custom_nodes/probe_node.py`.
"""

import gc
import json
import sys
import time

import torch


def _pack_module(ending):
    """A module of the pack, whatever name ComfyUI imported the pack under."""
    return next(m for name, m in list(sys.modules.items()) if name.endswith(ending) and m)


class TestLive:
    """Counts the networks that are alive in this process."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "count"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"turn": ("INT", {"default": 0})}}

    def count(self, turn):
        import comfy.model_management

        gc.collect()
        names = ("WanTransformer3DModel", "AutoencoderKLWan", "UMT5EncoderModel", "Resident")
        found = dict.fromkeys(names, 0)
        for thing in gc.get_objects():
            name = type(thing).__name__
            if name in found:
                found[name] += 1
        loaded = [
            type(m.model.model).__name__ for m in comfy.model_management.current_loaded_models
        ]
        report = {
            **found,
            "loaded": loaded,
            "inference": torch.is_inference_mode_enabled(),
            "grad_default": torch.is_grad_enabled(),
        }
        return {"ui": {"text": [json.dumps(report)]}}


class TestText:
    """Text that is only there once a picture has been made: puts nodes in order."""

    RETURN_TYPES = ("STRING",)
    FUNCTION = "give"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"text": ("STRING", {"multiline": True})},
            "optional": {"after": ("*",)},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    def give(self, text, after=None):
        return (text,)


class TestNumber:
    """A number that no widget would allow."""

    RETURN_TYPES = ("FLOAT", "INT")
    FUNCTION = "give"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("STRING", {})}}

    def give(self, value):
        number = float(value)
        return (number, number)


class TestClip:
    """A genuine CLIP object of ComfyUI around the tiny UMT5, which CLIPLoader cannot load."""

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {"default": "tiny_wan_umt5.safetensors"})}}

    def load(self, file):
        import comfy.sd
        import comfy.sd1_clip
        import comfy.supported_models_base
        import comfy.text_encoders.t5
        import comfy.text_encoders.wan as wan
        import comfy.utils
        import folder_paths

        weights = comfy.utils.load_torch_file(
            folder_paths.get_full_path_or_raise("text_encoders", file), safe_load=True
        )
        vocabulary, width = weights["shared.weight"].shape
        settings = {
            "d_ff": weights["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"].shape[0],
            "d_kv": 16,
            "d_model": width,
            "num_heads": 2,
            "num_layers": 2,
            "vocab_size": vocabulary,
            "dense_act_fn": "gelu_pytorch_tanh",
            "is_gated_act": True,
            "model_type": "umt5",
            "relative_attention_num_buckets": 32,
        }

        class Model(comfy.sd1_clip.SDClipModel):
            def __init__(self, device="cpu", dtype=None, model_options={}, **_):  # noqa: B006
                super().__init__(
                    device=device,
                    layer="last",
                    textmodel_json_config=dict(settings),
                    dtype=dtype,
                    special_tokens={"end": 1, "pad": 0},
                    model_class=comfy.text_encoders.t5.T5,
                    enable_attention_masks=True,
                    zero_out_masked=True,
                    model_options=model_options,
                )

        class Encoder(comfy.sd1_clip.SD1ClipModel):
            def __init__(self, device="cpu", dtype=None, model_options={}):  # noqa: B006
                super().__init__(
                    device=device,
                    dtype=dtype,
                    model_options=model_options,
                    name="umt5xxl",
                    clip_model=Model,
                )

        target = comfy.supported_models_base.ClipTarget(wan.WanT5Tokenizer, Encoder)
        tokenizer = {"spiece_model": weights.pop("spiece_model")}
        clip = comfy.sd.CLIP(target, tokenizer_data=tokenizer)
        missing, _ = clip.load_sd(weights)
        assert not [key for key in missing if "embed" not in key], missing
        return (clip,)


class TestAccelerator:
    """What another pack may do: an Accelerator with mixed precision, which is process-wide."""

    RETURN_TYPES = ("STRING",)
    FUNCTION = "make"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"text": ("STRING", {"multiline": True})}}

    def make(self, text):
        from accelerate import Accelerator

        Accelerator(mixed_precision="bf16", cpu=True)
        return (text,)


_TROUBLE = {"kind": "none", "seconds": 0.0, "left": -1}
_ORIGINALS = {}


def _before(kind):
    """Called before each piece of work of a kind: waits, or runs out of memory."""
    if kind == _TROUBLE["kind"]:
        if _TROUBLE["seconds"]:
            time.sleep(_TROUBLE["seconds"])
        if _TROUBLE["left"] == 0:
            _TROUBLE["left"] = -1
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"
            )
        if _TROUBLE["left"] > 0:
            _TROUBLE["left"] -= 1


def _install():
    from diffusers import WanTransformer3DModel
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanDecoder3d

    tiny_world = _pack_module("flashgrpo_core.rewards.tiny_world").TinyWorldReward

    def wrap(owner, name, kind):
        original = getattr(owner, name)

        def wrapped(self, *args, **kwargs):
            _before(kind() if callable(kind) else kind)
            return original(self, *args, **kwargs)

        setattr(owner, name, wrapped)

    wrap(
        WanTransformer3DModel,
        "forward",
        lambda: "update" if torch.is_grad_enabled() else "rollout",
    )
    wrap(WanDecoder3d, "forward", "decode")
    wrap(tiny_world, "score", "score")
    keeping = _pack_module("flashgrpo_core.keeping")
    save = keeping.save_checkpoint

    def slow_save(*args, **kwargs):
        _before("save")
        return save(*args, **kwargs)

    keeping.save_checkpoint = slow_save


class TestTrouble:
    """From now on, work of a kind takes longer, or runs out of memory after some calls."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "arm"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "work": ("STRING", {}),
                "seconds": ("FLOAT", {"default": 0.0}),
                "left": ("INT", {"default": -1, "min": -1}),
                "turn": ("INT", {"default": 0}),
            }
        }

    def arm(self, work, seconds, left, turn):
        if not _ORIGINALS:
            _install()
            _ORIGINALS["installed"] = True
        _TROUBLE.update(kind=work, seconds=seconds, left=left)
        return {"ui": {"text": [work]}}


NODE_CLASS_MAPPINGS = {
    cls.__name__: cls
    for cls in (
        TestLive,
        TestText,
        TestNumber,
        TestClip,
        TestAccelerator,
        TestTrouble,
    )
}
