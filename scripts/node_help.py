"""The prose of the help pages: what a node is for, its outputs, tips, and errors with their fix.

Tables of inputs are not written here: `make_docs.py` takes them from the nodes themselves.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashgrpo_core.rewards import REWARDS  # noqa: E402


@dataclass(frozen=True)
class Help:
    """One page.

    Attributes:
        about: what the node does, Markdown paragraphs.
        outputs: text by output name.
        tips: advice.
        errors: (what it says, what to do).
    """

    about: str
    outputs: dict[str, str]
    tips: tuple[str, ...] = ()
    errors: tuple[tuple[str, str], ...] = field(default=())


_REWARD = {
    "reward": "The reward. Link it to *previous* of another reward node to mix both, to Train, to Score Rollouts or to Compare."
}
_CHAIN = (
    "Rewards are chained through *previous*. A chain is a weighted mix; each term is standardised before it is weighted, so weights say how important a term is, whatever its scale.",
    "Every reward can be cheated. Look at the sample videos, not only at the curve, and add a second reward that punishes the cheat.",
)
_MEMORY = (
    "out of memory in the ... phase",
    "The message says what was needed and which setting lowers it: fewer frames or a smaller size in Video Settings, a smaller micro_batch or decode_batch, gradient_checkpointing in Advanced Training Settings. Finished iterations are saved; queue again.",
)
_NOT_LISTED = (
    "... is not in the list",
    "The file is not on this computer, or the list is older than the file. Put it into the folder that the tooltip names and press R. Only `.safetensors` and `.sft` files are listed; `.gguf`, `.pt` and `.bin` files cannot be trained on.",
)
_OTHER_SETTINGS = (
    "run ... exists with other settings",
    "A run keeps its settings from its first to its last iteration. Change them back (the message lists the differences) or give the run another name; the message offers a free one.",
)
_LINK = (
    "... is no FLASHGRPO_...",
    "The link comes from the wrong output. Link the output of the node that the tooltip names.",
)


def _picture_reward(about: str, *tips: str) -> Help:
    return Help(about, _REWARD, (*tips, *_CHAIN))


def _model_reward(name: str, about: str, *tips: str) -> Help:
    """A page with what the class says about its weights."""
    reward: Any = REWARDS[name]
    weights = (
        f"**Weights**: {reward.source}; put it into `models/flashgrpo_rewards`. Nothing is "
        f"downloaded.\n\n**Memory** of the weights: {reward.memory}; ComfyUI moves them to the GPU "
        f"for scoring and away when others need the room.\n\n**Licence**: {reward.licence}.\n\n"
        f"**Range**: {reward.range}."
    )
    return Help(f"{about}\n\n{weights}", _REWARD, (*tips, *_CHAIN), (_NO_REWARD_MODEL, _MEMORY))


_NO_REWARD_MODEL = (
    "no model for the reward ... was found",
    "The list of the node is empty. Put the files that the message names into `models/flashgrpo_rewards` and press R. A model that does not fit its `config.json` is refused with the first weights that are missing or unknown.",
)
_BLIND = "It sees single frames and knows nothing about movement: add Motion or VideoReward, or the policy may freeze the video."

HELP: dict[str, Help] = {
    "FlashGRPOLoadPolicy": Help(
        "Says **what is trained**: a Wan model, and a new LoRA on it. The *policy* is the model with the LoRA; reinforcement learning changes only the LoRA.\n\n"
        "The **run name** ties everything together. The run's folder is `output/flashgrpo/runs/<name>`; it holds settings, checkpoints, sample videos, LoRAs and a report. The same name continues where the run stands on disk, another name starts a new run. The node has no memory of its own: it looks at the disk every time you press Run.\n\n"
        "Nothing is loaded here. The networks are loaded when a node needs them, and given back afterwards.",
        {"policy": "The policy of the run at its newest iteration on disk."},
        (
            "Start with rank 16, alpha 32 and target attention. For a look or a style, higher ranks and `attention, ffn` learn more.",
            "Wan 2.2 14B has two experts: the high-noise file in *diffusion model*, the low-noise file in *low noise model*. Train gives one LoRA for each; *train experts* leaves one of them as it is.",
            "Image-to-video models start from the images of the Prompts node. Wan 2.1 image-to-video also needs `clip_vision_h.safetensors` in *clip vision*.",
            "fp8 files work. They are widened to 16 bit while training, so they save disk space, not memory.",
            "The run name has no socket on purpose: a linked name would be unknown when ComfyUI decides what has to run again.",
        ),
        (
            _NOT_LISTED,
            _OTHER_SETTINGS,
            (
                "... is a VAE (text encoder, LoRA, Flux, VACE ...) file",
                "The file is of another kind than the widget asks for. The message names the kind; choose a Wan diffusion model.",
            ),
            (
                "choose the tiny one for both, or a file for both",
                "The tiny Wan works in the tiny VAE's latents only. Set *diffusion model* and *VAE* both to `tiny (embedded)`, or both to files.",
            ),
        ),
    ),
    "FlashGRPOFrozenLora": Help(
        "A LoRA that **stays on while another one is trained**: a speed LoRA, a style, a character. It belongs to the base model: the reference policy and the 'before' videos have it, too. It is not changed and not contained in the trained LoRA.",
        {"frozen_loras": "The chain of frozen LoRAs for Load Wan Policy or Compare."},
        (
            "Use the same frozen LoRAs at the same strength when you render with the trained LoRA.",
            "With a 4-step speed LoRA set steps 4 and guidance 1 in Video Settings: training gets about ten times cheaper.",
            "Speed LoRAs of Wan 2.2 14B come in pairs: one Frozen LoRA for each file, with *expert* set to its side. A file that names the other expert, or was made for another model, is refused.",
            "Chain several through *previous*; the order does not matter for the result.",
        ),
        (
            _NOT_LISTED,
            (
                "... keys match no module",
                "The LoRA was made for another model. Choose one for this Wan model.",
            ),
        ),
    ),
    "FlashGRPOVideoSettings": Help(
        "Size, length and sampling of the training videos. A **preset** for model and card sets everything; each widget below that is not 0 replaces one value of it.\n\n"
        "**Train at the size, steps, shift and guidance that you render with.** The LoRA learns to improve what the sampler does there; at other settings the effect gets weaker.",
        {"video_settings": "Settings for Iso-Temporal Groups, Train and Compare."},
        (
            "The cost of a video is about steps x 2 (with guidance) forwards; one forward gets four to six times slower from 416x240 to 832x480.",
            "Frames are 4n + 1: 17, 33, 49, 81. Width and height are multiples of 16.",
            "Short of memory: lower frames first, then the size, then micro_batch.",
        ),
        (
            (
                "frames = ... must be 4n + 1",
                "Use 5, 9, 17, 33, 49, 81 ... The VAE packs four frames into one latent frame.",
            ),
            (
                "width = ... must be a multiple of 16",
                "Use multiples of 16; 32 for the Wan 2.2 5B model.",
            ),
            (
                "guidance_low = ... is for the low-noise expert",
                "The preset is for a model with two experts, or *guidance low* is set: choose a preset of your model, or name the low-noise file in Load Wan Policy.",
            ),
        ),
    ),
    "FlashGRPOPrompts": Help(
        "The prompts of a run, from the text box, from a file in ComfyUI's `input` folder, or from the pack. Some are **held out**: the model never trains on them. *Validation* prompts are judged at every evaluation and choose the best weights; *test* prompts are judged once, at the end, before and after training.\n\n"
        "Prompts are encoded once and the results are kept on disk, so the text encoder is out of memory before training starts.",
        {"prompts": "Training, validation and test prompts, and how they are encoded."},
        (
            "40 to 200 varied prompts of the kind you render work well. Near copies of one prompt teach the model only that prompt.",
            "Use a prompt style that the model knows: long, concrete, with movement and camera.",
            'Text files hold one prompt a line; lines that start with `#` are skipped. JSONL files hold `{"prompt": "...", "image": "start.png"}` a line for image-to-video models. *start image* gives one image to all prompts, or a batch with one for each.',
            "No trigger word is needed: a LoRA trained by reward changes how the model renders any prompt.",
        ),
        (
            ("the prompts text is empty", "Write one prompt a line, or choose another source."),
            ("... prompts cannot be split", "Write at least 4 prompts, or lower the shares."),
            (
                "text_encoder is 'the connected CLIP' but none is connected",
                "Link CLIPLoader (type wan) to *clip*, or choose a text encoder file.",
            ),
            (
                "the tiny text encoder belongs to the tiny Wan",
                "Choose a `umt5_xxl_*.safetensors` file for a real Wan model.",
            ),
            (
                "... has no tokenizer",
                "`umt5-xxl-enc-*` files of other packs lack it. Use `umt5_xxl_fp8_e4m3fn_scaled.safetensors` or `umt5_xxl_fp16.safetensors`.",
            ),
        ),
    ),
    "FlashGRPOEncodePrompt": Help(
        "Turns one prompt into CONDITIONING **exactly as training does**, for stock samplers. It exists for the tiny Wan, whose text encoder no stock node loads. For real Wan models CLIPLoader and CLIPTextEncode give the same result.",
        {"conditioning": "For positive or negative of KSampler."},
        ("At cfg 1 the negative prompt is not used; link an empty one.",),
        (_NOT_LISTED,),
    ),
    "FlashGRPOTrain": Help(
        "**The whole training in one node.** In each iteration it chooses prompts (*group*), samples videos (*rollout*), scores them, compares each video with the others of its prompt (*advantage*) and makes the better ones more likely (*step*).\n\n"
        "It is safe to stop and to repeat. A finished run returns its result at once. A cancelled or crashed one goes on from its newest checkpoint and ends with the same result as an undisturbed one. Raise *iterations* to go on with a finished run.\n\n"
        "The monitor on the node shows the training reward (blue; the thick line is its trend), the held-out prompts with a 95 % interval (orange), the newest video and the time left. It reads the run's folder, so it is still there after a page refresh. **Finish now** ends after the running iteration, judges the result and returns the LoRA.",
        {
            "lora": "The trained LoRA (of the high-noise or only expert), for Save LoRA, LoraModelLoader and SaveLoRA.",
            "lora_low_noise": "The LoRA of the low-noise expert; nothing comes out when there is none.",
            "run": "The run, for Compare.",
            "curve": "The reward curve as a picture.",
        },
        (
            "A reward that does not rise after 30 iterations: look at the groups in `02_step_by_step`. When all videos of a prompt score alike there is nothing to learn; use more videos per prompt, harder prompts or a finer reward.",
            "Every evaluation writes a LoRA into `output/loras/flashgrpo/<run>/`, so that you can try it while the training goes on (press R).",
            "Seeds stay as they are: a new seed would be a new run.",
            "`paper` uses the published settings. They need about three times the videos per iteration and learn more slowly with few.",
            "Other models leave the memory before training starts.",
            "**run_on = workers** hands the run to workers that you start in a terminal, on this machine or on others that see the same output folder: `flashgrpo worker --runs <output> --models <models>`. Progress, previews, curve, Cancel and Finish now work as here, and you may close ComfyUI: queue the same workflow again to follow the run.",
        ),
        (
            _OTHER_SETTINGS,
            _MEMORY,
            (
                "no worker is running",
                "The job waits in the queue. Start a worker with the command in the message, or cancel and set *run_on* to *this ComfyUI*.",
            ),
            (
                "run ... is in the queue of the workers",
                "Set *run_on* to *workers* to follow it; Cancel then takes it out of the queue.",
            ),
            (
                "no signal",
                "All videos of every prompt got the same reward. Use more videos per prompt, a finer reward, or prompts that are neither solved nor hopeless.",
            ),
            (
                "run ... is being trained already",
                "The same run is queued twice. Wait, or cancel the first.",
            ),
        ),
    ),
    "FlashGRPOTrainAdvanced": Help(
        "Replaces single settings of Train. `-1` and `preset` leave a setting as the preset has it, so you only see what you changed.",
        {"advanced": "Settings for Train."},
        (
            "What decides quality and time: *group_size* x *prompts_per_iteration* videos per iteration. 6 to 8 videos per prompt is a good start; below 4 the comparison is mostly noise.",
            "*learning_rate*: 3e-5 for real Wan models, 3e-4 for the tiny one. A reward that jumps and then falls means it is too high.",
            "*kl* above 0 keeps the model closer to where it started; it costs one more forward per training step.",
            "*patience* stops by itself when validation does not get better.",
        ),
        ((_OTHER_SETTINGS),),
    ),
    "FlashGRPOCompare": Help(
        "Samples prompts that were not trained on from **the same noise before and after training** and writes one side-by-side video with the rewards. Left: before. Right: after.",
        {"video": "The mp4 file; it lies in `output/flashgrpo/compare`."},
        (
            "With a *run* the exported LoRA is shown, which is the best one by validation; with a *policy* its current weights.",
            "Link another reward to see whether something that was not trained got worse.",
            "To see how the LoRA works with a speed LoRA, link it to *speed_loras* and set steps and guidance in a second Video Settings node.",
        ),
        (
            ("run ... has exported no LoRA yet", "Let it train to its first evaluation."),
            ("run ... is no longer on disk", "Its folder was removed or renamed. Train it again."),
            _MEMORY,
        ),
    ),
    "FlashGRPOSaveLora": Help(
        "Writes a LoRA into `output/loras`, where every LoRA loader of ComfyUI lists it. The name on the node is the name in the list. Press **R** to refresh the lists.\n\n"
        "An existing file is never overwritten: a number is added, and the output says which name it got. The same LoRA saved twice stays one file.",
        {
            "lora_name": "The name as LoraLoader lists it.",
            "lora_name_low_noise": "The name of the low-noise expert's LoRA, for a policy with two experts.",
        },
        (
            "Strength 1.0 is what was trained. Try 0.5 to 1.5. No trigger word is needed.",
            "`comfyui` and `kohya` files load in ComfyUI; `diffusers` is for Python scripts.",
            "`ema` weights are smoother after many steps of `02_step_by_step`; after a few steps they lag behind.",
        ),
        (
            (
                "run ... has no trained weights yet",
                "Link the policy of a Train Step, or the LoRA of Train.",
            ),
            (
                "name ... leads out of the folder",
                "Use a plain name such as `flashgrpo/fox`; `..`, drive letters and absolute paths are refused.",
            ),
        ),
    ),
    "FlashGRPOLoadRun": Help(
        "The result of a run that is on disk: its newest LoRA, the reward curve and the sample videos of its last evaluation. Works while the run trains elsewhere, for example on the command line with the same output folder.",
        {
            "run": "The run, for Compare.",
            "lora": "Its best exported LoRA, else its newest weights.",
            "curve": "The reward curve as a picture.",
            "samples": "The videos of the newest evaluation.",
            "lora_low_noise": "The LoRA of the low-noise expert; nothing comes out when there is none.",
        },
        ("Queue again to see the newest state; the node looks at the run's log each time.",),
        (("run ... does not exist", "The message lists the runs that are there. Check the name."),),
    ),
    "FlashGRPOGroups": Help(
        "The first verb, **group**: chooses the prompts of the policy's next iteration. Each prompt gets *group_size* videos that share everything up to one sampling step, the **SDE step**. There each video gets its own noise, so the videos of a group differ by exactly what is trained. The steps are spread over the first half of the schedule, so that every update sees several noise levels (sigma).",
        {
            "groups": "The groups, for Rollout Sampler.",
            "picture": "Which prompt is stochastic at which sigma.",
        },
        (
            "At least 2 prompts per iteration, better 6 or more; at least 4 videos per prompt, better 8.",
            "Keep the seed through a run; every iteration draws anew from it.",
            "*shared* noise starts all videos of a group from one noise: cheaper, and the comparison is cleaner. *independent* is what the paper does.",
        ),
        (
            (
                "window ... is empty",
                "*window_end* must be larger than *window_first*, and at most steps - 1.",
            ),
            _LINK,
        ),
    ),
    "FlashGRPORollout": Help(
        "The second verb, **rollout**: samples all videos of the groups with the current policy. Everything is deterministic except for the one SDE step, whose noise is recorded: that is what the training step learns from.",
        {
            "rollouts": "Latents and recorded noise, for Score Rollouts.",
            "videos": "The videos as mp4 files, one after the other.",
            "contact_sheet": "One frame of each video; one row per group.",
        },
        (
            "Videos of one group look alike: they only differ from the SDE step on. At low sigma the differences are small.",
            "Save single videos with SaveVideo on *videos*.",
        ),
        (
            (
                "the groups were made for ...",
                "Groups and Rollout Sampler need the same policy. Link both to one node and queue again.",
            ),
            _MEMORY,
        ),
    ),
    "FlashGRPOScore": Help(
        "The third verb, **score**, and the **advantage**: scores every video and compares it with the others of its prompt. Better than the group's mean is a positive advantage, worse a negative one. Only this comparison is trained on, so a hard prompt does not pull the model down and an easy one does not push it.",
        {
            "scored": "Rewards and advantages, for Train Step.",
            "picture": "The videos of each group sorted by reward, with rewards, spread and advantages.",
        },
        (
            "Read the picture: would you have sorted the videos the same way? If not, change the reward before you train.",
            "A group with spread 0 teaches nothing. When many groups are flat, use more videos per prompt or another reward.",
        ),
        (
            (
                "no signal",
                "All videos of every prompt got the same reward: use more videos per prompt, a finer reward, or prompts that are neither solved nor hopeless.",
            ),
            (
                "reward ... gave a value that is not finite",
                "The message names reward and video. Set on_nan to mask to leave such videos out.",
            ),
        ),
    ),
    "FlashGRPOTrainStep": Help(
        "The last verb, **step**: changes the policy so that videos with a high advantage get more likely. The result is saved in the run's folder; Load Wan Policy finds it there at the next Run, which is then the next iteration.\n\n"
        "Two Train Steps on one policy are two branches: the second one gets a run name of its own.",
        {
            "policy": "The policy one iteration further, for Save LoRA or Compare.",
            "picture": "The step count and the numbers of this step.",
        },
        (
            "*learning_rate* -1 takes 3e-5 with warm-up; the tiny Wan wants 3e-4.",
            "Reward, learning rate and the rest can be changed between iterations: here every step is your own.",
            "*ratio drift* must be far below *clip*; a larger one means that sampling and training do not agree on the numbers (another dtype, another card).",
        ),
        (
            (
                "the scored videos come from run ...",
                "The scored videos belong to another iteration. Queue again, so that everything is made from the newest policy.",
            ),
            (
                "the gradient is zero",
                "No group had a signal, or the LoRA targets do not change the result.",
            ),
            _MEMORY,
        ),
    ),
    "FlashGRPORewardTechnical": _picture_reward(
        "**Technical quality**: sharp, low in noise, well exposed, steady, not frozen. Five faults are measured from the pixels; the reward is the product of what each one leaves over, so no virtue pays for a fault. It needs no model.",
        "Set a fault to 0 that belongs to your look: *noise* for film grain, *blur* for soft focus, *exposure* for night scenes.",
        "On its own it likes still, over-sharpened videos: mix it with Motion.",
    ),
    "FlashGRPORewardMotion": _picture_reward(
        "**Movement**, up to a cap, times smoothness, measured by optical flow. Jitter and flicker do not count as movement. It needs no model.",
        "*enough* is in short sides of the frame per second; 0.2 is calm, 0.5 lively, 1 fast.",
        "On its own it likes camera pans. Mix it with Technical Quality.",
    ),
    "FlashGRPORewardFlicker": _picture_reward(
        "**No flicker**: brightness that does not jump up and down from frame to frame. Slow changes of light cost nothing.",
        "A small *tolerance* punishes flicker that is hardly visible.",
    ),
    "FlashGRPORewardFreeze": _picture_reward(
        "**No freeze**: the share of frames that differ from the one before. Against videos that turn into a still picture.",
        "Any change counts, so use it next to Motion, not instead of it.",
    ),
    "FlashGRPORewardLoopClosure": _picture_reward(
        "**Loop closure**: the last frame leads smoothly back to the first, so that the video can be played as a loop. Still videos get 0.",
        "Mix it with Motion; otherwise tiny movements to and fro are the easiest way to the reward.",
    ),
    "FlashGRPORewardBrightness": _picture_reward(
        "**Mean brightness** close to a target. For a look (low-key, high-key), and as a check: it is easy to learn and easy to see.",
        "Use a small weight beside a quality reward.",
    ),
    "FlashGRPORewardContrast": _picture_reward(
        "**Contrast** close to a target: how far bright and dark lie apart.",
        "Photographs lie near 0.45; lower values give a washed-out look, higher ones a hard look.",
    ),
    "FlashGRPORewardColourfulness": _picture_reward(
        "**Strength of the colours** close to a target.",
        "Photographs lie near 0.4. Lower the target when colours get gaudy.",
    ),
    "FlashGRPORewardJpegSize": _picture_reward(
        "**Size of the frames as JPEG**: a check of the training that always has a signal. *compressible* leads to plain pictures, *incompressible* to detail or noise.",
        "When this reward does not rise either, the problem is in the settings and not in your reward.",
    ),
    "FlashGRPORewardNaturalness": _picture_reward(
        "**Naturalness**: the statistics of photographs. Local contrasts of photographs always follow the same law; blur, noise, compression and smeared texture break it, each in its own way. It needs no model and no reference picture.",
        "For photographic looks only: cartoons, flat graphics and shallow depth of field are punished, although they are no faults.",
        "Put it behind Reward: Win rate when its values lie close together.",
    ),
    "FlashGRPORewardOcr": _picture_reward(
        'The **text in quotation marks** of the prompt must be readable in the video: `a neon sign that reads "OPEN"`. Frames are read by rapidocr, whose models (Apache-2.0) are inside its package: nothing is fetched. The score is 1 minus the share of wrong, missing and additional letters; case, spaces and punctuation do not count.\n\n'
        "rapidocr and onnxruntime are not part of the pack; install them into ComfyUI's Python: `pip install rapidocr onnxruntime`.",
        "Every prompt needs text in quotation marks, or set *text*.",
        "Reading takes 0.3 to 1 second per frame on a CPU: leave *every* at 8 or more.",
    ),
    "FlashGRPORewardDiversity": _picture_reward(
        "**Diversity**: the videos of a prompt should differ from each other: in colours, in what is where and when, in movement and detail. Against a policy that makes the same video for every seed. It compares only the videos of one group.",
        "Use a small weight, 0.1 to 0.3, and a Gate on Technical Quality: broken videos are the easiest way to be different.",
    ),
    "FlashGRPORewardServed": Help(
        "Takes the scores of a **reward server**: a program of this pack that runs any reward in its own environment, on another card or on another machine. Use it for reward models whose packages do not go together with ComfyUI's, and to keep this card free.\n\n"
        "Servers are listed in the file `flashgrpo_servers.json` in ComfyUI's user folder (`user/flashgrpo_servers.json`, not in `user/default`, which the browser may write to). The workflow holds only the name: addresses and tokens stay on your computer, and nobody's workflow decides where your videos are sent. `docs/reward_server.md` in the pack's repository shows the file and how a server is started.\n\n"
        "The registry's version of the pack has no network code: install the pack with git clone to use this node.",
        _REWARD,
        (
            "Several addresses behind one name share the work; when one dies, the others go on.",
            "A video that no server could score is left out of its group, never scored 0. A run stops when more than a tenth of its videos are lost.",
            *_CHAIN,
        ),
        (
            (
                "... is not in the list: choose one of none: write user/flashgrpo_servers.json",
                "The file is missing or broken, or names no server of this kind. Write it, press R and choose the server.",
            ),
            (
                "the registry's version has no network code",
                "The registry's version leaves it out. Remove it and install the pack with git clone.",
            ),
            (
                "... of ... videos have no score",
                "The server was down or its reward failed; the log has the reason. Start it and queue again: the run goes on from its checkpoint.",
            ),
        ),
    ),
    "FlashGRPORewardJudge": Help(
        "Shows frames of each video to a **vision language model** and takes its marks. The model runs on a server of yours that speaks OpenAI's chat completions (vLLM, llama.cpp, SGLang and others); it is listed in `flashgrpo_servers.json` with its kind, address and the model's name, see *Reward: Served*.\n\n"
        "The model is asked without sampling, so equal videos get equal marks. An answer without a readable mark is a failed score, never a bad one.",
        _REWARD,
        (
            "`yes_no` with a sharp question is often the best teacher: its probability is finer than marks from 1 to 5.",
            "A judge sees single frames. Put a motion reward beside it.",
            "Your own question needs the text {prompt} where the prompt belongs; the form of the answer is added.",
            *_CHAIN,
        ),
        (
            (
                "question ... must be a text with {prompt}",
                "Write {prompt} into the question at the place of the prompt.",
            ),
            (
                "needs the model's name",
                'Add "model" to the server in flashgrpo_servers.json, as the server itself calls it.',
            ),
            (
                "no server is listed",
                'Write the servers file that the message names; judges have "kind": "judge".',
            ),
        ),
    ),
    "FlashGRPORewardInstalled": Help(
        "A reward of **your own**: a Python class in a package that you have installed into ComfyUI's Python. `docs/rewards.md` in the pack's folder shows a complete one in 20 lines.\n\n"
        "A workflow can only name a reward, it never brings code. A name that is not installed here is an error.",
        _REWARD,
        ("Restart ComfyUI after installing a package.", *_CHAIN),
        (
            (
                "no installed package offers a reward",
                "Install your package into the Python that runs ComfyUI, and restart.",
            ),
            (
                "options ... are not 'name = value' lines",
                "One option a line, as in a TOML file; text stands in quotes.",
            ),
            (
                "reward ... cannot be loaded",
                "The package is there but its code fails; the message says why.",
            ),
        ),
    ),
    "FlashGRPORewardGate": Help(
        "Counts rewards **only for videos that pass** another reward. Example: movement counts only where the technical quality is above 0.4, so that a shaking, broken video gains nothing by moving.\n\n"
        "The gate reward itself earns nothing; link it to the chain as well when it should. It is computed once, even when it is used twice with the same settings.",
        _REWARD,
        (
            "Score some videos with Score Videos first and look where the gate reward lies.",
            "When hardly any video passes, there is nothing to learn from: start with a low threshold.",
            *_CHAIN,
        ),
        (
            (
                "the gate is a chain of ... rewards",
                "Link a single reward node to *gate*, with nothing in its *previous*.",
            ),
            ("reward ... has a gate already", "One gate per reward."),
        ),
    ),
    "FlashGRPORewardLimits": Help(
        "**Limits** the value of rewards. Beyond the limits nothing is gained, so the policy has no reason to drive that reward further; good against rewards that end in over-sharpened or over-saturated pictures.",
        _REWARD,
        (
            "The limits are in the reward's own units; the range stands on the page of the reward.",
            "Videos at a limit score the same. When all of a prompt do, it teaches nothing.",
            *_CHAIN,
        ),
        (
            ("... must have its low end below its high end", "Make *low* smaller than *high*."),
            ("reward ... has a clip already", "One Limits node per reward."),
        ),
    ),
    "FlashGRPORewardWinRate": Help(
        "Replaces a reward by its **win rate**: the share of the other videos of the prompt that a video beats; a tie counts half. Only the order counts. A reward with outliers, or with a scale that differs between prompts, becomes even.",
        _REWARD,
        (
            "The mean of a win rate is always 0.5. Curve and report therefore show the compared reward as well, and held-out evaluations judge that one.",
            "Use at least 4 videos per prompt, better 8.",
            *_CHAIN,
        ),
        (("reward ... has a win rate already", "One Win rate node per reward."),),
    ),
    "FlashGRPOPlan": Help(
        "Says **before you train** what a run will take: the memory of each phase, which cards hold it, and which settings to change when yours does not. Nothing is loaded; the sizes come from the headers of the files. It takes some seconds a card.",
        {
            "plan": "The tables as text, also shown on the node.",
        },
        (
            "The plan counts the networks one at a time on the card, as ComfyUI moves them, and leaves 10 % to spare.",
            "Changes that only cost time come first, then those that round weights, then a smaller video.",
            "Reward models are counted by the size of their files.",
        ),
        (("... no such file", "The model is not where Load Wan Policy found it: press R."),),
    ),
    "FlashGRPOScoreVideos": Help(
        "Ranks videos that **exist already** by a reward: videos of other nodes, or a folder below ComfyUI's `input` or `output`. For choosing the best of many seeds, and for getting to know a reward before you train on it.",
        {
            "picture": "One frame of each video, best first, with total and terms.",
            "scores": "The numbers as text: one line a video, separated by tabs.",
            "best": "The best video, for SaveVideo.",
        },
        (
            'In a folder, `name.txt` beside `name.mp4` is the prompt of that video; so is a line `{"file": "name.mp4", "prompt": "..."}` in `prompts.jsonl`.',
            "Win rate and diversity compare the videos of one prompt.",
            "Would you have sorted the videos the same way? If not, training on this reward would not make you happy either.",
        ),
        (
            ("no video to score", "Link videos, or name a folder."),
            (
                "folder ... must be input or output",
                "Only folders below ComfyUI's own input and output folders are read.",
            ),
            ("... has no text in quotation marks", "The reward needs a prompt that quotes a text."),
        ),
    ),
    "FlashGRPORewardTinyWorld": _picture_reward(
        "The reward of the **tiny demo**: does one coloured shape move as the prompt says? Colour and direction are measured from the pixels. Prompts must name a colour (red, green, blue, yellow, magenta, cyan) and a direction (left, right, up, down).",
        "For the tiny Wan only.",
    ),
    "FlashGRPORewardClipscore": _model_reward(
        "clipscore",
        "**CLIPScore**: how well the frames fit the prompt, by the cosine between CLIP's vectors of frame and prompt.",
        _BLIND,
        "A weights file of `models/clip_vision` works when it is the complete CLIP: a vision-only file cannot read prompts. ComfyUI's own CLIP tokenizer is used when the model has none beside it.",
    ),
    "FlashGRPORewardPickscore": _model_reward(
        "pickscore",
        "**PickScore**: which frame people would pick for the prompt. A CLIP H/14 that was trained on half a million choices; one of the usual rewards of published work.",
        _BLIND,
    ),
    "FlashGRPORewardHpsv2": _model_reward(
        "hpsv2",
        "**HPSv2.1**: how high people would rank a frame for the prompt. Frames keep their shape: the long side becomes 224 pixels, the rest is black.",
        _BLIND,
        "The published `.pt` file is read without running anything that is in it.",
    ),
    "FlashGRPORewardAesthetic": _model_reward(
        "aesthetic",
        "**LAION aesthetic**: how beautiful people would find a frame. The prompt plays no part.",
        _BLIND,
        "Needs OpenAI's CLIP L/14; the vision side is enough, so a file of `models/clip_vision` works.",
        "Alone it leads away from the prompt: add PickScore or HPSv3.",
    ),
    "FlashGRPORewardHpsv3": _model_reward(
        "hpsv3",
        "**HPSv3**: human preference for frames by a 7B vision-language model; of the frame rewards here the closest to people, and the slowest.",
        _BLIND,
        "*every* 4 scores every fourth frame. Lower *batch* when memory runs out.",
    ),
    "FlashGRPORewardVideoreward": _model_reward(
        "videoreward",
        "**VideoReward** (VideoAlign): visual quality, motion quality and text alignment of the whole video, by a 2B vision-language model that looks at two frames a second. The three values are standardised; the weights make one score of them, and each is reported on its own.",
        "The text with which it was trained comes from `prompt_template.py` of the VideoAlign repository. Put that file into the model's folder; it is read as data and never run.",
        "*motion* above 1 adds movement to frame rewards.",
    ),
}
