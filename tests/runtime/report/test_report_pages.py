"""Every report in a browser: axe-core, widths, light, dark and paper; the timeline and the graph by keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llmc.buckets import parse_spec
from llmc.buckets.grids import Limits
from llmc.buckets.step_cost import AssumedCost, StepCosts
from llmc.buckets.trace import Trace
from llmc.cli.main import main
from llmc.runtime.eval.divergence import Divergence
from llmc.runtime.eval.html import divergence_html, tasks_html
from llmc.runtime.eval.run_tasks import Score
from llmc.runtime.loadgen.answer import Outcome
from llmc.runtime.loadgen.html import bench_html
from llmc.runtime.loadgen.measure import report
from llmc.runtime.report.page import DATA_ID
from llmc.runtime.simulation.report import report_html
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf

from support.marks import rare
from support.pages import VIEWS, axe_violations, browser, open_page, show_as

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("profile", "graph", "throughput", "perplexity", "serve", "kl", "tasks", "buckets")
MADE_BY_COMMANDS = NAMES[:4]


@dataclass(frozen=True)
class Made:
    """printed: what the command printed with --json; empty for pages that were made from recorded data."""

    file: Path
    printed: dict[str, Any]


def serve_page() -> str:
    """A run of 60 requests against a server that tells of its buckets; two of them failed."""
    draw = np.random.default_rng(5)
    outcomes = []
    for index, start in enumerate(np.cumsum(draw.exponential(4e7, 60)).astype(int)):
        gaps = draw.gamma(4, 4e6, 20).astype(int)
        times = tuple(int(t) for t in start + 5e7 + np.cumsum(gaps))
        outcomes.append(Outcome(index, int(start), int(start), times[-1], times, 30, 20, 8, "length", True))
    for index in (7, 30):
        outcomes[index] = replace(
            outcomes[index], failure="HTTP 500", detail="<b>the server & its cause</b>", token_ns=()
        )
    uses = [
        {"bucket": f"decode:{n}x512", "replays": 9 * n, "tokens": 30, "padding_tokens": n, "replay_s": 0.1}
        for n in (0, 1, 8)
    ]
    found = report(outcomes, {"ttft": 80.0}).as_dict()
    data = {"settings": {"url": "http://localhost", "rate": None}, "report": found, "buckets": uses}
    return bench_html("How a server answers", "60 requests.", data, found, outcomes, ["a note."])


def kl_page() -> str:
    each = tuple(np.random.default_rng(2).lognormal(-6, 1, 500).tolist())
    found = Divergence(0.004, 0.0001, max(each), 0.1, 0.97, 8.1, 8.2, 500, 5, 101, 2.5, each)
    return divergence_html(found, "w4a8.llmc", "f32.llmc", "held-out.txt")


def tasks_page() -> str:
    scores = [
        Score("local_mmlu", "acc", "none", 0.41, 0.02, 500),
        Score("mine", "exact_match", "strict", 0.08, None, 9),
    ]
    return tasks_html(scores, "qwen.llmc")


def buckets_page() -> str:
    draw = np.random.default_rng(3)
    trace = Trace("made-up", np.cumsum(draw.exponential(0.1, 80)), draw.integers(10, 400, 80), draw.integers(1, 60, 80))
    what_if = WhatIf(trace, Server(512, 8, 16), StepCosts.of_model(AssumedCost(20000.0, 0.02), "assumed"))
    specs = ("prefill=1x[128,512],decode=[1,8]x512", "prefill=[1,2]x512,decode=[1,2,8]x[256,512]")
    ladders = [
        Ladder(f"ladder {n}", tuple(sorted(parse_spec(spec, Limits(8, 512, 16))))) for n, spec in enumerate(specs)
    ]
    return report_html(what_if, [what_if.run(ladder) for ladder in ladders])


RECORDED: dict[str, Callable[[], str]] = {
    "serve": serve_page,
    "kl": kl_page,
    "tasks": tasks_page,
    "buckets": buckets_page,
}


@pytest.fixture(scope="module")
def made(chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """Every report, written once."""
    folder = tmp_path_factory.mktemp("reports")
    found: dict[str, Made] = {}
    with pytest.MonkeyPatch.context() as patch:

        def run(name: str, *argv: str) -> None:
            lines: list[str] = []
            patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
            patch.setattr("typer.echo", lambda text, **_: lines.append(str(text)))
            file = folder / f"{name}.html"
            assert main([*argv, "--html", str(file), "--json"]) == 0
            found[name] = Made(file, json.loads("\n".join(lines)))

        sample = folder / "sample.txt"
        sample.write_text("A walk before dinner does no harm, she said, and it did her much good. " * 4)
        artifact = str(chat_artifact)
        run("profile", "profile", artifact, "--bucket", "decode:2x64", "--threads", "2", "--repeat", "3")
        times = folder / "profile.json"
        times.write_text(json.dumps(found["profile"].printed))
        run("graph", "inspect", artifact, "--bucket", "decode:2x64", "--profile", str(times))
        sizes = ("--input-len", "8", "--output-len", "12", "--num-prompts", "6", "--repeats", "2")
        run("throughput", "bench", "throughput", artifact, *sizes)
        run("perplexity", "eval", "perplexity", artifact, "--text", str(sample), "--window", "30")
    for name, page in RECORDED.items():
        (folder / f"{name}.html").write_text(page(), encoding="utf-8")
        found[name] = Made(folder / f"{name}.html", {})
    return found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


# Pages share their styles: every time half of them are looked at in one pair of views, half in the other, all on paper.
_DESKTOP_LIGHT, _DESKTOP_DARK, _PHONE_LIGHT, _PHONE_DARK, _PAPER = VIEWS
PAIRS = [(_DESKTOP_LIGHT, _PHONE_DARK, _PAPER), (_DESKTOP_DARK, _PHONE_LIGHT, _PAPER)]


@pytest.mark.parametrize(
    ("name", "views"),
    [
        (pytest.param if place % 2 == number else rare)(name, views, id=f"{name}-{views[0]}")
        for place, name in enumerate(NAMES)
        for number, views in enumerate(PAIRS)
    ],
)
def test_everyone_can_read_it(name: str, views: tuple[str, ...], made: dict[str, Made], chromium: Browser) -> None:
    with open_page(chromium, made[name].file.as_uri()) as page:
        for line in page.locator("summary").all():
            line.click()
        for view in views:
            show_as(page, view)
            assert axe_violations(page) == [], view
            sideways = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert sideways <= 0, view
            assert page.locator("main svg").count() > 0
            for picture in page.locator("svg[role=img]").all():
                assert picture.get_attribute("aria-label"), view
        # Paper is white, whatever the system prefers.
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(22, 25, 28)"


# ---- the same figures as --json --------------------------------------------------------------------------------------

UNITS = {"µs": 1.0, "ms": 1e3, "s": 1e6, "bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "%": 0.01, "": 1.0}


def value_of(text: str) -> float:
    """A figure as reports write it: µs and bytes are 1."""
    number, _, unit = text.replace("−", "-").replace(",", "").partition(" ")
    return float(number) * UNITS[unit.split(" ")[0]]


def cells_of(page: Page, caption: str) -> dict[str, list[str]]:
    """The rows of a table by their heads."""
    rows = page.locator("table", has=page.locator("caption", has_text=re.compile(f"^{caption}"))).locator("tbody tr")
    cells = [[cell.inner_text() for cell in row.locator("th, td").all()] for row in rows.all()]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize("name", MADE_BY_COMMANDS)
def test_the_page_holds_what_json_prints(name: str, made: dict[str, Made]) -> None:
    text = made[name].file.read_text(encoding="utf-8")
    (held,) = re.findall(f'<script type="application/json" id="{DATA_ID}">(.*?)</script>', text)
    assert json.loads(held) == made[name].printed


def test_tables_of_a_profile_show_its_figures(made: dict[str, Made], chromium: Browser) -> None:
    data = made["profile"].printed
    with open_page(chromium, made["profile"].file.as_uri()) as page:
        for caption, key in (("Ops", "ops"), ("Layers", "layers")):
            shown = cells_of(page, caption)
            assert list(shown) == [row["name"] for row in data[key]]
            for row in data[key]:
                commands, time, of_step, wait, read, written, rate, mflop, *_ = shown[row["name"]]
                assert int(commands) == row["commands"]
                assert value_of(time) == pytest.approx(row["us"], rel=6e-3)
                assert value_of(of_step) == pytest.approx(row["of_step"], abs=6e-4)
                assert value_of(wait) == pytest.approx(row["barrier_wait_us"], rel=6e-3)
                assert value_of(read) + value_of(written) == pytest.approx(row["bytes"], rel=1e-2)
                assert value_of(written) == pytest.approx(row["written_bytes"], rel=6e-3)
                assert value_of(rate) == pytest.approx(row["gb_per_s"], rel=6e-3)
                assert (
                    mflop == "–" if not row["flops"] else value_of(mflop) == pytest.approx(row["flops"] / 1e6, rel=6e-3)
                )
    assert sum(row["us"] for row in data["layers"]) == pytest.approx(sum(row["us"] for row in data["commands"]))
    assert [row["name"] for row in data["layers"]] == ["before layers", "layer 0", "layer 1", "after layers"]


def test_tables_of_a_benchmark_show_its_figures(made: dict[str, Made], chromium: Browser) -> None:
    data = made["throughput"].printed
    with open_page(chromium, made["throughput"].file.as_uri()) as page:
        shown = cells_of(page, "Latency")
        for short in ("TTFT", "TPOT", "E2E"):
            spread = data[f"{short.lower()}_ms"]
            wanted = [spread[name] for name in ("mean", "std", "min", "p50", "p90", "p95", "p99", "max")]
            assert [value_of(cell) for cell in shown[short]] == pytest.approx(wanted, rel=6e-4)
        used = {use["bucket"]: use for use in data["buckets"] if use["replays"]}
        assert {name: int(row[0].replace(",", "")) for name, row in cells_of(page, "Buckets").items()} == {
            name: use["replays"] for name, use in used.items()
        }
    # Two runs of six requests of 8 + 12 tokens; the last token is not computed again.
    assert sum(use["tokens"] for use in used.values()) == 2 * 6 * (8 + 11)


# ---- by keyboard and pointer -----------------------------------------------------------------------------------------


def tab_to(page: Page, selector: str) -> None:
    """Presses Tab until something in `selector` has the focus."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.closest(selector) !== null", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def shown_time(page: Page) -> tuple[float, float]:
    data = page.locator("#timeline svg").first
    return float(data.get_attribute("data-from") or "nan"), float(data.get_attribute("data-to") or "nan")


