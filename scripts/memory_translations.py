"""Korean and Chinese texts of the settings that save memory and time."""

from __future__ import annotations

TEXTS: dict[str, tuple[str, str]] = {
    "Plan": ("메모리 계획", "显存规划"),
    "plan": ("계획", "规划"),
    "Predicts the memory of every phase of a run from the sizes of its files, which cards hold it, and what to change when yours does not. Nothing is loaded.": (
        "파일의 크기로 실행의 각 단계에 필요한 메모리를 예측하고, 어느 그래픽 카드에 들어가는지, 들어가지 않으면 무엇을 바꿀지 알려 줍니다. 아무것도 불러오지 않습니다.",
        "根据文件大小预测一次运行每个阶段的显存、哪些显卡放得下，以及放不下时该改什么。不会加载任何模型。",
    ),
    "The model that would be trained.": ("학습할 모델.", "将要训练的模型。"),
    "Memory of the card in GB; 0 = all usual ones, 12 to 80.": (
        "카드 메모리(GB). 0 = 흔한 것 모두(12~80).",
        "显卡显存（GB）；0 = 常见的全部（12 至 80）。",
    ),
    "card": ("카드", "显卡"),
    "The tables as text, also shown on the node.": (
        "텍스트로 된 표. 노드에도 표시됩니다.",
        "文本形式的表格，也显示在节点上。",
    ),
    "cache threshold": ("단계 캐시 임곗값", "步缓存阈值"),
    "guidance batched": ("가이던스 일괄 계산", "引导合并计算"),
    "KL on drop": ("하락 시 KL", "下降时的 KL"),
    "blocks to keep": ("활성값을 남길 블록", "保留激活的块数"),
    "VAE tile": ("VAE 타일", "VAE 分块"),
    "optimizer": ("최적화기", "优化器"),
    "Step caching of the steps after the stochastic one: a step whose first block changes by less than this share since the last full step skips the other blocks. 0 = off; 0.05 to 0.2 are usual: cheaper videos, an approximate reward, an unchanged gradient.": (
        "확률적 단계 이후의 단계 캐싱입니다. 마지막 전체 단계 이후 첫 블록의 변화가 이 비율보다 작은 단계는 나머지 블록을 건너뜁니다. 0 = 끔, 보통 0.05~0.2입니다. 비디오는 싸지고 보상은 근사치가 되며 기울기는 그대로입니다.",
        "随机步之后各步的缓存：首块自上次完整步以来的变化小于此比例的步会跳过其余块。0 = 关闭，常用 0.05 至 0.2：视频更便宜，奖励为近似值，梯度不变。",
    ),
    "Both halves of guidance in one forward (batched: more memory, faster for small videos) or one after the other (sequential); auto batches forwards of up to 4096 tokens.": (
        "가이던스의 두 절반을 한 번에 계산하거나(batched: 메모리를 더 쓰고 작은 비디오에서 빠름) 차례로 계산합니다(sequential). auto는 토큰 4096개까지 한 번에 계산합니다.",
        "引导的两半在一次前向中计算（batched：占用更多内存，小视频更快）或依次计算（sequential）；auto 对不超过 4096 个 token 的前向合并计算。",
    ),
    "Weight of the KL divergence from when the validation reward first falls below its best by more than its interval; 0 = never.": (
        "검증 보상이 처음으로 최고치보다 그 구간 이상 떨어진 때부터의 KL 발산 가중치입니다. 0 = 사용 안 함.",
        "自验证奖励首次比最佳值低出其区间起 KL 散度的权重；0 = 从不。",
    ),
    "With gradient_checkpointing, transformer blocks, from the last, whose activations are kept and not recomputed: less time, more memory.": (
        "gradient_checkpointing을 쓸 때 마지막부터 세어 활성값을 남겨 다시 계산하지 않는 트랜스포머 블록 수입니다. 시간은 줄고 메모리는 늘어납니다.",
        "使用 gradient_checkpointing 时，从最后一块数起保留激活、不再重算的 Transformer 块数：时间更少，内存更多。",
    ),
    "Side in pixels of the overlapping tiles that the VAE decodes one by one, a multiple of 64; 0 = whole frames, which is exact. Try 256 when decoding runs out of memory.": (
        "VAE가 하나씩 디코딩하는 겹치는 타일의 한 변(픽셀), 64의 배수입니다. 0 = 전체 프레임(정확). 디코딩 중 메모리가 부족하면 256을 써 보십시오.",
        "VAE 逐个解码的重叠分块边长（像素），为 64 的倍数；0 = 整帧（精确）。解码内存不足时可试 256。",
    ),
    "adamw, or adamw8bit, which keeps AdamW's moments in 8 bits (a quarter of their memory, which matters for large ranks); it comes with pip install 'flashgrpo[adamw8bit]'.": (
        "adamw, 또는 AdamW의 모멘트를 8비트로 두는 adamw8bit(메모리 4분의 1, 랭크가 클 때 의미 있음). pip install 'flashgrpo[adamw8bit]'로 설치합니다.",
        "adamw，或以 8 位保存 AdamW 动量的 adamw8bit（内存为四分之一，秩较大时有意义）；通过 pip install 'flashgrpo[adamw8bit]' 安装。",
    ),
    "suffix share": ("나머지 단계 비율", "后段步数比例"),
    "Share of the steps after the stochastic one that is taken; below 1 a second-order solver takes them (DPM-Solver++ 2M): cheaper videos, an approximate reward, an unchanged gradient.": (
        "확률적 단계 이후의 단계 중 실제로 밟는 비율입니다. 1보다 작으면 2차 해법(DPM-Solver++ 2M)이 대신합니다. 비디오는 싸지고 보상은 근사치가 되며 기울기는 그대로입니다.",
        "随机步之后实际执行的步数比例；小于 1 时由二阶求解器（DPM-Solver++ 2M）执行：视频更便宜，奖励为近似值，梯度不变。",
    ),
    "storage": ("가중치 저장 방식", "权重存储"),
    "blocks to swap": ("교체할 블록", "换出的块数"),
    "How the weights of the blocks rest: fp8 keeps them in 8 bits (rounding 16-bit files row by row), full in the compute type; auto keeps fp8 files as they are on a GPU.": (
        "블록 가중치를 두는 방식입니다. fp8은 8비트로 두고(16비트 파일은 행 단위로 반올림), full은 계산 형식으로 둡니다. auto는 GPU에서 fp8 파일을 그대로 둡니다.",
        "块权重的存放方式：fp8 以 8 位存放（16 位文件逐行取整），full 以计算类型存放；auto 在 GPU 上保持 fp8 文件原样。",
    ),
    "Transformer blocks, from the last, whose weights rest in host memory and are copied to the GPU while they compute: less GPU memory, more time.": (
        "마지막부터 세어 가중치를 주 메모리에 두고 계산할 때만 GPU로 복사하는 트랜스포머 블록 수입니다. GPU 메모리는 줄고 시간은 늘어납니다.",
        "从最后一块数起，权重留在主机内存、计算时才复制到 GPU 的 Transformer 块数：显存更少，时间更长。",
    ),
}
