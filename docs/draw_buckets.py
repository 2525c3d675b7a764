"""Draws the figures of buckets.md as SVG, from a made-up trace with a fixed seed: python -m docs.draw_buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.svg import FAINT, INK, WIDTH, Svg
from llmc.buckets import exponential, padding_bounded, ramp_up
from llmc.buckets.demand import ServerModel
from llmc.buckets.planner import Limits, PhasePlan, plan
from llmc.buckets.trace import Trace

TOKEN, PADDING, PLANNED = "#2f6fb5", "#e8b9a0", "#1a7f5a"
LONGEST = 4096


def made_up_trace() -> Trace:
    """A chat-like mix: short questions, a cluster around a system prompt, and a long tail."""
    rng = np.random.default_rng(7)
    prompts = np.concatenate([rng.lognormal(5.6, 0.6, 3000), rng.normal(1100, 60, 2200), rng.lognormal(7.4, 0.5, 1500)])
    prompts = rng.permutation(np.clip(prompts, 8, LONGEST)).astype(np.int64)
    return Trace("made-up", np.arange(len(prompts), dtype=np.float64) * 0.3, prompts, np.full(len(prompts), 2))


def planned(trace: Trace, graphs: int) -> PhasePlan:
    return plan(trace, ServerModel(LONGEST), Limits(max_graphs=graphs), phases=("prefill",)).phases[0]


def draw_padding() -> Svg:
    """Five prompts in the smallest bucket that holds each."""
    title = "Buckets of 128, 256, 512 and 1024 tokens: each prompt runs in the smallest that holds it."
    svg = Svg(250, title, "Five prompts of 90 to 700 tokens as bars, each filled up with padding to its bucket.")
    scale, left = 0.5, 130
    svg.text(16, 24, title)
    buckets = (128, 256, 512, 1024)
    for row, length in enumerate((90, 128, 200, 410, 700)):
        bucket, y = next(b for b in buckets if b >= length), 44 + row * 34
        svg.text(left - 10, y + 17, f"{length} tokens", anchor="end")
        svg.rect(left, y, bucket * scale, 24, PADDING)
        svg.rect(left, y, length * scale, 24, TOKEN)
        svg.text(left + bucket * scale + 6, y + 17, f"{bucket}", FAINT, size=12)
    for x, color, name in ((left, TOKEN, "tokens of the prompt"), (left + 190, PADDING, "padding")):
        svg.rect(x, 222, 14, 14, color)
        svg.text(x + 20, 234, name, size=12)
    return svg


def draw_ladders(trace: Trace) -> Svg:
    """The same number of sizes, spread by rule and by plan, under the lengths of the trace."""
    title = "Where the sizes go: by rule, and by plan for the lengths that occur."
    description = (
        "A histogram of prompt lengths, and below it the bucket sizes of four ladders: those made by a rule are spread "
        "evenly or by powers, the planned ones lie where prompts are frequent and leave the least padding."
    )
    svg, left, right, base = Svg(396, title, description), 150, WIDTH - 20, 150
    scale = (right - left) / LONGEST
    counts, edges = np.histogram(trace.prompt_tokens, bins=128, range=(0, LONGEST))
    svg.text(16, 24, title)
    svg.text(left - 10, base - 4, "prompts", FAINT, "end", 12)
    for count, edge in zip(counts, edges, strict=False):
        height = float(count) / float(counts.max()) * 105
        svg.rect(left + edge * scale, base - height, 4096 / 128 * scale - 0.6, height, FAINT)
    step = -(-LONGEST // 12)
    ladders = [
        ("ramp-up", ramp_up(step, step, LONGEST), INK),
        ("exponential", exponential(128, LONGEST, 32, 12), INK),
        ("padding ≤ 25 %", padding_bounded(128, 32, LONGEST, 25), INK),
        ("planned", tuple(b.seq for b in planned(trace, 12).buckets), PLANNED),
    ]
    prompts = trace.prompt_tokens
    for row, (name, sizes, color) in enumerate(ladders):
        y = base + 34 + row * 46
        served = np.array(sizes)[np.searchsorted(sizes, prompts)]
        waste = 1 - float(prompts.sum()) / float(served.sum())
        svg.text(left - 10, y + 5, name, color, "end")
        svg.line([(left, y), (right, y)], "#d0d7de")
        for size in sizes:
            svg.rect(left + size * scale - 1.5, y - 9, 3, 18, color)
        svg.text(left, y + 24, f"{len(sizes)} sizes, {waste:.1%} of the computed tokens are padding", FAINT, size=12)
    for size in range(0, LONGEST + 1, 1024):
        svg.text(left + size * scale, 384, f"{size}", FAINT, "middle" if size < LONGEST else "end", 12)
    svg.text(left - 10, 384, "tokens", FAINT, "end", 12)
    return svg


def draw_curve(trace: Trace) -> Svg:
    """Padding by number of graphs, for the planned ladder and for the families."""
    title = "More graphs, less padding; a plan needs fewer for the same padding."
    description = (
        "Curves of padding over the number of prefill graphs, from 2 to 48, for planned, ramp-up and exponential "
        "ladders: all fall, and the planned one is the lowest."
    )
    svg, left, right, top, bottom = Svg(320, title, description), 70, WIDTH - 150, 50, 270
    counts, ceiling = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48), 0.8
    svg.text(16, 24, title)

    def at(count: int, padding: float) -> tuple[float, float]:
        x = np.log2(count / counts[0]) / np.log2(counts[-1] / counts[0])
        return left + float(x) * (right - left), bottom - min(padding, ceiling) / ceiling * (bottom - top)

    for percent in (0, 20, 40, 60, 80):
        y = at(2, percent / 100)[1]
        svg.line([(left, y), (right, y)], "#d0d7de")
        svg.text(left - 8, y + 4, f"{percent} %", FAINT, "end", 12)
    for count in counts:
        svg.text(at(count, 0)[0], bottom + 20, f"{count}", FAINT, "middle", 12)
    svg.text((left + right) / 2, bottom + 42, "prefill graphs", FAINT, "middle", 12)
    plans = [planned(trace, count) for count in counts]
    curves = {
        "planned": ([p.score.padding for p in plans], PLANNED, 3.0),
        "ramp-up": ([p.others[0].padding for p in plans], TOKEN, 1.5),
        "exponential": ([p.others[2].padding for p in plans], "#b35900", 1.5),
    }
    last = -99.0
    for name, (paddings, color, width) in sorted(curves.items(), key=lambda item: -item[1][0][-1]):
        svg.line([at(count, padding) for count, padding in zip(counts, paddings, strict=True)], color, width)
        last = max(at(counts[-1], paddings[-1])[1] - 14, last + 16)
        svg.text(right + 12, last, f"{name} {paddings[-1]:.1%}", color, size=12)
    return svg


def main() -> None:
    folder = Path(__file__).parent / "images"
    folder.mkdir(exist_ok=True)
    trace = made_up_trace()
    draw_padding().write(folder / "buckets-padding.svg")
    draw_ladders(trace).write(folder / "buckets-ladders.svg")
    draw_curve(trace).write(folder / "buckets-curve.svg")


if __name__ == "__main__":
    main()