def test_the_timeline_by_keyboard(made: dict[str, Made], chromium: Browser) -> None:
    data = made["profile"].printed
    with open_page(chromium, made["profile"].file.as_uri()) as page:
        tab_to(page, "#timeline")
        everything = shown_time(page)
        assert everything == pytest.approx((0, data["replay"]["us"]))
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        walked = []
        for _ in data["commands"]:
            walked.append(page.locator("#timeline-details dd").first.inner_text())
            page.keyboard.press("ArrowRight")
        assert walked == [f"{command['index']}: {command['name']}" for command in data["commands"]]
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        assert page.locator("#timeline-details dd").first.inner_text() == "1"  # the second thread
        for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        close = shown_time(page)
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("layer 0, layers")
        assert close[1] - close[0] < everything[1]
        page.keyboard.press("+")
        closer = shown_time(page)
        assert close[0] <= closer[0] < closer[1] <= close[1]
        assert closer[1] - closer[0] == pytest.approx((close[1] - close[0]) / 1.6)
        page.keyboard.press("-")
        assert shown_time(page) == pytest.approx(close)
        page.keyboard.press("Escape")
        assert shown_time(page) == everything
        assert page.evaluate("document.activeElement.closest('#timeline') !== null")


def test_the_timeline_by_pointer(made: dict[str, Made], chromium: Browser) -> None:
    data = made["profile"].printed
    with open_page(chromium, made["profile"].file.as_uri()) as page:
        everything = shown_time(page)
        page.locator("#timeline [data-row='1'][data-place='1']").click()
        assert page.locator("#timeline-details dd").first.inner_text() == "layer 0"
        page.locator("#timeline [data-row='1'][data-place='1']").click()
        close = shown_time(page)
        assert close[1] - close[0] < everything[1]
        box = page.locator("#timeline svg").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 600, box["y"] + 5)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + 5, steps=4)
        page.mouse.up()
        moved = shown_time(page)
        assert moved[0] > close[0]
        assert moved[1] - moved[0] == pytest.approx(close[1] - close[0])
        page.get_by_role("button", name="Show all").click()
        assert shown_time(page) == pytest.approx((0, data["replay"]["us"]))


