"""Draws the pictures of reports: python -m docs.draw_report [buckets] [profile] [graph] [bench].

That of buckets.md is of a made-up trace with a fixed seed; the others are measured on examples/tiny-english, which the
compiler extra compiles first.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path

import numpy as np

from llmc.buckets import Limits, parse_spec
from llmc.buckets.cost import FlopsCost, ModelShape
from llmc.buckets.step_cost import StepCosts
from llmc.buckets.trace import Trace
from llmc.cli import main as cli
from llmc.runtime.report.screenshot import screenshot
from llmc.runtime.simulation.report import report_html
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf

LONGEST = 4096
LADDERS = {
    "coarse": "prefill=1x[512,2048,4096],decode=[8,32]x[2048,4096]",
    "ramp-up": "prefill=1x256:256:4096,decode=1:8:32x512:512:4096",
}
# A decoder of 8 billion weights on an accelerator that computes its padding.
MODEL = ModelShape(4096, 14336, 32, 32, 8, 128, 128256)


def made_up_trace(requests: int = 6000) -> Trace:
    """Chat: short questions, a cluster around a system prompt, a long tail; a Poisson process whose rate swings."""
    rng = np.random.default_rng(11)
    kinds = rng.choice(3, requests, p=[0.45, 0.35, 0.2])
    lengths = np.stack(
        [rng.lognormal(5.6, 0.6, requests), rng.normal(1100, 60, requests), rng.lognormal(7.4, 0.5, requests)]
    )
    prompts = np.clip(lengths[kinds, np.arange(requests)], 8, LONGEST - 1).astype(np.int64)
    outputs = np.clip(rng.lognormal(4.9, 0.8, requests), 1, 1500).astype(np.int64)
    swing = 1 + 0.6 * np.sin(np.arange(requests) / requests * 4 * np.pi)
    return Trace("made-up chat", np.cumsum(rng.exponential(0.5, requests) / swing), prompts, outputs)


IMAGES = Path(__file__).parent / "images"
MODEL_DIR = Path(__file__).parent.parent / "examples" / "tiny-english"


def draw_buckets() -> None:
    costs = StepCosts.of_model(FlopsCost(MODEL, 1.2e14, 1.6e12, 3e-4), "a roofline, 120 TFLOP/s and 1.6 TB/s")
    what_if = WhatIf(made_up_trace(), Server(LONGEST, 32), costs)
    ladders = [
        Ladder(name, tuple(sorted(parse_spec(spec, Limits(32, LONGEST, 32)))), spec) for name, spec in LADDERS.items()
    ]
    page = report_html(what_if, [what_if.run(ladder) for ladder in ladders])
    screenshot(page, IMAGES / "buckets-report.png", scale=1)


def draw_measured(names: set[str]) -> None:
    """Pictures of what commands write; each shows the top of its page."""
    with tempfile.TemporaryDirectory() as folder:
        artifact, page, times = (Path(folder) / name for name in ("tiny-english.llmc", "page.html", "profile.json"))
        ladder = "prefill=1x[64,128],decode=[1,4,8]x256"
        _llmc("compile", MODEL_DIR, "-o", artifact, "--buckets", ladder)
        if names & {"profile", "graph"}:
            printed = _llmc("profile", artifact, "--bucket", "decode:8x256", "--html", page, "--json")
            times.write_text(printed, encoding="utf-8")
        if "profile" in names:
            screenshot(page.read_text(encoding="utf-8"), IMAGES / "profile-report.png", scale=1, height=1200)
        if "graph" in names:
            _llmc("inspect", artifact, "--bucket", "decode:8x256", "--html", page, "--profile", times)
            screenshot(page.read_text(encoding="utf-8"), IMAGES / "graph-report.png", scale=1, height=1240)
        if "bench" in names:
            load = ("--num-prompts", "60", "--input-len", "60", "--output-len", "90", "--range-ratio", "0.6")
            _llmc("bench", "throughput", artifact, *load, "--concurrency", "8", "--repeats", "3", "--html", page)
            screenshot(page.read_text(encoding="utf-8"), IMAGES / "bench-report.png", scale=1, height=1200)


def _llmc(*arguments: str | Path) -> str:
    """What a command prints. Raises SystemExit when it fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main([str(argument) for argument in arguments])
    if code:
        raise SystemExit(code)
    return printed.getvalue()


def main() -> None:
    names = set(sys.argv[1:]) or {"buckets", "profile", "graph", "bench"}
    if "buckets" in names:
        draw_buckets()
    if names - {"buckets"}:
        draw_measured(names)


if __name__ == "__main__":
    main()
