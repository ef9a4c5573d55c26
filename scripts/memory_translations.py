"""Korean and Chinese texts of the settings that save memory and time."""

from __future__ import annotations

TEXTS: dict[str, tuple[str, str]] = {
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