def test_the_graph_by_keyboard(made: dict[str, Made], chromium: Browser) -> None:
    data = made["graph"].printed
    groups: dict[str, list[str]] = {}
    for command in data["commands"]:
        groups.setdefault(command["group"], []).append(f"{command['index']}: {command['name']}")
    order = [title for name, commands in groups.items() for title in (name, *commands)]
    current = "document.activeElement.dataset.title.replace(/, \\d+ commands?$/, '')"
    with open_page(chromium, made["graph"].file.as_uri()) as page:
        edges = page.locator("#graph-edges path")
        tab_to(page, "#graph")
        folded = edges.count()
        assert not page.get_by_text("layers.1.mlp.down", exact=True).first.is_visible()
        page.keyboard.press("*")
        assert edges.count() > folded
        walked = []
        for _ in order:
            walked.append(page.evaluate(current))
            page.keyboard.press("ArrowDown")
        assert walked == order
        page.keyboard.press("ArrowLeft")
        assert page.evaluate(current) == "after layers"
        page.keyboard.press("ArrowUp")
        down = page.locator("#graph-details")
        assert "layers.1.mlp.down.weight" in down.inner_text()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate(current) == "layer 1"
        assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
        assert axe_violations(page) == []


def test_the_graph_by_pointer(made: dict[str, Made], chromium: Browser) -> None:
    data = made["graph"].printed
    attention = next(command for command in data["commands"] if command["family"] == "attention")
    with open_page(chromium, made["graph"].file.as_uri()) as page:
        page.get_by_role("button", name="Fold all", exact=True).click()
        assert page.locator("#graph [data-command]:visible").count() == 0
        page.locator("#graph [data-group='layer 0'] > .node").click()
        page.locator(f"#graph [data-command='{attention['index']}'] .node").click()
        details = page.locator("#graph-details").inner_text()
        for wanted in (attention["kernel"], f"{attention['read_bytes']:,} bytes", "k_pool_0.1", "written"):
            assert wanted in details
        assert page.locator("#graph-edges path.here").count() >= 2
