"""Korean and Chinese texts of the nodes that compose rewards and rank videos; see translations.py."""

from __future__ import annotations

TEXTS: dict[str, tuple[str, str]] = {
    # names of nodes
    "Score Videos": ("비디오 채점", "视频评分"),
    "Reward: Gate": ("보상: 게이트", "奖励：门控"),
    "Reward: Limits": ("보상: 한계", "奖励：限幅"),
    "Reward: Win rate": ("보상: 승률", "奖励：胜率"),
    "Reward: Diversity": ("보상: 다양성", "奖励：多样性"),
    "Reward: Installed": ("보상: 설치된 패키지", "奖励：已安装的包"),
    "Reward: Naturalness": ("보상: 자연스러움", "奖励：自然度"),
    "Reward: Readable text": ("보상: 읽을 수 있는 글자", "奖励：可读文字"),
    # names of inputs and outputs
    "evaluation reward": ("평가 보상", "评估奖励"),
    "gate": ("게이트", "门控"),
    "passes": ("통과 조건", "通过条件"),
    "threshold": ("임계값", "阈值"),
    "otherwise": ("그 외의 값", "否则取值"),
    "low": ("하한", "下限"),
    "high": ("상한", "上限"),
    "scale": ("척도", "尺度"),
    "name": ("이름", "名称"),
    "options": ("옵션", "选项"),
    "blocks": ("블록", "块状网格"),
    "part": ("부분", "部分"),
    "every": ("프레임 간격", "帧间隔"),
    "folder": ("폴더", "文件夹"),
    "prompt": ("프롬프트", "提示词"),
    "max frames": ("최대 프레임 수", "最大帧数"),
    "scores": ("점수", "得分"),
    "best": ("최고 비디오", "最佳视频"),
    # descriptions
    "Rewards videos that are sharp, clean, well exposed, steady, not frozen and without a grid. 0 (unusable) .. 1 (no measurable fault); higher is better. Can be cheated by: hard edges and over-sharpening, flat cartoon-like surfaces (no noise), high contrast just short of clipping. Soft focus and grain that the prompt asks for are taken for faults.": (
        "선명하고 깨끗하며 노출이 알맞고 안정적이고 멈추지 않으며 격자가 없는 비디오에 보상합니다. 0(쓸 수 없음) .. 1(측정되는 결함 없음), 높을수록 좋습니다. 속임수: 날카로운 윤곽과 과한 샤프닝, 만화처럼 평평한 면(노이즈 없음), 클리핑 직전의 높은 대비. 프롬프트가 요구한 소프트 포커스와 그레인도 결함으로 봅니다.",
        "奖励清晰、干净、曝光良好、稳定、不静止且没有网格的视频。0（无法使用）至 1（测不出缺陷），越高越好。可能的作弊方式：生硬的边缘与过度锐化、卡通般的平面（无噪声）、接近溢出的高对比度。提示词要求的柔焦和颗粒也会被当作缺陷。",
    ),
    "Rewards frames with the statistics of photographs: no blur, noise or artefacts. 0 (nothing like a photograph) .. 1 (like a photograph); higher is better. Can be cheated by: fine texture everywhere. It punishes cartoons, flat graphics and shallow depth of field, which are no faults; switch it off for such looks.": (
        "사진의 통계를 가진 프레임에 보상합니다. 흐림, 노이즈, 압축 흔적이 없어야 합니다. 0(사진과 전혀 다름) .. 1(사진 같음), 높을수록 좋습니다. 속임수: 곳곳의 미세한 질감. 결함이 아닌 만화, 평면 그래픽, 얕은 심도도 깎으니 그런 화풍에는 쓰지 마세요.",
        "奖励具有照片统计特性的帧：无模糊、噪声或压缩痕迹。0（完全不像照片）至 1（像照片），越高越好。可能的作弊方式：到处都是细密纹理。卡通、平面图形和浅景深并非缺陷却会被扣分；这类风格请不要使用。",
    ),
    "Rewards videos that show the text in quotation marks of the prompt, readable. 0 (not the text) .. 1 (exactly the text); higher is better. Can be cheated by: large plain letters on a plain ground, like a subtitle, in every frame. Mix it with a quality reward.": (
        "프롬프트의 따옴표 안 글자가 읽을 수 있게 보이는 비디오에 보상합니다. 0(다른 글자) .. 1(똑같은 글자), 높을수록 좋습니다. 속임수: 모든 프레임에 자막처럼 단색 바탕의 크고 단순한 글자. 품질 보상과 섞으세요.",
        "奖励能清楚读出提示词引号中文字的视频。0（不是该文字）至 1（完全一致），越高越好。可能的作弊方式：每帧都像字幕一样，在纯色背景上放大而简单的字母。请与质量奖励混合使用。",
    ),
    "Rewards videos that differ from the others of their prompt. 0 (all alike) .. 1 (nothing in common); higher is better. Can be cheated by: random colours, empty or broken videos: whatever is unlike the rest. Give it a small weight, and a gate on quality.": (
        "같은 프롬프트의 다른 비디오와 다른 비디오에 보상합니다. 0(모두 같음) .. 1(공통점 없음), 높을수록 좋습니다. 속임수: 무작위 색, 비어 있거나 깨진 비디오처럼 나머지와 다르기만 한 것. 가중치를 작게 하고 품질 게이트를 거세요.",
        "奖励与同一提示词的其他视频不同的视频。0（全都一样）至 1（毫无共同点），越高越好。可能的作弊方式：随机颜色、空白或损坏的视频，只要与众不同即可。请给小权重，并加质量门控。",
    ),
    "A reward of your own: a class in a Python package that you have installed into ComfyUI's Python. docs/rewards.md shows one in 20 lines.": (
        "직접 만든 보상: ComfyUI의 Python에 설치한 패키지의 클래스. docs/rewards.md에 20줄짜리 예가 있습니다.",
        "您自己的奖励：安装到 ComfyUI 的 Python 中的包里的一个类。docs/rewards.md 中有一个 20 行的例子。",
    ),
    "Counts rewards only for videos that pass another reward; the others get a fixed value. Against rewards that broken videos can have.": (
        "다른 보상을 통과한 비디오에만 보상을 셉니다. 나머지는 고정값을 받습니다. 깨진 비디오도 얻을 수 있는 보상을 막습니다.",
        "只对通过另一奖励的视频计算奖励，其余的得到固定值。防止损坏的视频也能获得奖励。",
    ),
    "Limits the value of rewards, so that nothing is gained beyond it. Against rewards that can be driven without end.": (
        "보상의 값을 제한해 그 너머에서는 얻는 것이 없게 합니다. 끝없이 올릴 수 있는 보상을 막습니다.",
        "限制奖励的取值，超出部分不再有收益。防止奖励被无止境地推高。",
    ),
    "Replaces a reward by the share of the other videos of the prompt that a video beats. Only the order counts: a single extreme score decides nothing.": (
        "보상을, 같은 프롬프트의 다른 비디오 중 이긴 비율로 바꿉니다. 순서만 중요하며 극단적인 점수 하나가 결정하지 않습니다.",
        "将奖励替换为该视频胜过同一提示词其他视频的比例。只看次序：单个极端得分不起决定作用。",
    ),
    "Ranks videos by a reward, best first: linked videos, or those of a folder. No model is trained or needed beyond those of the reward.": (
        "비디오를 보상에 따라 좋은 것부터 순위를 매깁니다. 연결된 비디오나 폴더의 비디오가 대상입니다. 보상에 쓰이는 것 외에는 모델이 필요 없고 학습도 하지 않습니다.",
        "按奖励从好到差为视频排名：连接的视频或文件夹中的视频。除奖励自身的模型外不需要任何模型，也不训练。",
    ),
    # inputs
    "Further rewards, which stay as they are: a chain is a weighted mix.": (
        "그대로 두는 다른 보상. 연결하면 가중 혼합이 됩니다.",
        "其他保持不变的奖励：连成一串就是加权混合。",
    ),
    "The rewards that are counted behind the gate.": (
        "게이트를 통과해야 세는 보상.",
        "位于门控之后的奖励。",
    ),
    "The reward that decides; a single one.": (
        "판정하는 보상. 하나만.",
        "用来判定的奖励；只能一个。",
    ),
    "Whether a video passes with a gate reward above or below the threshold.": (
        "게이트 보상이 임계값보다 높을 때 통과할지 낮을 때 통과할지.",
        "门控奖励高于还是低于阈值时视频通过。",
    ),
    "Where the gate opens.": ("게이트가 열리는 값.", "门控打开的位置。"),
    "Value of the videos that do not pass.": (
        "통과하지 못한 비디오의 값.",
        "未通过的视频的取值。",
    ),
    "Another reward for judging the held-out prompts; without it the reward that is trained on.": (
        "빼 둔 프롬프트를 평가할 다른 보상. 없으면 학습하는 보상.",
        "用于评判留出提示词的另一个奖励；未连接则使用训练的奖励。",
    ),
    "The rewards that are limited.": ("제한할 보상.", "要限幅的奖励。"),
    "Lower values count as this one.": (
        "이보다 낮은 값은 이 값으로 셉니다.",
        "更低的值按此值计算。",
    ),
    "Higher values count as this one.": (
        "이보다 높은 값은 이 값으로 셉니다.",
        "更高的值按此值计算。",
    ),
    "The rewards that are compared, each on its own.": (
        "각각 따로 비교할 보상.",
        "要比较的奖励，各自单独比较。",
    ),
    "Distance of two videos that counts 0.63; smaller values see finer differences.": (
        "0.63으로 세는 두 비디오의 거리. 작을수록 미세한 차이를 봅니다.",
        "计为 0.63 的两视频距离；越小越能看出细微差别。",
    ),
    "Weight in the mix; negative punishes.": (
        "혼합에서의 가중치. 음수는 벌점.",
        "混合中的权重；负值表示惩罚。",
    ),
    "Rewards that installed packages offer (entry points of the group flashgrpo.rewards), read when ComfyUI starts.": (
        "설치된 패키지가 제공하는 보상(flashgrpo.rewards 그룹의 엔트리 포인트). ComfyUI를 시작할 때 읽습니다.",
        "已安装的包提供的奖励（flashgrpo.rewards 组的入口点），在 ComfyUI 启动时读取。",
    ),
    "Options of the reward, one a line: name = value, text in quotes (TOML).": (
        "보상의 옵션을 한 줄에 하나씩: 이름 = 값, 글자는 따옴표로(TOML).",
        "奖励的选项，每行一个：名称 = 值，文本加引号（TOML）。",
    ),
    "How much blocks costs; 0 ignores it.": (
        "블록 격자의 벌점. 0이면 무시합니다.",
        "块状网格扣多少分；0 表示忽略。",
    ),
    "What counts: the reward's total, or one of its parts alone. Chain the node twice for two parts with weights of their own.": (
        "무엇을 셀지: 보상의 전체 또는 한 부분만. 두 부분에 각각 가중치를 주려면 노드를 두 번 연결하세요.",
        "计算什么：奖励的总分，或其中一个部分。要让两个部分各有权重，请把该节点连接两次。",
    ),
    "How the scores of the frames become that of the video; top30 and bottom30 are the means of the best and the worst 30 percent, q25 is the quantile at 25 percent.": (
        "프레임 점수를 비디오 점수로 만드는 방법. top30과 bottom30은 가장 좋은 30퍼센트와 가장 나쁜 30퍼센트의 평균, q25는 25퍼센트 분위수.",
        "如何由各帧得分得到视频得分；top30 和 bottom30 分别是最好和最差 30% 的平均，q25 是 25% 分位数。",
    ),
    "Use every n-th frame, the first one always, 1 to 1024: larger is faster.": (
        "n번째 프레임마다 사용하며 첫 프레임은 항상 씁니다. 1~1024, 클수록 빠릅니다.",
        "每隔 n 帧取一帧，第一帧总是使用，1 至 1024：越大越快。",
    ),
    "Distance beyond that of photographs that brings the reward down to 0.37.": (
        "사진의 거리를 넘어 보상을 0.37로 낮추는 거리.",
        "超出照片距离多少时奖励降到 0.37。",
    ),
    "Text to ask for in every video; empty: the text in quotation marks of each prompt.": (
        "모든 비디오에 요구할 글자. 비우면 각 프롬프트의 따옴표 안 글자.",
        "每个视频中要求的文字；留空则使用各提示词引号中的文字。",
    ),
    "Smaller frames are enlarged to this short side first, 32 to 1024 pixels.": (
        "작은 프레임은 먼저 짧은 변을 이 크기로 키웁니다. 32~1024픽셀.",
        "较小的帧先放大到此短边，32 至 1024 像素。",
    ),
    "Videos to rank, one or a list of them.": (
        "순위를 매길 비디오. 하나 또는 목록.",
        "要排名的视频，一个或一组。",
    ),
    "Folder whose videos are ranked as well: input or output, or a folder in one of them. Empty: only the linked videos.": (
        "함께 순위를 매길 비디오의 폴더: input이나 output 또는 그 안의 폴더. 비우면 연결된 비디오만.",
        "其中视频也参与排名的文件夹：input 或 output，或其中的文件夹。留空则只排连接的视频。",
    ),
    "Prompt of all videos. In a folder, name.txt beside name.mp4 goes first. Videos of one prompt are a group.": (
        "모든 비디오의 프롬프트. 폴더에서는 name.mp4 옆의 name.txt가 우선합니다. 같은 프롬프트의 비디오가 한 그룹입니다.",
        "所有视频的提示词。在文件夹中，name.mp4 旁的 name.txt 优先。同一提示词的视频为一组。",
    ),
    "A score that is not finite: stop, or put the video last; auto puts it last when another process gives the scores.": (
        "유한하지 않은 점수: 멈추거나 그 비디오를 마지막에 둡니다. auto는 다른 프로세스가 점수를 줄 때 마지막에 둡니다.",
        "得分不是有限值时：停止，或把该视频排在最后；当得分由其他进程给出时，auto 会排在最后。",
    ),
    "Only the first frames of longer videos are scored, 1 to 100000.": (
        "더 긴 비디오는 앞의 프레임만 채점합니다. 1~100000.",
        "较长的视频只对前面的帧评分，1 至 100000。",
    ),
    # outputs
    "One frame of each video, best first, with total and terms.": (
        "각 비디오의 프레임 하나를 좋은 것부터, 합계와 항과 함께.",
        "每个视频的一帧，从好到差，附总分和各项。",
    ),
    "The numbers as text: one line a video, separated by tabs.": (
        "숫자를 글자로: 비디오마다 한 줄, 탭으로 구분.",
        "以文本给出的数值：每个视频一行，用制表符分隔。",
    ),
    "The best video, for SaveVideo.": ("최고 비디오. SaveVideo용.", "最佳视频，用于 SaveVideo。"),
}
