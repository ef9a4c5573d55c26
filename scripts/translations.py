"""Korean and Chinese texts by their English original.

Ranges ("Range 1 to 512.") and "-1 = the preset's value." are translated by the patterns in
`make_docs.py`; here stands what is left of a text without them.
"""

from __future__ import annotations

import expert_translations
import memory_translations
import reward_translations

LANGUAGES = ("ko", "zh")

#: Sentences with values: `{0}`, `{1}` are the numbers.
RANGE = ("범위 {0}~{1}.", "范围 {0} 至 {1}。")
PRESET_VALUE = ("{0} = 프리셋의 값.", "{0} = 使用预设的值。")

TEXTS: dict[str, tuple[str, str]] = {
    # served rewards
    "Reward: Served": (
        "보상: 서버",
        "奖励：服务器",
    ),
    "Reward: Judge": (
        "보상: 심판",
        "奖励：评审",
    ),
    "Asks a reward server for the scores: any reward, in its own environment or on another machine. A video that cannot be scored is left out of its group.": (
        "보상 서버에 점수를 묻습니다. 어떤 보상이든 자체 환경이나 다른 컴퓨터에서 실행할 수 있습니다. 점수를 받지 못한 비디오는 그룹에서 제외됩니다.",
        "向奖励服务器请求分数：任何奖励都可在独立环境或另一台机器上运行。无法评分的视频会从组中剔除。",
    ),
    "Shows frames of each video to a vision language model on a server of yours and takes its marks. Can be cheated by text in the picture that flatters the judge.": (
        "각 비디오의 프레임을 사용자의 서버에 있는 비전 언어 모델에 보여 주고 점수를 받습니다. 화면 속에서 심판을 칭찬하는 글자로 속일 수 있습니다.",
        "把每个视频的帧交给您服务器上的视觉语言模型打分。画面中讨好评审的文字可能骗取高分。",
    ),
    "Name of the server in the file flashgrpo_servers.json in ComfyUI's user folder; after a change of the file press R.": (
        "ComfyUI 사용자 폴더의 flashgrpo_servers.json 파일에 있는 서버 이름. 파일을 바꾼 뒤에는 R을 누르십시오.",
        "ComfyUI 用户文件夹中 flashgrpo_servers.json 文件里的服务器名称；修改文件后请按 R。",
    ),
    "Which reward of the server; empty when it serves only one.": (
        "서버의 어떤 보상인지. 하나만 제공하면 비워 둡니다.",
        "使用服务器的哪个奖励；若只提供一个则留空。",
    ),
    "How videos are sent: safetensors is exact, mp4 about a fiftieth of the size for slow networks.": (
        "비디오를 보내는 방식. safetensors는 정확하고, mp4는 느린 네트워크를 위한 약 50분의 1 크기입니다.",
        "视频的发送方式：safetensors 精确无损，mp4 约为五十分之一大小，适合慢速网络。",
    ),
    "Seconds without an answer after which a request has failed, 1 to 86400. It is tried again a few times; then the video has no score and is left out.": (
        "응답이 없을 때 요청을 실패로 보는 시간(초), 1~86400. 몇 번 다시 시도한 뒤 그 비디오는 점수 없이 제외됩니다.",
        "请求在多少秒无应答后视为失败，1 至 86400。会重试几次，之后该视频没有分数并被剔除。",
    ),
    "points = one mark from 1 to 5; unified = the mean of alignment, physics and style, 1 to 5; yes_no = the probability of yes, 0 to 1.": (
        "points = 1에서 5까지의 점수 하나. unified = 일치, 물리, 스타일의 평균, 1~5. yes_no = '예'의 확률, 0~1.",
        "points = 一个 1 到 5 的分数；unified = 一致性、物理与风格的平均值，1 到 5；yes_no = 回答“是”的概率，0 到 1。",
    ),
    "What to judge, in your words, with {prompt} where the prompt belongs; empty = the rubric's own question.": (
        "무엇을 평가할지 직접 씁니다. 프롬프트가 들어갈 자리에 {prompt}를 넣으십시오. 비우면 기준표의 질문을 씁니다.",
        "用您自己的话写明评判什么，在提示词的位置写 {prompt}；留空则使用评分标准自带的问题。",
    ),
    "Frames that the judge sees, evenly spaced, 1 to 64.": (
        "심판이 보는 프레임 수, 고른 간격, 1~64.",
        "评审看到的帧数，均匀选取，1 至 64。",
    ),
    "server": (
        "서버",
        "服务器",
    ),
    "encoding": (
        "인코딩",
        "编码方式",
    ),
    "timeout": (
        "제한 시간",
        "超时",
    ),
    "rubric": (
        "평가 기준",
        "评分标准",
    ),
    "question": (
        "질문",
        "问题",
    ),
    # names of nodes
    "Compare": ("비교", "对比"),
    "Encode Prompt": ("프롬프트 인코딩", "编码提示词"),
    "Frozen LoRA": ("고정 LoRA", "冻结的 LoRA"),
    "Iso-Temporal Groups": ("등시점 그룹", "同时刻分组"),
    "Load Wan Policy": ("Wan 정책 불러오기", "加载 Wan 策略"),
    "Load Run": ("실행 불러오기", "加载运行"),
    "Prompts": ("프롬프트", "提示词"),
    "Reward: Brightness": ("보상: 밝기", "奖励：亮度"),
    "Reward: Colourfulness": ("보상: 색감", "奖励：色彩丰富度"),
    "Reward: Contrast": ("보상: 대비", "奖励：对比度"),
    "Reward: No flicker": ("보상: 깜박임 없음", "奖励：无闪烁"),
    "Reward: No freeze": ("보상: 정지 없음", "奖励：无静止"),
    "Reward: JPEG size": ("보상: JPEG 크기", "奖励：JPEG 大小"),
    "Reward: Loop closure": ("보상: 루프 연결", "奖励：循环衔接"),
    "Reward: Motion": ("보상: 움직임", "奖励：运动"),
    "Reward: Technical quality": ("보상: 기술적 품질", "奖励：技术质量"),
    "Reward: Tiny world": ("보상: 작은 세계", "奖励：微型世界"),
    "Rollout Sampler": ("롤아웃 샘플러", "Rollout 采样器"),
    "Save LoRA": ("LoRA 저장", "保存 LoRA"),
    "Score Rollouts": ("롤아웃 채점", "为 Rollout 评分"),
    "Train": ("학습", "训练"),
    "Advanced Training Settings": ("고급 학습 설정", "高级训练设置"),
    "Train Step": ("학습 단계", "训练步"),
    "Video Settings": ("비디오 설정", "视频设置"),
    # rewards with a network
    "Reward: CLIPScore": ("보상: CLIPScore", "奖励：CLIPScore"),
    "Reward: PickScore": ("보상: PickScore", "奖励：PickScore"),
    "Reward: HPSv2.1": ("보상: HPSv2.1", "奖励：HPSv2.1"),
    "Reward: HPSv3": ("보상: HPSv3", "奖励：HPSv3"),
    "Reward: LAION aesthetic": ("보상: LAION 미적 점수", "奖励：LAION 美学"),
    "Reward: VideoReward": ("보상: VideoReward", "奖励：VideoReward"),
    "model": ("모델", "模型"),
    "head": ("헤드", "头部"),
    "batch": ("배치", "批大小"),
    "device": ("장치", "设备"),
    "limit": ("한계", "上限"),
    "visual": ("시각", "视觉"),
    "motion": ("움직임", "运动"),
    "Rewards frames that show what the prompt says, by CLIP. -1 .. 1, in practice about 0.15 .. 0.35; higher is better. Can be cheated by: written words, collages of the prompt's objects; blind to movement and faults.": (
        "CLIP으로 보아 프롬프트의 내용을 보여 주는 프레임에 보상합니다. -1 .. 1, 실제로는 약 0.15 .. 0.35, 높을수록 좋습니다. 속임수: 글자, 프롬프트 속 물체의 콜라주. 움직임과 결함은 보지 못합니다.",
        "用 CLIP 奖励符合提示词内容的帧。-1 至 1，实际约 0.15 至 0.35，越高越好。可能的作弊方式：写出的文字、提示词中物体的拼贴；看不到运动和缺陷。",
    ),
    "Rewards frames that people would pick for the prompt, by PickScore. about 0.7 .. 1 (the raw logit divided by 26); higher is better. Can be cheated by: glossy, over-sharpened, saturated pictures; blind to movement.": (
        "PickScore로 보아 사람들이 프롬프트에 맞게 고를 프레임에 보상합니다. 약 0.7 .. 1(원래 로짓을 26으로 나눈 값), 높을수록 좋습니다. 속임수: 번들거리고 지나치게 선명하며 채도가 높은 그림. 움직임은 보지 못합니다.",
        "用 PickScore 奖励人们会为提示词选择的帧。约 0.7 至 1（原始 logit 除以 26），越高越好。可能的作弊方式：过于光亮、过度锐化、过饱和的画面；看不到运动。",
    ),
    "Rewards frames that people would rank high for the prompt, by HPSv2.1. -1 .. 1, in practice about 0.2 .. 0.35; higher is better. Can be cheated by: a glossy, saturated style; blind to movement.": (
        "HPSv2.1로 보아 사람들이 프롬프트에 대해 높은 순위를 줄 프레임에 보상합니다. -1 .. 1, 실제로는 약 0.2 .. 0.35, 높을수록 좋습니다. 속임수: 번들거리고 채도가 높은 화풍. 움직임은 보지 못합니다.",
        "用 HPSv2.1 奖励人们会为提示词给出高排名的帧。-1 至 1，实际约 0.2 至 0.35，越高越好。可能的作弊方式：光亮、过饱和的风格；看不到运动。",
    ),
    "Rewards frames that people would rate as beautiful; the prompt plays no part. about 1 .. 10; higher is better. Can be cheated by: painterly, moody, shallow-focus pictures that leave the prompt; blind to movement.": (
        "사람들이 아름답다고 평가할 프레임에 보상합니다. 프롬프트는 관계없습니다. 약 1 .. 10, 높을수록 좋습니다. 속임수: 프롬프트를 벗어난 회화풍, 어두운 분위기, 얕은 초점의 그림. 움직임은 보지 못합니다.",
        "奖励人们会认为美的帧；与提示词无关。约 1 至 10，越高越好。可能的作弊方式：偏离提示词的绘画感、阴郁、浅景深的画面；看不到运动。",
    ),
    "Rewards frames that people would prefer for the prompt, by HPSv3. unbounded, in practice about -5 .. 15; higher is better. Can be cheated by: crowded, over-detailed pictures; blind to movement.": (
        "HPSv3로 보아 사람들이 프롬프트에 대해 더 좋아할 프레임에 보상합니다. 범위 제한 없음, 실제로는 약 -5 .. 15, 높을수록 좋습니다. 속임수: 복잡하고 지나치게 세밀한 그림. 움직임은 보지 못합니다.",
        "用 HPSv3 奖励人们更喜欢的、符合提示词的帧。没有界限，实际约 -5 至 15，越高越好。可能的作弊方式：拥挤、细节过多的画面；看不到运动。",
    ),
    "Rewards videos by visual quality, motion quality and text alignment (VideoAlign). standardised, each about -3 .. 3; the sum of the weighted values; higher is better. Can be cheated by: showy camera moves and gloss; it sees two frames per second.": (
        "시각 품질, 움직임 품질, 텍스트 일치도로 비디오에 보상합니다(VideoAlign). 표준화된 값으로 각각 약 -3 .. 3, 가중치를 곱한 값의 합, 높을수록 좋습니다. 속임수: 과시적인 카메라 움직임과 광택. 초당 두 프레임만 봅니다.",
        "按视觉质量、运动质量和文本一致性奖励视频（VideoAlign）。标准化的值，每项约 -3 至 3，为加权值之和，越高越好。可能的作弊方式：炫耀的运镜和光泽；它每秒只看两帧。",
    ),
    "A complete CLIP model, folder or file. Lists models/flashgrpo_rewards or models/clip_vision.": (
        "완전한 CLIP 모델, 폴더 또는 파일. models/flashgrpo_rewards 또는 models/clip_vision의 목록입니다.",
        "完整的 CLIP 模型，文件夹或文件。列出 models/flashgrpo_rewards 或 models/clip_vision。",
    ),
    "PickScore_v1, folder or file. Lists models/flashgrpo_rewards or models/clip_vision.": (
        "PickScore_v1, 폴더 또는 파일. models/flashgrpo_rewards 또는 models/clip_vision의 목록입니다.",
        "PickScore_v1，文件夹或文件。列出 models/flashgrpo_rewards 或 models/clip_vision。",
    ),
    "HPS_v2.1_compressed.pt, or a folder of it. Lists models/flashgrpo_rewards or models/clip_vision.": (
        "HPS_v2.1_compressed.pt 또는 그 폴더. models/flashgrpo_rewards 또는 models/clip_vision의 목록입니다.",
        "HPS_v2.1_compressed.pt 或它的文件夹。列出 models/flashgrpo_rewards 或 models/clip_vision。",
    ),
    "OpenAI's CLIP L/14, complete or its vision side. Lists models/flashgrpo_rewards or models/clip_vision.": (
        "OpenAI의 CLIP L/14, 전체 또는 비전 쪽만. models/flashgrpo_rewards 또는 models/clip_vision의 목록입니다.",
        "OpenAI 的 CLIP L/14，完整的或仅视觉部分。列出 models/flashgrpo_rewards 或 models/clip_vision。",
    ),
    "sac+logos+ava1-l14-linearMSE, the predictor. Lists models/flashgrpo_rewards.": (
        "예측기 sac+logos+ava1-l14-linearMSE. models/flashgrpo_rewards의 목록입니다.",
        "预测器 sac+logos+ava1-l14-linearMSE。列出 models/flashgrpo_rewards。",
    ),
    "The folder with HPSv3.safetensors. Lists models/flashgrpo_rewards.": (
        "HPSv3.safetensors가 있는 폴더. models/flashgrpo_rewards의 목록입니다.",
        "含有 HPSv3.safetensors 的文件夹。列出 models/flashgrpo_rewards。",
    ),
    "The folder with VideoReward's files. Lists models/flashgrpo_rewards.": (
        "VideoReward의 파일이 있는 폴더. models/flashgrpo_rewards의 목록입니다.",
        "含有 VideoReward 文件的文件夹。列出 models/flashgrpo_rewards。",
    ),
    "Scores are limited to -limit and limit.": (
        "점수를 -limit와 limit 사이로 제한합니다.",
        "分数限制在 -limit 和 limit 之间。",
    ),
    "Weight of visual quality.": ("시각 품질의 가중치.", "视觉质量的权重。"),
    "Weight of motion quality.": ("움직임 품질의 가중치.", "运动质量的权重。"),
    "Weight of alignment.": ("텍스트 일치도의 가중치.", "文本一致性的权重。"),
    "Frames that go through the network together, 1 to 1024: lower it when memory runs out.": (
        "신경망에 함께 통과시키는 프레임 수, 1~1024: 메모리가 부족하면 낮추세요.",
        "一起通过网络的帧数，1 至 1024：内存不足时调低。",
    ),
    "Compute type of the reward's network; auto is bf16 on a GPU and fp32 on the CPU.": (
        "보상 신경망의 계산 형식. auto는 GPU에서 bf16, CPU에서 fp32입니다.",
        "奖励网络的计算类型；auto 在 GPU 上为 bf16，在 CPU 上为 fp32。",
    ),
    "auto lets ComfyUI move the network to the GPU and away again; cpu keeps it in main memory, which is slow.": (
        "auto는 ComfyUI가 신경망을 GPU로 옮기고 다시 내리게 합니다. cpu는 주 메모리에 두며 느립니다.",
        "auto 由 ComfyUI 将网络移到 GPU 再移走；cpu 将其留在内存中，较慢。",
    ),
    # names of inputs, outputs and types
    "trained": ("학습된 것", "训练结果"),
    "prompts": ("프롬프트", "提示词"),
    "video settings": ("비디오 설정", "视频设置"),
    "prompt count": ("프롬프트 수", "提示词数量"),
    "seeds per prompt": ("프롬프트당 시드 수", "每个提示词的种子数"),
    "seed": ("시드", "种子"),
    "reward": ("보상", "奖励"),
    "run on": ("실행 위치", "运行位置"),
    "speed LoRAs": ("가속 LoRA", "加速 LoRA"),
    "video": ("비디오", "视频"),
    "text": ("텍스트", "文本"),
    "text encoder": ("텍스트 인코더", "文本编码器"),
    "policy": ("정책", "策略"),
    "conditioning": ("컨디셔닝", "条件"),
    "LoRA": ("LoRA", "LoRA"),
    "strength": ("강도", "强度"),
    "previous": ("이전", "前一个"),
    "frozen LoRAs": ("고정 LoRA", "冻结的 LoRA"),
    "group size": ("그룹 크기", "组大小"),
    "prompts per iteration": ("반복당 프롬프트 수", "每次迭代的提示词数"),
    "noise": ("노이즈", "噪声"),
    "window first": ("구간 시작", "窗口起点"),
    "window end": ("구간 끝", "窗口终点"),
    "draw": ("추첨 방식", "抽取方式"),
    "SDE": ("SDE", "SDE"),
    "eta": ("eta", "eta"),
    "schedule": ("스케줄", "调度"),
    "groups": ("그룹", "分组"),
    "picture": ("그림", "图片"),
    "run name": ("실행 이름", "运行名称"),
    "diffusion model": ("디퓨전 모델", "扩散模型"),
    "low noise model": ("저노이즈 모델", "低噪声模型"),
    "VAE": ("VAE", "VAE"),
    "compute type": ("연산 형식", "计算类型"),
    "LoRA rank": ("LoRA 랭크", "LoRA 秩"),
    "LoRA alpha": ("LoRA 알파", "LoRA alpha"),
    "LoRA targets": ("LoRA 대상", "LoRA 目标层"),
    "continue from": ("이어서 학습", "继续训练自"),
    "run": ("실행", "运行"),
    "curve": ("곡선", "曲线"),
    "samples": ("샘플", "样本"),
    "source": ("출처", "来源"),
    "negative prompt": ("네거티브 프롬프트", "负面提示词"),
    "validation share": ("검증 비율", "验证比例"),
    "test share": ("테스트 비율", "测试比例"),
    "text tokens": ("텍스트 토큰 수", "文本词元数"),
    "CLIP": ("CLIP", "CLIP"),
    "clip range": ("클리핑 범위", "裁剪范围"),
    "weight": ("가중치", "权重"),
    "target": ("목표", "目标"),
    "frames": ("프레임", "帧"),
    "tolerance": ("허용치", "容差"),
    "mode": ("방식", "模式"),
    "quality": ("품질", "质量"),
    "enough": ("충분한 속도", "足够的速度"),
    "short side": ("짧은 변", "短边"),
    "blur": ("흐림", "模糊"),
    "exposure": ("노출", "曝光"),
    "flicker": ("깜박임", "闪烁"),
    "freeze": ("정지", "静止"),
    "rollouts": ("롤아웃", "rollout"),
    "videos": ("비디오 목록", "视频列表"),
    "contact sheet": ("모아 보기", "联系表"),
    "name": ("이름", "名称"),
    "key format": ("키 형식", "键名格式"),
    "weights": ("사용할 가중치", "使用的权重"),
    "LoRA name": ("LoRA 이름", "LoRA 名称"),
    "advantage std": ("어드밴티지 표준편차", "优势的标准差"),
    "advantage clamp": ("어드밴티지 한계", "优势的上限"),
    "normalise": ("표준화", "标准化"),
    "when not finite": ("유한하지 않을 때", "出现非有限值时"),
    "scored": ("채점 결과", "评分结果"),
    "preset": ("프리셋", "预设"),
    "iterations": ("반복 횟수", "迭代次数"),
    "evaluate every": ("평가 간격", "评估间隔"),
    "advanced": ("고급", "高级"),
    "LoRA low noise": ("저노이즈 LoRA", "低噪声 LoRA"),
    "learning rate": ("학습률", "学习率"),
    "warmup": ("워밍업", "预热"),
    "KL weight": ("KL 가중치", "KL 权重"),
    "validation prompts": ("검증 프롬프트 수", "验证提示词数"),
    "validation seeds": ("검증 시드 수", "验证种子数"),
    "test prompts": ("테스트 프롬프트 수", "测试提示词数"),
    "test seeds": ("테스트 시드 수", "测试种子数"),
    "patience": ("인내 횟수", "耐心次数"),
    "rectification": ("그래디언트 보정", "梯度校正"),
    "max grad norm": ("최대 그래디언트 노름", "最大梯度范数"),
    "weight decay": ("가중치 감쇠", "权重衰减"),
    "EMA decay": ("EMA 감쇠", "EMA 衰减"),
    "updates per rollout": ("롤아웃당 업데이트 수", "每次 rollout 的更新数"),
    "save every": ("저장 간격", "保存间隔"),
    "keep": ("보관 개수", "保留数量"),
    "gradient checkpointing": ("그래디언트 체크포인팅", "梯度检查点"),
    "width": ("너비", "宽度"),
    "height": ("높이", "高度"),
    "frames per second": ("초당 프레임", "每秒帧数"),
    "steps": ("스텝", "步数"),
    "shift": ("시프트", "偏移"),
    "guidance": ("가이던스", "引导"),
    "micro batch": ("마이크로 배치", "微批大小"),
    "decode batch": ("디코딩 배치", "解码批大小"),
    "rewards": ("보상", "奖励"),
    "scored rollouts": ("채점된 롤아웃", "已评分的 rollout"),
    "advanced settings": ("고급 설정", "高级设置"),
    # descriptions of nodes
    "Samples held-out prompts from the same noise before and after training and puts them side by side in one video, with their rewards.": (
        "학습에 쓰지 않은 프롬프트를 같은 노이즈에서 학습 전과 후로 샘플링해, 보상과 함께 한 비디오에 나란히 보여 줍니다.",
        "用相同的噪声在训练前后对留出的提示词采样，并排放进一个视频，附上各自的奖励。",
    ),
    "Encodes a prompt for stock samplers as training does. Stock CLIPLoader cannot load the tiny text encoder; for real Wan models CLIPTextEncode does the same.": (
        "학습과 똑같은 방식으로 프롬프트를 인코딩해 기본 샘플러에 넘깁니다. 기본 CLIPLoader는 작은 텍스트 인코더를 불러오지 못합니다. 실제 Wan 모델에서는 CLIPTextEncode가 같은 일을 합니다.",
        "按训练时的方式为内置采样器编码提示词。内置的 CLIPLoader 无法加载微型文本编码器；对真实的 Wan 模型，CLIPTextEncode 的结果相同。",
    ),
    "A LoRA that stays on and is not trained. Several can be chained.": (
        "계속 켜져 있지만 학습되지 않는 LoRA입니다. 여러 개를 이어 붙일 수 있습니다.",
        "始终启用但不参与训练的 LoRA。可以串联多个。",
    ),
    "Chooses the prompts of the next iteration and gives each one noise level (sigma) at which all its videos get their noise.": (
        "다음 반복의 프롬프트를 고르고, 각 프롬프트의 모든 비디오가 노이즈를 받을 하나의 노이즈 수준(시그마)을 정합니다.",
        "选出下一次迭代的提示词，并为每个提示词指定一个噪声水平（sigma），它的所有视频都在那里加入噪声。",
    ),
    "A Wan model with a trainable LoRA. Continues the run of this name where it stands on disk, or starts it. Nothing is loaded into memory until a node needs it.": (
        "학습 가능한 LoRA가 붙은 Wan 모델입니다. 이 이름의 실행을 디스크에 있는 상태에서 이어 가거나 새로 시작합니다. 노드가 필요로 할 때까지 아무것도 메모리에 올리지 않습니다.",
        "带有可训练 LoRA 的 Wan 模型。从磁盘上的状态继续同名运行，或新建运行。在节点需要之前不会加载任何内容到内存。",
    ),
    "The newest LoRA, the curve and the sample videos of a run in output/flashgrpo/runs.": (
        "output/flashgrpo/runs에 있는 실행의 최신 LoRA, 곡선, 샘플 비디오입니다.",
        "output/flashgrpo/runs 中某次运行的最新 LoRA、曲线和样本视频。",
    ),
    "Prompts to train on. Some are held out: validation chooses the best weights, the test judges them once at the end.": (
        "학습할 프롬프트입니다. 일부는 따로 빼 둡니다. 검증 프롬프트로 가장 좋은 가중치를 고르고, 테스트 프롬프트로 마지막에 한 번 평가합니다.",
        "用于训练的提示词。一部分会留出：验证集用来选择最好的权重，测试集在最后评判一次。",
    ),
    "Samples every video of the groups: deterministic except for the one step whose noise the training learns from.": (
        "그룹의 모든 비디오를 샘플링합니다. 학습이 노이즈로부터 배우는 한 스텝을 빼고는 모두 결정적입니다.",
        "为各组采样所有视频：除了训练要从其噪声中学习的那一步之外，全部是确定性的。",
    ),
    "Writes a LoRA into output/loras, where LoraLoader lists it (press R to refresh the lists). A file of that name is never overwritten.": (
        "LoRA를 output/loras에 저장합니다. LoraLoader 목록에 나타납니다(R 키로 목록 새로 고침). 같은 이름의 파일은 절대 덮어쓰지 않습니다.",
        "把 LoRA 写入 output/loras，LoraLoader 会列出它（按 R 刷新列表）。绝不会覆盖同名文件。",
    ),
    "Scores every video and compares it with the others of its prompt: the advantage. Stops with advice when all videos of every prompt score the same.": (
        "모든 비디오를 채점하고 같은 프롬프트의 다른 비디오와 비교합니다(어드밴티지). 모든 프롬프트의 비디오 점수가 전부 같으면 조언과 함께 멈춥니다.",
        "为每个视频评分，并与同一提示词的其他视频比较，得到优势。如果每个提示词的所有视频得分都相同，会给出建议并停止。",
    ),
    "Trains the LoRA: group, rollout, score, advantage, step, again and again. A finished run returns its result at once; a stopped one goes on. Every evaluation writes a LoRA that LoraLoader lists.": (
        "LoRA를 학습합니다: 그룹, 롤아웃, 채점, 어드밴티지, 스텝을 되풀이합니다. 끝난 실행은 결과를 바로 돌려주고, 멈춘 실행은 이어서 합니다. 평가할 때마다 LoraLoader에 나타나는 LoRA를 저장합니다.",
        "训练 LoRA：分组、rollout、评分、优势、更新，循环往复。已完成的运行立即返回结果，中断的运行会继续。每次评估都会写出一个 LoraLoader 能列出的 LoRA。",
    ),
    "Where the training runs: in this ComfyUI, or in a worker that you have started with `flashgrpo worker`, on this or another machine. The node shows the same either way, and says the command when no worker is running.": (
        "학습이 실행되는 곳: 이 ComfyUI, 또는 이 컴퓨터나 다른 컴퓨터에서 `flashgrpo worker`로 시작한 워커. 어느 쪽이든 노드는 같은 내용을 보여 주며, 실행 중인 워커가 없으면 시작 명령을 알려 줍니다.",
        "训练在哪里运行：在此 ComfyUI 中，或在你用 `flashgrpo worker` 在本机或另一台机器上启动的工作进程中。两种方式下节点显示的内容相同；没有工作进程运行时会给出启动命令。",
    ),
    "Replaces settings of the preset; -1 and 'preset' leave them as they are.": (
        "프리셋의 설정을 바꿉니다. -1과 'preset'은 그대로 둡니다.",
        "替换预设中的设置；-1 和 “preset” 表示保持不变。",
    ),
    "Changes the policy so that videos with a high advantage become more likely. The result is saved in the run folder: queue again for the next iteration.": (
        "어드밴티지가 높은 비디오가 더 자주 나오도록 정책을 바꿉니다. 결과는 실행 폴더에 저장되며, 다시 실행하면 다음 반복입니다.",
        "改变策略，使优势高的视频更容易出现。结果保存在运行文件夹中：再次排队就是下一次迭代。",
    ),
    "What a training video looks like and how it is sampled. Train at the size, steps, shift and guidance you render with.": (
        "학습 비디오의 모습과 샘플링 방법입니다. 실제로 렌더링할 크기, 스텝, 시프트, 가이던스로 학습하세요.",
        "训练视频的样子以及采样方式。请用你渲染时的尺寸、步数、偏移和引导来训练。",
    ),
    "Rewards frames whose mean brightness is close to a target. 0 (as far from the target as possible) .. 1 (on target); higher is better. Can be cheated by: flat grey, fog; it says nothing about content. For checks and for a look.": (
        "평균 밝기가 목표에 가까운 프레임에 보상합니다. 0(목표에서 가장 멂) .. 1(목표와 같음), 높을수록 좋습니다. 속임수: 밋밋한 회색, 안개. 내용은 보지 않습니다. 점검과 분위기용입니다.",
        "奖励平均亮度接近目标的帧。0（离目标最远）至 1（正好达到目标），越高越好。可能的作弊方式：单调的灰色、雾；它不涉及内容。用于检查和风格。",
    ),
    "Rewards frames whose colours are as strong as a target. 0 (as far from the target as possible) .. 1 (on target); higher is better. Can be cheated by: over-saturation and colour casts; lower the target when colours get gaudy.": (
        "색의 강도가 목표에 가까운 프레임에 보상합니다. 0(목표에서 가장 멂) .. 1(목표와 같음), 높을수록 좋습니다. 속임수: 과채도와 색 치우침. 색이 요란해지면 목표를 낮추세요.",
        "奖励色彩强度接近目标的帧。0（离目标最远）至 1（正好达到目标），越高越好。可能的作弊方式：过度饱和与偏色；色彩太艳时请降低目标。",
    ),
    "Rewards frames whose contrast is close to a target. 0 (as far from the target as possible) .. 1 (on target); higher is better. Can be cheated by: silhouettes, vignettes, black bars; it says nothing about content.": (
        "대비가 목표에 가까운 프레임에 보상합니다. 0(목표에서 가장 멂) .. 1(목표와 같음), 높을수록 좋습니다. 속임수: 실루엣, 비네팅, 검은 띠. 내용은 보지 않습니다.",
        "奖励对比度接近目标的帧。0（离目标最远）至 1（正好达到目标），越高越好。可能的作弊方式：剪影、暗角、黑边；它不涉及内容。",
    ),
    "Rewards brightness that does not jump up and down from frame to frame. 0 (heavy flicker) .. 1 (steady); higher is better. Can be cheated by: still videos; slow or little movement. Weigh it against motion.": (
        "프레임마다 밝기가 오르내리지 않는 비디오에 보상합니다. 0(심한 깜박임) .. 1(안정), 높을수록 좋습니다. 속임수: 정지 영상, 느리거나 적은 움직임. 움직임 보상과 함께 쓰세요.",
        "奖励亮度不在帧间上下跳动的视频。0（严重闪烁）至 1（稳定），越高越好。可能的作弊方式：静止的视频、缓慢或很少的运动。请与运动奖励一起使用。",
    ),
    "Rewards videos in which every frame differs from the one before. 0 (a still picture) .. 1 (every frame brings something new); higher is better. Can be cheated by: any change, however senseless: a twitching corner is enough.": (
        "모든 프레임이 앞 프레임과 다른 비디오에 보상합니다. 0(정지 화면) .. 1(매 프레임이 새로움), 높을수록 좋습니다. 속임수: 의미 없는 변화라도 통합니다. 한구석이 떨리는 것으로 충분합니다.",
        "奖励每一帧都与前一帧不同的视频。0（静止画面）至 1（每帧都有新内容），越高越好。可能的作弊方式：任何无意义的变化，角落里的抖动就够了。",
    ),
    "Rewards frames that compress well (or badly) as JPEG: a check of the training. 0 .. 1; higher is better. Can be cheated by: empty frames (compressible) or noise (incompressible): that is its point.": (
        "JPEG로 잘(또는 잘 안) 압축되는 프레임에 보상합니다. 학습을 점검하는 용도입니다. 0 .. 1, 높을수록 좋습니다. 속임수: 빈 프레임(compressible)이나 노이즈(incompressible). 바로 그것이 목적입니다.",
        "奖励用 JPEG 容易（或难以）压缩的帧：用来检查训练。0 至 1，越高越好。可能的作弊方式：空白的帧（compressible）或噪声（incompressible），这正是它的用意。",
    ),
    "Rewards videos whose last frame leads smoothly back to the first. 0 (ends elsewhere, or does not move) .. 1 (a seamless loop); higher is better. Can be cheated by: tiny movements to and fro, fading in and out. Weigh it against motion.": (
        "마지막 프레임이 첫 프레임으로 매끄럽게 이어지는 비디오에 보상합니다. 0(다른 곳에서 끝나거나 움직이지 않음) .. 1(이음매 없는 루프), 높을수록 좋습니다. 속임수: 작은 왕복 움직임, 페이드 인과 아웃. 움직임 보상과 함께 쓰세요.",
        "奖励最后一帧能平滑回到第一帧的视频。0（停在别处或没有运动）至 1（无缝循环），越高越好。可能的作弊方式：微小的来回运动、淡入淡出。请与运动奖励一起使用。",
    ),
    "Rewards movement up to a cap and punishes jitter, measured by optical flow. 0 (frozen or jittery) .. 1 (enough smooth movement); higher is better. Can be cheated by: camera pans, drifting textures and objects sliding along; movement that the prompt does not ask for. Weigh it against a quality or prompt reward.": (
        "한도까지의 움직임에 보상하고 떨림에 벌점을 줍니다. 옵티컬 플로로 측정합니다. 0(정지 또는 떨림) .. 1(충분히 부드러운 움직임), 높을수록 좋습니다. 속임수: 카메라 패닝, 흘러가는 질감, 미끄러지는 물체, 프롬프트가 요구하지 않은 움직임. 품질이나 프롬프트 보상과 함께 쓰세요.",
        "奖励运动（有上限）并惩罚抖动，用光流测量。0（静止或抖动）至 1（足够且平滑的运动），越高越好。可能的作弊方式：镜头平移、漂移的纹理、滑动的物体、提示词没有要求的运动。请与质量或提示词奖励一起使用。",
    ),
    "Does one coloured shape move as the prompt says? Measures hue and motion from the pixels; for the embedded tiny Wan, whose prompts read 'a red circle moving left'. 0 .. 1 (asked colour, asked direction); higher is better. Can be cheated by: losing the named shape: only its colour and its motion are measured.": (
        "색이 있는 도형 하나가 프롬프트대로 움직이나요? 픽셀에서 색상과 움직임을 측정합니다. 'a red circle moving left' 같은 프롬프트를 쓰는 내장 작은 Wan용입니다. 0 .. 1(요청한 색, 요청한 방향), 높을수록 좋습니다. 속임수: 이름 붙은 모양을 잃는 것. 색과 움직임만 측정합니다.",
        "一个有颜色的形状是否按提示词运动？从像素测量色相和运动；用于内置的微型 Wan，其提示词如 “a red circle moving left”。0 至 1（要求的颜色与方向），越高越好。可能的作弊方式：丢掉所说的形状，因为只测量颜色和运动。",
    ),
    # inputs
    "A policy, or a run (its exported LoRA is shown).": (
        "정책 또는 실행(내보낸 LoRA를 보여 줌).",
        "策略，或一次运行（展示它导出的 LoRA）。",
    ),
    "Test prompts are taken first.": ("테스트 프롬프트를 먼저 씁니다.", "优先使用测试提示词。"),
    "Size and sampling.": ("크기와 샘플링.", "尺寸与采样。"),
    "How many prompts are shown, 1 to 64.": (
        "보여 줄 프롬프트 수, 1~64.",
        "展示多少个提示词，1 至 64。",
    ),
    "How many pairs of videos per prompt, 1 to 16.": (
        "프롬프트당 비디오 쌍의 수, 1~16.",
        "每个提示词的视频对数，1 至 16。",
    ),
    "First seed of the noise, 0 to 2^53 - 1; the same on both sides.": (
        "노이즈의 첫 시드, 0~2^53 - 1. 양쪽이 같습니다.",
        "噪声的起始种子，0 至 2^53 - 1；两边相同。",
    ),
    "Reward shown above the videos; without it the run's own.": (
        "비디오 위에 표시할 보상. 없으면 실행 자체의 보상.",
        "显示在视频上方的奖励；未连接时用运行自己的奖励。",
    ),
    "LoRAs that are on in both videos, for example a speed LoRA; set steps and guidance in the video settings to match.": (
        "두 비디오 모두에 켜지는 LoRA, 예를 들어 가속 LoRA. 비디오 설정의 스텝과 가이던스를 맞추세요.",
        "两个视频都启用的 LoRA，例如加速 LoRA；请在视频设置中相应调整步数和引导。",
    ),
    "The prompt; empty is allowed.": ("프롬프트. 비워도 됩니다.", "提示词；可以留空。"),
    "Text encoder file (umt5_xxl_*.safetensors from models/text_encoders), or the tiny one that belongs to the tiny Wan.": (
        "텍스트 인코더 파일(models/text_encoders의 umt5_xxl_*.safetensors) 또는 작은 Wan에 딸린 작은 인코더.",
        "文本编码器文件（models/text_encoders 中的 umt5_xxl_*.safetensors），或属于微型 Wan 的微型编码器。",
    ),
    "With a policy, the length of the text context is that of its model.": (
        "정책을 연결하면 텍스트 길이가 그 모델에 맞춰집니다.",
        "连接策略后，文本长度与其模型一致。",
    ),
    "LoRA file (.safetensors from models/loras or output/loras).": (
        "LoRA 파일(models/loras 또는 output/loras의 .safetensors).",
        "LoRA 文件（models/loras 或 output/loras 中的 .safetensors）。",
    ),
    "Strength of the LoRA, -10 to 10; 0 leaves it out.": (
        "LoRA 강도, -10~10. 0이면 빼고 씁니다.",
        "LoRA 强度，-10 至 10；0 表示不使用。",
    ),
    "Further frozen LoRAs, applied before.": (
        "먼저 적용되는 다른 고정 LoRA.",
        "更早应用的其他冻结 LoRA。",
    ),
    "The policy whose next iteration this is.": (
        "이 정책의 다음 반복입니다.",
        "这是该策略的下一次迭代。",
    ),
    "Prompts to choose from.": ("고를 프롬프트.", "可供选择的提示词。"),
    "Videos per prompt. At least 2; below 4 advantages carry almost no information.": (
        "프롬프트당 비디오 수. 최소 2, 4 미만이면 어드밴티지에 정보가 거의 없습니다.",
        "每个提示词的视频数。至少 2；少于 4 时优势几乎没有信息。",
    ),
    "Prompts (groups) per iteration; at least 2 so that an update sees several noise levels.": (
        "반복당 프롬프트(그룹) 수. 한 번의 업데이트가 여러 노이즈 수준을 보도록 최소 2.",
        "每次迭代的提示词（组）数；至少 2，使一次更新能看到多个噪声水平。",
    ),
    "Initial noise: one per group (shared) or one per video (independent, as in the paper).": (
        "초기 노이즈: 그룹당 하나(shared) 또는 비디오당 하나(independent, 논문 방식).",
        "初始噪声：每组一个（shared），或每个视频一个（independent，论文的做法）。",
    ),
    "First sampling step that may be stochastic, 0 to steps - 2.": (
        "확률적일 수 있는 첫 샘플링 스텝, 0~스텝 - 2.",
        "可以随机的第一个采样步，0 至 步数 - 2。",
    ),
    "Step behind the last one that may be stochastic; 0 = the first half of the steps. The last step is never stochastic.": (
        "확률적일 수 있는 마지막 스텝의 다음 스텝. 0 = 스텝의 앞 절반. 마지막 스텝은 결코 확률적이지 않습니다.",
        "最后一个可以随机的步之后的那一步；0 = 步数的前一半。最后一步永远不随机。",
    ),
    "Seed of all noise and of the order of the prompts, 0 to 2^53 - 1. Keep it through a run.": (
        "모든 노이즈와 프롬프트 순서의 시드, 0~2^53 - 1. 실행 내내 그대로 두세요.",
        "所有噪声和提示词顺序的种子，0 至 2^53 - 1。在一次运行中保持不变。",
    ),
    "How prompts get their SDE step: stratified over the window, or uniform with replacement.": (
        "프롬프트가 SDE 스텝을 받는 방식: 구간에 고르게(stratified) 또는 복원 추출로 균등하게(uniform).",
        "提示词如何得到 SDE 步：在窗口内分层（stratified），或有放回的均匀抽取（uniform）。",
    ),
    "Standard deviation of the stochastic step: flash (paper), flow (Flow-SDE), dance (DanceGRPO), cps.": (
        "확률적 스텝의 표준편차: flash(논문), flow(Flow-SDE), dance(DanceGRPO), cps.",
        "随机步的标准差：flash（论文）、flow（Flow-SDE）、dance（DanceGRPO）、cps。",
    ),
    "Scale of the injected noise (flash 1.0, flow 0.7, dance 0.3, cps 0.7).": (
        "넣는 노이즈의 크기(flash 1.0, flow 0.7, dance 0.3, cps 0.7).",
        "注入噪声的大小（flash 1.0、flow 0.7、dance 0.3、cps 0.7）。",
    ),
    "simple = ComfyUI, unipc-a = diffusers up to 0.35 and the paper, unipc-b = newer diffusers.": (
        "simple = ComfyUI, unipc-a = diffusers 0.35까지와 논문, unipc-b = 더 새로운 diffusers.",
        "simple = ComfyUI，unipc-a = diffusers 0.35 及更早和论文，unipc-b = 更新的 diffusers。",
    ),
    "Name of the run and of its folder output/flashgrpo/runs/<name>. Letters, digits, '.', '-', '_', at most 64. The same name continues the run; another name starts a new one.": (
        "실행과 그 폴더 output/flashgrpo/runs/<이름>의 이름. 영문자, 숫자, '.', '-', '_', 최대 64자. 같은 이름은 실행을 이어 가고, 다른 이름은 새로 시작합니다.",
        "运行及其文件夹 output/flashgrpo/runs/<名称> 的名称。字母、数字、“.”、“-”、“_”，最多 64 个字符。同名则继续该运行，换名则新建。",
    ),
    "Wan diffusion model (.safetensors from models/diffusion_models; bf16, fp16, fp8 and fp8-scaled work), or the embedded tiny Wan. For Wan 2.2 14B this is the high-noise expert.": (
        "Wan 디퓨전 모델(models/diffusion_models의 .safetensors. bf16, fp16, fp8, fp8-scaled 지원) 또는 내장된 작은 Wan. Wan 2.2 14B에서는 고노이즈 전문가 모델입니다.",
        "Wan 扩散模型（models/diffusion_models 中的 .safetensors；支持 bf16、fp16、fp8 和 fp8-scaled），或内置的微型 Wan。对 Wan 2.2 14B，这里是高噪声专家。",
    ),
    "Low-noise expert of Wan 2.2 14B; none for every other Wan model.": (
        "Wan 2.2 14B의 저노이즈 전문가 모델. 다른 모든 Wan 모델에서는 none.",
        "Wan 2.2 14B 的低噪声专家；其他 Wan 模型选 none。",
    ),
    "Compute type of the frozen weights; auto keeps 16-bit files as they are on a GPU and uses fp32 on the CPU.": (
        "고정된 가중치의 연산 형식. auto는 GPU에서 16비트 파일을 그대로 쓰고 CPU에서는 fp32를 씁니다.",
        "冻结权重的计算类型；auto 在 GPU 上保持 16 位文件原样，在 CPU 上使用 fp32。",
    ),
    "Rank of the trained LoRA.": ("학습할 LoRA의 랭크.", "所训练 LoRA 的秩。"),
    "More can learn more and takes more memory.": (
        "클수록 더 많이 배울 수 있고 메모리를 더 씁니다.",
        "越大能学得越多，也更占内存。",
    ),
    "LoRA alpha; the update is scaled by alpha / rank.": (
        "LoRA 알파. 변화량은 알파 / 랭크로 조정됩니다.",
        "LoRA alpha；更新量按 alpha / 秩 缩放。",
    ),
    "Usual: twice the rank.": ("보통 랭크의 두 배.", "通常为秩的两倍。"),
    "Which layers get a LoRA, separated by commas: attention, ffn, or module-name endings such as attn1.to_q. Each must match.": (
        "LoRA를 붙일 층, 쉼표로 구분: attention, ffn, 또는 attn1.to_q 같은 모듈 이름의 끝부분. 각각 맞는 것이 있어야 합니다.",
        "哪些层加 LoRA，用逗号分隔：attention、ffn，或 attn1.to_q 这样的模块名结尾。每一项都必须能匹配。",
    ),
    "LoRA whose weights training starts from; it is then also the reference policy. Its rank must be lora_rank.": (
        "학습을 시작할 가중치를 가진 LoRA. 이때 참조 정책도 됩니다. 랭크가 LoRA 랭크와 같아야 합니다.",
        "训练从这个 LoRA 的权重开始，它同时成为参考策略。它的秩必须等于 LoRA 秩。",
    ),
    "LoRAs that stay on during training and belong to the base (a speed LoRA, a style). Use them when sampling, too.": (
        "학습하는 동안 켜져 있고 기본 모델에 속하는 LoRA(가속 LoRA, 스타일). 샘플링할 때도 쓰세요.",
        "训练期间保持启用、属于基础模型的 LoRA（加速 LoRA、风格）。采样时也要使用。",
    ),
    "Where the prompts come from: the text below, prompts that come with the pack, or a .txt (one prompt a line) or .jsonl file in the input folder.": (
        "프롬프트의 출처: 아래 텍스트, 팩에 딸린 프롬프트, 또는 input 폴더의 .txt(한 줄에 하나)나 .jsonl 파일.",
        "提示词的来源：下面的文本、随包附带的提示词，或 input 文件夹中的 .txt（每行一条）或 .jsonl 文件。",
    ),
    "One prompt a line; 24 or more are recommended, 4 is the least that can be split. Used when source is 'the text below'.": (
        "한 줄에 프롬프트 하나. 24개 이상을 권하며, 나누려면 최소 4개가 필요합니다. 출처가 'the text below'일 때 쓰입니다.",
        "每行一条提示词；建议 24 条以上，至少 4 条才能拆分。来源为 “the text below” 时使用。",
    ),
    "Negative prompt, used when guidance is above 1.": (
        "네거티브 프롬프트. 가이던스가 1보다 클 때 쓰입니다.",
        "负面提示词，引导大于 1 时使用。",
    ),
    "Share of the prompts held out for validation.": (
        "검증용으로 빼 두는 프롬프트의 비율.",
        "留作验证的提示词比例。",
    ),
    "Share of the prompts held out for the final test.": (
        "최종 테스트용으로 빼 두는 프롬프트의 비율.",
        "留作最终测试的提示词比例。",
    ),
    "Text encoder file (umt5_xxl_*.safetensors from models/text_encoders), or the tiny one that belongs to the tiny Wan, or the CLIP that is connected. It is loaded once, and its results are kept on disk.": (
        "텍스트 인코더 파일(models/text_encoders의 umt5_xxl_*.safetensors), 작은 Wan에 딸린 작은 인코더, 또는 연결된 CLIP. 한 번만 불러오고 결과는 디스크에 보관합니다.",
        "文本编码器文件（models/text_encoders 中的 umt5_xxl_*.safetensors）、属于微型 Wan 的微型编码器，或已连接的 CLIP。只加载一次，结果保存在磁盘上。",
    ),
    "Length of the text context; 0 = the model's own (512, tiny: 32).": (
        "텍스트 길이. 0 = 모델 자체의 값(512, 작은 Wan: 32).",
        "文本长度；0 = 模型自身的值（512，微型：32）。",
    ),
    "CLIP from CLIPLoader (type wan); used when text_encoder says so.": (
        "CLIPLoader(형식 wan)의 CLIP. 텍스트 인코더에서 선택했을 때 쓰입니다.",
        "来自 CLIPLoader（类型 wan）的 CLIP；在文本编码器中选择后使用。",
    ),
    "Weight in the mix, -100 to 100; negative punishes. Terms are standardised before they are weighted, so 1 and 1 count equally.": (
        "섞을 때의 가중치, -100~100. 음수는 벌점. 각 항은 가중하기 전에 표준화되므로 1과 1은 똑같이 반영됩니다.",
        "混合中的权重，-100 至 100；负数为惩罚。各项先标准化再加权，因此 1 和 1 同等重要。",
    ),
    "Wanted brightness, 0 black, 1 white.": (
        "원하는 밝기, 0 검정, 1 흰색.",
        "想要的亮度，0 黑，1 白。",
    ),
    "Further rewards: a chain is a weighted mix.": (
        "다른 보상. 이어 붙이면 가중 혼합이 됩니다.",
        "其他奖励：串联即加权混合。",
    ),
    "Wanted colourfulness, 0 grey, 1 extremely colourful; photos lie near 0.4.": (
        "원하는 색감, 0 회색, 1 매우 화려함. 사진은 0.4 안팎.",
        "想要的色彩丰富度，0 灰，1 极其鲜艳；照片约为 0.4。",
    ),
    "Wanted contrast, 0 flat, 1 half black and half white; photos lie near 0.45.": (
        "원하는 대비, 0 평평함, 1 절반은 검정 절반은 흰색. 사진은 0.45 안팎.",
        "想要的对比度，0 平淡，1 一半黑一半白；照片约为 0.45。",
    ),
    "Swing of the brightness in grey levels that brings the reward down to 0.37.": (
        "보상을 0.37까지 떨어뜨리는 밝기의 흔들림, 회색 단계.",
        "使奖励降到 0.37 的亮度摆动（灰度级）。",
    ),
    "compressible rewards plain frames, incompressible detailed ones.": (
        "compressible은 단순한 프레임에, incompressible은 세밀한 프레임에 보상합니다.",
        "compressible 奖励简单的帧，incompressible 奖励细节丰富的帧。",
    ),
    "JPEG quality, 1 to 95: how fine the measure is.": (
        "JPEG 품질, 1~95: 측정의 세밀함.",
        "JPEG 质量，1 至 95：测量的精细程度。",
    ),
    "Speed from which more movement is not rewarded, short sides of the frame per second.": (
        "이보다 빠른 움직임에는 더 보상하지 않는 속도. 초당 프레임 짧은 변의 배수.",
        "超过此速度的运动不再加分，单位为每秒多少个画面短边。",
    ),
    "Larger frames are scaled down to this short side first, 32 to 512 pixels: smaller is faster.": (
        "큰 프레임은 먼저 이 짧은 변까지 줄입니다, 32~512픽셀. 작을수록 빠릅니다.",
        "较大的帧先缩小到此短边，32 至 512 像素：越小越快。",
    ),
    "Larger frames are scaled down to this short side first, 32 to 4096 pixels: smaller is faster.": (
        "큰 프레임은 먼저 이 짧은 변까지 줄입니다, 32~4096픽셀. 작을수록 빠릅니다.",
        "较大的帧先缩小到此短边，32 至 4096 像素：越小越快。",
    ),
    "How much blur costs; 0 ignores it.": (
        "흐림의 벌점. 0이면 무시합니다.",
        "模糊扣多少分；0 表示忽略。",
    ),
    "How much noise costs; 0 ignores it.": (
        "노이즈의 벌점. 0이면 무시합니다.",
        "噪声扣多少分；0 表示忽略。",
    ),
    "How much exposure costs; 0 ignores it.": (
        "노출 문제의 벌점. 0이면 무시합니다.",
        "曝光问题扣多少分；0 表示忽略。",
    ),
    "How much flicker costs; 0 ignores it.": (
        "깜박임의 벌점. 0이면 무시합니다.",
        "闪烁扣多少分；0 表示忽略。",
    ),
    "How much freeze costs; 0 ignores it.": (
        "정지의 벌점. 0이면 무시합니다.",
        "静止扣多少分；0 表示忽略。",
    ),
    "The policy that the groups were made for.": ("그룹을 만든 정책.", "这些分组所属的策略。"),
    "The groups of this iteration.": ("이번 반복의 그룹.", "本次迭代的分组。"),
    "The LoRA of Train or Load Run, or a policy after a Train Step.": (
        "학습 또는 실행 불러오기의 LoRA, 또는 학습 단계 뒤의 정책.",
        "训练或加载运行的 LoRA，或训练步之后的策略。",
    ),
    "File name without ending, below output/loras; '/' makes a subfolder.": (
        "output/loras 아래의 파일 이름, 확장자 없이. '/'로 하위 폴더를 만듭니다.",
        "output/loras 下的文件名，不含扩展名；“/” 会建立子文件夹。",
    ),
    "Key names: comfyui for ComfyUI, kohya for its tools (ComfyUI reads them too), diffusers for Python scripts.": (
        "키 이름: comfyui는 ComfyUI용, kohya는 kohya 도구용(ComfyUI도 읽음), diffusers는 파이썬 스크립트용.",
        "键名：comfyui 用于 ComfyUI，kohya 用于其工具（ComfyUI 也能读取），diffusers 用于 Python 脚本。",
    ),
    "Which weights of a policy: live (now) or ema (their moving average, smoother after many steps). A LoRA has only one kind.": (
        "정책의 어떤 가중치: live(현재) 또는 ema(이동 평균, 여러 단계 뒤에 더 매끄러움). LoRA에는 한 종류뿐입니다.",
        "使用策略的哪种权重：live（当前）或 ema（移动平均，多步之后更平滑）。LoRA 只有一种。",
    ),
    "The sampled groups.": ("샘플링된 그룹.", "已采样的分组。"),
    "The reward, or a chain of rewards.": ("보상 또는 이어 붙인 보상들.", "奖励，或一串奖励。"),
    "Divisor of the advantages: update (group-centred rewards of the whole update), group, max_group, none, raw_update (paper).": (
        "어드밴티지를 나누는 값: update(업데이트 전체의 그룹 중심화 보상), group, max_group, none, raw_update(논문).",
        "优势的除数：update（整次更新中按组居中的奖励）、group、max_group、none、raw_update（论文）。",
    ),
    "Largest absolute advantage.": ("어드밴티지 절댓값의 최대.", "优势绝对值的上限。"),
    "Standardise each term's advantage on its own before weighting, so that no term decides by its scale.": (
        "가중하기 전에 각 항의 어드밴티지를 따로 표준화해, 크기 때문에 한 항이 결정하지 않게 합니다.",
        "在加权之前分别标准化每一项的优势，避免某一项因数值大小而起决定作用。",
    ),
    "A score that is not finite: stop with an error, or mask the video out of its group; auto masks when a term is served by another process, which may fail for a moment, else stops.": (
        "점수가 유한하지 않을 때: 오류로 멈추거나(error) 비디오를 그룹에서 뺍니다(mask). auto는 잠시 실패할 수 있는 다른 프로세스가 점수를 줄 때는 빼고, 아니면 멈춥니다.",
        "得分不是有限值时：报错停止（error），或将该视频从组中剔除（mask）；auto 在分数由可能暂时出错的其他进程提供时剔除，否则停止。",
    ),
    "What is trained, and the name of the run.": (
        "학습할 대상과 실행의 이름.",
        "训练什么，以及运行的名称。",
    ),
    "Prompts to train on and held-out ones.": (
        "학습용 프롬프트와 빼 둔 프롬프트.",
        "用于训练的和留出的提示词。",
    ),
    "Defaults: recommended or paper. paper = the published settings, slower to learn.": (
        "기본값: recommended 또는 paper. paper = 논문에 발표된 설정, 더 느리게 배웁니다.",
        "默认值：recommended 或 paper。paper = 论文公布的设置，学得更慢。",
    ),
    "Iterations to train (one optimizer step each).": (
        "학습할 반복 횟수(각각 옵티마이저 한 스텝).",
        "训练的迭代次数（每次一个优化器步）。",
    ),
    "Raise it later to go on with a finished run.": (
        "나중에 늘리면 끝난 실행을 이어 갑니다.",
        "之后调大即可继续已完成的运行。",
    ),
    "Seed of every random draw of the run, 0 to 2^53 - 1.": (
        "실행의 모든 난수의 시드, 0~2^53 - 1.",
        "运行中所有随机数的种子，0 至 2^53 - 1。",
    ),
    "Iterations between evaluations on the validation prompts; 0 = only the final test.": (
        "검증 프롬프트 평가 사이의 반복 수. 0 = 최종 테스트만.",
        "两次验证评估之间的迭代数；0 = 只做最终测试。",
    ),
    "What is rewarded; without it technical quality and motion (tiny Wan: the tiny world).": (
        "무엇에 보상하는가. 없으면 기술적 품질과 움직임(작은 Wan: 작은 세계).",
        "奖励什么；未连接时为技术质量和运动（微型 Wan：微型世界）。",
    ),
    "Settings that replace the preset's.": ("프리셋을 대신하는 설정.", "替换预设的设置。"),
    "AdamW learning rate.": ("AdamW 학습률.", "AdamW 学习率。"),
    "Iterations over which the learning rate rises linearly.": (
        "학습률이 선형으로 오르는 반복 수.",
        "学习率线性上升所用的迭代数。",
    ),
    "Weight of the KL divergence to the reference policy.": (
        "참조 정책에 대한 KL 발산의 가중치.",
        "相对参考策略的 KL 散度的权重。",
    ),
    "Clip range of the probability ratio.": ("확률비의 클리핑 범위.", "概率比的裁剪范围。"),
    "Validation prompts used at each evaluation (at most those held out).": (
        "평가마다 쓰는 검증 프롬프트 수(빼 둔 수까지).",
        "每次评估使用的验证提示词数（不超过留出的数量）。",
    ),
    "Videos per prompt at each evaluation.": (
        "평가마다 프롬프트당 비디오 수.",
        "每次评估中每个提示词的视频数。",
    ),
    "Test prompts judged once at the end (at most those held out).": (
        "마지막에 한 번 평가하는 테스트 프롬프트 수(빼 둔 수까지).",
        "最后评判一次的测试提示词数（不超过留出的数量）。",
    ),
    "Videos per test prompt.": ("테스트 프롬프트당 비디오 수.", "每个测试提示词的视频数。"),
    "Stop after this many evaluations without a better validation reward; 0 = never.": (
        "검증 보상이 나아지지 않은 평가가 이만큼 이어지면 멈춥니다. 0 = 멈추지 않음.",
        "连续这么多次评估验证奖励没有提高就停止；0 = 从不。",
    ),
    "First sampling step that may be stochastic, 0 to steps - 1. Both -1 = the first half of the steps.": (
        "확률적일 수 있는 첫 샘플링 스텝, 0~스텝 - 1. 둘 다 -1 = 스텝의 앞 절반.",
        "可以随机的第一个采样步，0 至 步数 - 1。两者都为 -1 = 步数的前一半。",
    ),
    "Step behind the last that may be stochastic, 0 to steps - 1. Both -1 = the first half of the steps.": (
        "확률적일 수 있는 마지막 스텝의 다음 스텝, 0~스텝 - 1. 둘 다 -1 = 스텝의 앞 절반.",
        "最后一个可以随机的步之后的那一步，0 至 步数 - 1。两者都为 -1 = 步数的前一半。",
    ),
    "Normaliser of the temporal gradient rectification 1/lambda: pool (mean over the window), update (mean over the update, paper), none (weights 1).": (
        "시간 그래디언트 보정 1/lambda의 정규화: pool(구간 평균), update(업데이트 평균, 논문), none(가중치 1).",
        "时间梯度校正 1/lambda 的归一化：pool（窗口平均）、update（更新内平均，论文）、none（权重为 1）。",
    ),
    "Gradient clip norm; 0 = 0.003 * sqrt(2.1e6 / D), D the latent elements of one video (none with loss.algorithm = nft).": (
        "그래디언트 클리핑 노름. 0 = 0.003 * sqrt(2.1e6 / D), D는 비디오 하나의 잠재 원소 수(loss.algorithm = nft이면 없음).",
        "梯度裁剪范数；0 = 0.003 * sqrt(2.1e6 / D)，D 为一个视频的潜变量元素数（loss.algorithm = nft 时不裁剪）。",
    ),
    "AdamW weight decay.": ("AdamW 가중치 감쇠.", "AdamW 权重衰减。"),
    "Decay of the exponential moving average of the LoRA, per optimizer step; 0 = off.": (
        "LoRA 지수 이동 평균의 감쇠, 옵티마이저 스텝당. 0 = 끔.",
        "LoRA 指数移动平均的衰减，按优化器步计；0 = 关闭。",
    ),
    "Optimizer steps per rollout batch; above 1 the later ones are off-policy.": (
        "롤아웃 묶음당 옵티마이저 스텝 수. 1보다 크면 나중 스텝은 오프폴리시입니다.",
        "每批 rollout 的优化器步数；大于 1 时后面的步是离策略的。",
    ),
    "Which weights are judged and exported: ema or live.": (
        "평가하고 내보낼 가중치: ema 또는 live.",
        "评判和导出哪种权重：ema 或 live。",
    ),
    "Iterations between checkpoints that are kept; the newest is always kept.": (
        "보관하는 체크포인트 사이의 반복 수. 최신 것은 항상 보관합니다.",
        "保留的检查点之间的迭代数；最新的始终保留。",
    ),
    "Checkpoints kept besides the best one.": (
        "가장 좋은 것 외에 보관하는 체크포인트 수.",
        "除最好的之外保留的检查点数。",
    ),
    "Recompute activations in the backward pass: less memory, about a third more time.": (
        "역전파에서 활성값을 다시 계산합니다: 메모리는 줄고 시간은 3분의 1쯤 늘어납니다.",
        "在反向传播中重新计算激活值：更省内存，时间约多三分之一。",
    ),
    "The policy that sampled the rollouts.": (
        "롤아웃을 샘플링한 정책.",
        "采样这些 rollout 的策略。",
    ),
    "Scored rollouts of this policy.": ("이 정책의 채점된 롤아웃.", "该策略已评分的 rollout。"),
    "Model and card: sets everything below that is 0, and how many videos go through the model together.": (
        "모델과 그래픽 카드: 아래에서 0인 모든 값과, 함께 처리할 비디오 수를 정합니다.",
        "模型与显卡：设定下面所有为 0 的值，以及一起通过模型的视频数。",
    ),
    "Video width in pixels, a multiple of 16.": (
        "비디오 너비(픽셀), 16의 배수.",
        "视频宽度（像素），16 的倍数。",
    ),
    "Video height in pixels, a multiple of 16.": (
        "비디오 높이(픽셀), 16의 배수.",
        "视频高度（像素），16 的倍数。",
    ),
    "Number of frames, 4n+1.": ("프레임 수, 4n+1.", "帧数，4n+1。"),
    "Frames per second of the written videos.": (
        "저장되는 비디오의 초당 프레임.",
        "写出视频的每秒帧数。",
    ),
    "Denoising steps of a rollout.": ("롤아웃의 디노이징 스텝 수.", "一次 rollout 的去噪步数。"),
    "Flow shift; 0 = 5.0 from 720p (921,600 pixels a frame) on, else 3.0. Train with the shift you sample with.": (
        "플로 시프트. 0 = 720p(프레임당 921,600픽셀)부터 5.0, 그 밖에는 3.0. 샘플링할 시프트로 학습하세요.",
        "流偏移；0 = 720p（每帧 921,600 像素）起为 5.0，否则 3.0。请用采样时的偏移训练。",
    ),
    "Classifier-free guidance; 1 = none (half the cost).": (
        "분류기 없는 가이던스. 1 = 없음(비용 절반).",
        "无分类器引导；1 = 不使用（成本减半）。",
    ),
    "Videos of one group that go through the transformer together.": (
        "트랜스포머를 함께 통과하는 한 그룹의 비디오 수.",
        "同一组中一起通过 transformer 的视频数。",
    ),
    "Videos decoded and scored together.": (
        "함께 디코딩하고 채점하는 비디오 수.",
        "一起解码和评分的视频数。",
    ),
    # outputs
    "The mp4 file; it lies in `output/flashgrpo/compare`.": (
        "mp4 파일. `output/flashgrpo/compare`에 있습니다.",
        "mp4 文件，位于 `output/flashgrpo/compare`。",
    ),
    "For positive or negative of KSampler.": (
        "KSampler의 positive 또는 negative에 연결합니다.",
        "连接到 KSampler 的 positive 或 negative。",
    ),
    "The chain of frozen LoRAs for Load Wan Policy or Compare.": (
        "Wan 정책 불러오기나 비교에 연결할 고정 LoRA들.",
        "用于加载 Wan 策略或对比的一串冻结 LoRA。",
    ),
    "The groups, for Rollout Sampler.": (
        "롤아웃 샘플러에 연결할 그룹.",
        "分组，用于 Rollout 采样器。",
    ),
    "Which prompt is stochastic at which sigma.": (
        "어느 프롬프트가 어느 시그마에서 확률적인지.",
        "哪个提示词在哪个 sigma 处随机。",
    ),
    "The policy of the run at its newest iteration on disk.": (
        "디스크에 있는 최신 반복의 정책.",
        "该运行在磁盘上最新一次迭代的策略。",
    ),
    "The run, for Compare.": ("비교에 연결할 실행.", "运行，用于对比。"),
    "Its best exported LoRA, else its newest weights.": (
        "내보낸 가장 좋은 LoRA, 없으면 최신 가중치.",
        "导出的最好的 LoRA，没有则为最新权重。",
    ),
    "The reward curve as a picture.": ("그림으로 된 보상 곡선.", "奖励曲线图片。"),
    "The videos of the newest evaluation.": ("최신 평가의 비디오.", "最新一次评估的视频。"),
    "Training, validation and test prompts, and how they are encoded.": (
        "학습, 검증, 테스트 프롬프트와 인코딩 방법.",
        "训练、验证和测试提示词，以及编码方式。",
    ),
    "The reward. Link it to *previous* of another reward node to mix both, to Train, to Score Rollouts or to Compare.": (
        "보상. 다른 보상 노드의 *이전*에 연결하면 섞이고, 학습, 롤아웃 채점, 비교에 연결할 수 있습니다.",
        "奖励。连接到另一个奖励节点的 *前一个* 可混合两者，也可连接到训练、为 Rollout 评分或对比。",
    ),
    "Latents and recorded noise, for Score Rollouts.": (
        "롤아웃 채점에 연결할 잠재값과 기록된 노이즈.",
        "潜变量和记录的噪声，用于为 Rollout 评分。",
    ),
    "The videos as mp4 files, one after the other.": (
        "mp4 파일로 된 비디오들, 차례대로.",
        "mp4 文件形式的视频，依次输出。",
    ),
    "One frame of each video; one row per group.": (
        "비디오마다 한 프레임, 그룹마다 한 줄.",
        "每个视频一帧；每组一行。",
    ),
    "The name as LoraLoader lists it.": (
        "LoraLoader 목록에 나타나는 이름.",
        "LoraLoader 中列出的名称。",
    ),
    "Rewards and advantages, for Train Step.": (
        "학습 단계에 연결할 보상과 어드밴티지.",
        "奖励与优势，用于训练步。",
    ),
    "The videos of each group sorted by reward, with rewards, spread and advantages.": (
        "보상순으로 정렬한 각 그룹의 비디오와 보상, 편차, 어드밴티지.",
        "各组视频按奖励排序，附奖励、离散度和优势。",
    ),
    "The trained LoRA (of the high-noise or only expert), for Save LoRA, LoraModelLoader and SaveLoRA.": (
        "학습된 LoRA(고노이즈 또는 유일한 전문가 모델). LoRA 저장, LoraModelLoader, SaveLoRA에 연결합니다.",
        "训练好的 LoRA（高噪声或唯一的专家），用于保存 LoRA、LoraModelLoader 和 SaveLoRA。",
    ),
    "The LoRA of the low-noise expert; nothing comes out when there is none.": (
        "저노이즈 전문가 모델의 LoRA. 없으면 아무것도 나오지 않습니다.",
        "低噪声专家的 LoRA；没有时不输出。",
    ),
    "Settings for Train.": ("학습에 연결할 설정.", "用于训练的设置。"),
    "The policy one iteration further, for Save LoRA or Compare.": (
        "한 반복 더 나아간 정책. LoRA 저장이나 비교에 연결합니다.",
        "前进一次迭代的策略，用于保存 LoRA 或对比。",
    ),
    "The step count and the numbers of this step.": (
        "스텝 수와 이 단계의 수치.",
        "步数以及这一步的各项数值。",
    ),
    "Settings for Iso-Temporal Groups, Train and Compare.": (
        "등시점 그룹, 학습, 비교에 연결할 설정.",
        "用于同时刻分组、训练和对比的设置。",
    ),
    # the monitor
    "The reward curve appears here while this node trains.": (
        "이 노드가 학습하는 동안 보상 곡선이 여기에 나타납니다.",
        "此节点训练时，奖励曲线会显示在这里。",
    ),
    "Link a policy with a run name to see its training here.": (
        "실행 이름이 있는 정책을 연결하면 학습 과정이 여기에 보입니다.",
        "连接带有运行名称的策略，即可在这里看到训练。",
    ),
    "No answer from the server, trying again.": (
        "서버가 응답하지 않아 다시 시도합니다.",
        "服务器没有响应，正在重试。",
    ),
    "training": ("학습 중", "训练中"),
    "stopped, can be resumed": ("멈춤, 이어서 할 수 있음", "已停止，可以继续"),
    "finished": ("완료", "已完成"),
    "failed": ("실패", "失败"),
    "iteration": ("반복", "迭代"),
    "about {time} left": ("약 {time} 남음", "大约还剩 {time}"),
    "Finish now": ("지금 마치기", "立即结束"),
    "Stop after this iteration, judge the result and return the LoRA.": (
        "이번 반복 뒤에 멈추고, 결과를 평가해 LoRA를 돌려줍니다.",
        "在本次迭代后停止，评判结果并返回 LoRA。",
    ),
    "Finishing after this iteration": ("이번 반복 뒤에 마칩니다", "将在本次迭代后结束"),
    "The run is not training here any more.": (
        "이 실행은 더는 여기서 학습하지 않습니다.",
        "该运行已不在这里训练。",
    ),
    "training reward": ("학습 보상", "训练奖励"),
    "validation (95 %)": ("검증 (95 %)", "验证 (95 %)"),
    "before training": ("학습 전", "训练前"),
    "newest video": ("최신 비디오", "最新视频"),
    "h": ("시간", "小时"),
    "min": ("분", "分钟"),
    "s": ("초", "秒"),
    "loading the model": ("모델 불러오는 중", "正在加载模型"),
    "encoding prompts": ("프롬프트 인코딩 중", "正在编码提示词"),
    "sampling videos": ("비디오 샘플링 중", "正在采样视频"),
    "decoding videos": ("비디오 디코딩 중", "正在解码视频"),
    "scoring videos": ("비디오 채점 중", "正在为视频评分"),
    "updating the LoRA": ("LoRA 갱신 중", "正在更新 LoRA"),
    "judging on held-out prompts": ("빼 둔 프롬프트로 평가 중", "正在用留出的提示词评判"),
    "saving": ("저장 중", "正在保存"),
    "The name of the low-noise expert's LoRA, for a policy with two experts.": (
        "저노이즈 전문가 LoRA의 이름. 전문가가 둘인 정책용.",
        "低噪声专家 LoRA 的名称，用于有两个专家的策略。",
    ),
    "waiting for a worker": ("워커를 기다리는 중", "正在等待工作进程"),
}

TEXTS |= reward_translations.TEXTS | expert_translations.TEXTS | memory_translations.TEXTS
