"""The report: complete, self-contained, honest about what was judged, safe to open."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgrpo_core.config_io import build_config
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.runs.charts import (
    MAX_POINTS,
    Series,
    legend,
    line_chart,
    log_ticks,
    nice_ticks,
    number,
    share_bar,
    thin_out,
)
from flashgrpo_core.runs.events import EventLog, RewardLog
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.runs.report import headline_evaluation, read_run, write_report
from flashgrpo_core.runs.report_charts import running_mean, student
from flashgrpo_core.runs.report_videos import MAX_PAIRS, choose
from flashgrpo_core.video import write_mp4

PROMPTS = [
    "a red ball moves right",
    'a blue square moves up, <b>bold</b> & "quoted"',
    "ein grüner Kreis – schnell",
    "一个黄色的球向左移动",
]
SIGMAS = ["0.9643", "0.9231", "0.8750", "0.8182", "0.7500"]


def blob(hue: int, speed: float, noise: float) -> np.ndarray:
    """A moving blob, uint8 [9, 64, 64, 3]."""
    rng = np.random.default_rng(hue)
    y, x = np.mgrid[:64, :64]
    frames = []
    for t in range(9):
        glow = np.exp(-((x - 12 - speed * 5 * t) ** 2 + (y - 32) ** 2) / 90)[..., None]
        color = np.array([[240, 70, 60], [60, 110, 240], [60, 200, 90], [235, 200, 50]][hue % 4])
        frames.append(28 + glow * (color - 28) + rng.normal(0, noise, (64, 64, 1)))
    return np.clip(np.stack(frames), 0, 255).astype(np.uint8)


def make_run(
    output: Path, iterations: int = 60, finished: bool = True, name: str = "motion-boost"
) -> RunFolder:
    """A run folder as the trainer leaves it, with curves like those of a real run."""
    rng = np.random.default_rng(3)
    run = RunFolder(output, name)
    run.create(
        build_config(
            {
                "model": {"transformer": "tiny", "lora_rank": 32},
                "optim": {"learning_rate": 2e-4},
                "reward": {
                    "terms": [
                        {"name": "tiny_world", "weight": 1.0},
                        {"name": "motion", "weight": 0.5},
                    ]
                },
                "run": {"name": name, "iterations": iterations},
            }
        )
    )
    log, rewards = EventLog(run.events), RewardLog(run.rewards)
    log.append(
        "run_started",
        0,
        schema=1,
        versions={"flashgrpo": "0.1.0", "torch": "2.14.1"},
        device="cuda:0",
        world_size=2,
    )
    forwards = 0

    def evaluation(split: str, at: int, base: float, gain: float, half: float) -> None:
        terms = {"tiny_world": base * 0.7 + gain, "motion": base * 0.6 + gain / 2}
        log.append(
            "evaluation",
            at,
            split=split,
            weights="ema",
            reward_mean=base + gain,
            baseline_mean=base,
            difference=gain,
            ci_low=gain - half if at else 0.0,
            ci_high=gain + half if at else 0.0,
            prompts=12,
            seeds=2,
            terms=terms,
        )

    evaluation("validation", 0, 0.61, 0.0, 0.0)
    for i in range(1, iterations + 1):
        level = 0.52 + 0.25 * (1 - math.exp(-i / 22))
        rows = []
        for g in range(6):
            middle = level + rng.normal(0, 0.05)
            for s in range(8):
                rows.append(
                    {
                        "group_id": f"{i}-{g}-0",
                        "prompt": PROMPTS[g % 4],
                        "sample": s,
                        "sde_step": g % 5,
                        "sigma": float(SIGMAS[g % 5]),
                        "total": middle + rng.normal(0, 0.03),
                        "terms": {"tiny_world": middle * 0.7, "motion": middle * 0.6},
                        "advantage": rng.normal(),
                        "valid": True,
                    }
                )
        rewards.append(i, rows)
        forwards += 6 * 8 * 8 + 18
        for phase, seconds in (("rollout", 3.1), ("score", 0.8), ("update", 1.4), ("save", 0.1)):
            log.append("phase", i, name=phase, seconds=seconds * rng.uniform(0.9, 1.2))
        log.append(
            "iteration",
            i,
            reward={
                "mean": float(np.mean([r["total"] for r in rows])),
                "std": float(np.std([r["total"] for r in rows])),
                "terms": {
                    "tiny_world": float(np.mean([r["terms"]["tiny_world"] for r in rows])),
                    "motion": float(np.mean([r["terms"]["motion"] for r in rows])),
                },
            },
            advantage_std=0.03,
            zero_variance_groups=int(rng.random() < 0.08),
            loss=-0.01,
            grad_norm=2.1e-4 * math.exp(rng.normal(0, 0.25)),
            grad_norm_by_sigma={
                s: {
                    "raw": 1e-4 * (1 + k * 0.35) * math.exp(rng.normal(0, 0.3)),
                    "rectified": 1.9e-4 * math.exp(rng.normal(0, 0.3)),
                }
                for k, s in enumerate(SIGMAS)
            },
            ratio_drift=0.0 if i % 3 else 2e-7 * math.exp(rng.normal(0, 0.5)),
            clip_fraction=0.0,
            kl=1e-6 * i,
            lr=2e-4 * min(1, i / 5),
            forwards_total=forwards,
            seconds=5.4 * rng.uniform(0.9, 1.2),
        )
        if i % 10 == 0:
            evaluation("validation", i, 0.61, 0.19 * (1 - math.exp(-i / 25)), 0.045)
            log.append("phase", i, name="evaluate", seconds=4.0)
    log.append(
        "warning",
        12,
        code="ratio_drift",
        message="the ratio drifts by 2.0e-03: raise loss.clip to 1e-2",
    )
    log.append(
        "warning",
        14,
        code="ratio_drift",
        message="the ratio drifts by 2.1e-03: raise loss.clip to 1e-2",
    )
    if finished:
        evaluation("test", 50, 0.592, 0.154, 0.041)
        for number_, prompt in enumerate(PROMPTS):
            file = f"test_{number_:03d}_0.mp4"
            write_mp4(run.samples / "base" / file, blob(number_, 0.4, 22), 8)
            write_mp4(run.samples / "000050" / file, blob(number_, 1.0, 3), 8)
            run.add_samples(
                [
                    {
                        "iteration": 50,
                        "split": "test",
                        "prompt": prompt,
                        "seed": 0,
                        "file": f"000050/{file}",
                        "reward": 0.6 + 0.05 * number_,
                        "baseline_file": f"base/{file}",
                        "baseline_reward": 0.55 + 0.02 * number_,
                    }
                ]
            )
        log.append(
            "run_finished",
            iterations,
            status="finished",
            lora=[f"{name}_000050.safetensors"],
            best_iteration=50,
        )
    return run


class Tags(HTMLParser):
    """Checks that tags nest, and collects them."""

    VOID = {"meta", "br", "img", "circle", "path"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        assert self.open and self.open[-1] == tag, (tag, self.open[-4:])
        self.open.pop()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    run = make_run(tmp_path_factory.mktemp("output ü"))
    return run, write_report(run.path).read_text(encoding="utf-8")


def test_the_headline_is_the_final_test_with_its_interval(finished: tuple[RunFolder, str]) -> None:
    _, page = finished
    assert '<p class="big up">+0.154</p>' in page
    assert "Better than the start" in page and "+0.113 to +0.195" in page
    assert "averaged (EMA) weights of iteration 50" in page and "0.592 → 0.746" in page


def test_every_section_is_there(finished: tuple[RunFolder, str]) -> None:
    _, page = finished
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Reward",
        "Before and after",
        "Final test",
        "Reward terms",
        "Health",
        "Gradient by noise level",
        "Time",
        "Settings",
    ]
    for words in (
        "raise loss.clip to 1e-2",
        "2 iterations, last 14",
        "motion-boost_000050.safetensors",
        "cuda:0 × 2",
        "2,880",  # 60 iterations of 48 videos
        "clip range 0.001",
        "start on validation prompts 0.610",
        "Ratio drift",
        "KL to the reference policy",
    ):
        assert words in page, words
    assert re.search(r'<tr class="set"><th>lora_rank</th><td>32</td></tr>', page)
    assert re.search(r"<tr><th>group_size</th><td>8</td></tr>", page)


def test_the_page_is_well_formed_and_reaches_for_nothing(finished: tuple[RunFolder, str]) -> None:
    _, page = finished
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "link", "iframe", "img", "object", "embed", "base", "form"}
    for tag, attributes in tags.seen:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href"):
            value = attributes.get(name) or ""
            assert value == "" or value.startswith("data:video/mp4;base64,"), value[:60]
    assert (
        "url(" not in page
        and "@import" not in page
        and "http" not in page.replace("http-equiv", "")
    )


def test_before_and_after_videos_are_embedded_with_prompt_and_rewards(
    finished: tuple[RunFolder, str],
) -> None:
    run, page = finished
    videos = re.findall(r"<video ([^>]*)>", page)
    assert len(videos) == 8
    assert all("autoplay loop muted playsinline" in video for video in videos)
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; &quot;quoted&quot;" in page and "<b>bold</b>" not in page
    assert "一个黄色的球向左移动" in page
    import base64

    raw = (run.samples / "base" / "test_000_0.mp4").read_bytes()
    assert base64.b64encode(raw).decode() in page
    assert "<b>0.750</b>" in page and '<b class="up">+0.140</b>' in page


def test_charts_are_valid_svg_inside_their_frame(finished: tuple[RunFolder, str]) -> None:
    _, page = finished
    charts = re.findall(r"<svg .*?</svg>", page, re.S)
    assert len(charts) >= 12
    for chart in charts:
        root = ET.fromstring(chart)  # noqa: S314 - our own output
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for circle in root.iter("circle"):
            assert 0 <= float(circle.attrib["cx"]) <= width
            assert 0 <= float(circle.attrib["cy"]) <= height
        assert "nan" not in chart.lower() and "inf" not in chart


def test_same_folder_same_page(finished: tuple[RunFolder, str]) -> None:
    run, page = finished
    assert write_report(run).read_text(encoding="utf-8") == page


def test_an_empty_and_an_unfinished_run_have_a_report_too(tmp_path: Path) -> None:
    empty = RunFolder(tmp_path, "empty")
    empty.create(build_config({"model": {"transformer": "tiny"}}))
    page = write_report(empty.path).read_text(encoding="utf-8")
    assert "Not judged yet" in page and "unfinished" in page and "<h2>Settings</h2>" in page
    half = make_run(tmp_path, iterations=5, finished=False, name="half")
    page = write_report(half.path).read_text(encoding="utf-8")
    assert "Not judged yet" in page and "iteration 5" in page
    with pytest.raises(FlashGRPOError, match="no run"):
        write_report(tmp_path / "flashgrpo" / "runs" / "missing")


def test_a_loss_and_no_change_are_called_by_name(tmp_path: Path) -> None:
    for low, high, words, tone in (
        (-0.3, -0.1, "Worse than the start", "down"),
        (-0.1, 0.1, "No clear change", "flat"),
        (None, None, "No clear change", "flat"),
    ):
        run = RunFolder(tmp_path, f"r{words[0]}{low is None}")
        run.create(build_config({"model": {"transformer": "tiny"}}))
        EventLog(run.events).append(
            "evaluation",
            7,
            split="validation",
            weights="ema",
            reward_mean=0.4,
            baseline_mean=0.6,
            difference=-0.2,
            ci_low=low,
            ci_high=high,
            prompts=8,
            seeds=2,
            terms={},
        )
        page = write_report(run).read_text(encoding="utf-8")
        assert words in page and f'class="big {tone}"' in page and "−0.200" in page
        assert "held-out validation prompts" in page


def test_a_missing_or_escaping_video_is_said_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path, iterations=3)
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(b"secret bytes")
    rows = run.read_samples()
    rows[0]["file"], rows[1]["file"] = "../../../../secret.mp4", str(secret)
    run.add_samples(rows)
    (run.samples / "base" / "test_002_0.mp4").unlink()
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("The video file is missing.") == 3
    assert "c2VjcmV0" not in page


def test_the_iteration_after_a_resume_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, iterations=3, finished=False)
    log = EventLog(run.events)
    log.append("run_started", 2, schema=1, device="cpu", world_size=1)
    log.append("iteration", 3, reward={"mean": 0.9, "std": 0.1, "terms": {}}, forwards_total=77_777)
    data = read_run(run)
    assert [i["iteration"] for i in data.iterations] == [1, 2, 3]
    page = write_report(run).read_text(encoding="utf-8")
    assert "77,777" in page and "Resumed" in page


def test_the_headline_prefers_the_test_and_the_configured_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path, iterations=10, finished=False)
    data = read_run(run)
    judged = headline_evaluation(data)
    assert judged is not None and (judged["split"], judged["iteration"]) == ("validation", 10)
    EventLog(run.events).append(
        "evaluation", 10, split="validation", weights="live", difference=9.0
    )
    judged = headline_evaluation(read_run(run))
    assert judged is not None and judged["weights"] == "ema"


def test_shown_videos_are_spread_and_never_picked_by_reward() -> None:
    rows = [
        {
            "iteration": 4,
            "split": "test",
            "prompt": i,
            "file": "a",
            "baseline_file": "b",
            "reward": -i,
        }
        for i in range(40)
    ]
    chosen, iteration, split = choose(rows, None)
    assert len(chosen) == MAX_PAIRS and (iteration, split) == (4, "test")
    assert [r["prompt"] for r in chosen] == [i * 40 // MAX_PAIRS for i in range(MAX_PAIRS)]


@given(
    st.lists(
        st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
        min_size=1,
        max_size=30,
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_numbers_give_valid_svg(values: list[float | None], log: bool) -> None:
    chart = line_chart([Series("a", list(range(len(values))), values)], log=log)
    root = ET.fromstring(chart)  # noqa: S314
    assert root.tag in ("svg", "p")
    assert "nan" not in chart.replace("finance", "") and ">inf" not in chart


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.154, "0.154"),
        (-0.2, "−0.200"),
        (0, "0"),
        (12345.6, "12,346"),
        (2.1e-4, "2.1e−4"),
        (3.2e9, "3.2e9"),
        (99.95, "100.0"),
        (0.08, "0.080"),
        (0.00123, "0.00123"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers_read_well(value: float | None, text: str) -> None:
    assert number(value) == text


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0.52, 0.81, 4) == [0.6, 0.7, 0.8]
    assert nice_ticks(0, 60, 6) == [0, 10, 20, 30, 40, 50, 60]
    assert all(repr(t) == f"{t:.10g}" or t == round(t, 6) for t in nice_ticks(0.1, 0.7, 6))
    assert log_ticks(1e-7, 1e-3) == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
    assert log_ticks(1e-4, 3e-4) == pytest.approx([1e-4, 2e-4]) or len(log_ticks(1e-4, 3e-4)) >= 2


def test_long_curves_are_averaged_not_dropped() -> None:
    xs = list(range(10_000))
    thin = thin_out(
        Series(
            "a", xs, [float(x) for x in xs], low=[x - 1.0 for x in xs], high=[x + 1.0 for x in xs]
        )
    )
    assert len(thin.xs) == MAX_POINTS == len(thin.low)
    assert thin.ys == pytest.approx(list(thin.xs)) and thin.high[0] == pytest.approx(thin.ys[0] + 1)


def test_running_mean_keeps_lines_and_gaps() -> None:
    assert running_mean([float(i) for i in range(50)]) == pytest.approx(
        [float(i) for i in range(50)]
    )
    assert running_mean([1.0, None, 3.0])[1] is None


def test_student_quantiles() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 5: 2.5706, 9: 2.2622, 30: 2.0423, 200: 1.9719}
    for freedom, quantile in table.items():
        assert student(freedom) == pytest.approx(quantile, rel=0.01)


def test_share_bar_and_legend() -> None:
    bar = share_bar([("rollout", 3.0, "3 s"), ("up<date", 1.0, "1 s")])
    assert "width:75.000%" in bar and "up&lt;date" in bar and "25.0 %" in bar
    assert "No data" in share_bar([])
    assert legend([Series("a", [], [])]) == ""
    assert legend([Series("a", [], []), Series("b", [], [], 2)]).count("<span><i") == 2


def test_a_narrow_logarithmic_range_has_ticks() -> None:
    """A gradient norm that hardly changes ended a whole run while its report was drawn."""
    from flashgrpo_core.runs.charts import Series, line_chart, log_ticks

    ticks = log_ticks(0.0061, 0.0089)
    assert ticks and all(0.0061 <= tick <= 0.0089 for tick in ticks)
    assert line_chart([Series("", [1, 2], [0.0062, 0.0088], 1)], log=True).startswith("<svg")
