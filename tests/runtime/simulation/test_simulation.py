"""What-if: costs of steps, the run in virtual time by hand-made figures, the command and its report."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.buckets import BucketError, parse_spec
from llmc.buckets.bucket import Bucket
from llmc.buckets.cost_table import CostTable, ReplayCost
from llmc.buckets.grids import Limits
from llmc.buckets.step_cost import AssumedCost, LoadCost, StepCosts, num_pairs
from llmc.buckets.trace import Trace, write_trace
from llmc.cli.main import main
from llmc.runtime.report.screenshot import browser
from llmc.runtime.simulation.figures import duration
from llmc.runtime.simulation.what_if import Ladder, Outcome, Server, WhatIf, percentile

CONSTANT = StepCosts.of_model(AssumedCost(1000.0, 0.01), "assumed")  # 1 ms a token of prompt, 10 ms a decode step


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    columns = list(zip(*requests, strict=True))
    return Trace("made-up", np.array(columns[0], float), np.array(columns[1]), np.array(columns[2]))


def ladder_of(spec: str, name: str = "ladder") -> Ladder:
    return Ladder(name, tuple(sorted(parse_spec(spec, Limits(8, 512, 16)))))


def run(trace: Trace, spec: str, costs: StepCosts = CONSTANT, **server: Any) -> Outcome:
    return WhatIf(trace, Server(512, 8, 16, **server), costs).run(ladder_of(spec))


def test_one_long_context_among_short_ones() -> None:
    """Steps read the rectangle of the longest context, or the total of all, as the scheduler chooses graphs."""
    trace = trace_of((0.0, 400, 20), *((0.0, 10, 20) for _ in range(7)))
    of_longest = run(trace, "prefill=8x512,decode=8x[128,512]")
    of_total = run(trace, "prefill=8x512,decode=8x[704,4096]total")
    # Nineteen steps, for the prompts give the first tokens; contexts from 401 and 11 tokens on.
    contexts = sum(400 + n + 7 * (10 + n) for n in range(1, 20))
    uses = {str(use.bucket): use for one in (of_longest, of_total) for use in one.graphs}
    assert (uses["decode:8x512"].replays, uses["decode:8x512"].computed) == (19, 19 * 4096)
    assert (uses["decode:8x704total"].replays, uses["decode:8x704total"].computed) == (19, 19 * 704)
    assert uses["decode:8x704total"].asked == contexts
    assert (of_longest.num_misses, of_total.num_misses, of_total.uneven_contexts) == (0, 0, 0.0)
    assert of_longest.uneven_contexts == pytest.approx(1 - contexts / sum(8 * (400 + n) for n in range(1, 20)))
    # From the seventeenth step on there are 27 and 7 × 2 blocks: more than the 40 of the smaller graph.
    tight = run(trace, "prefill=8x512,decode=8x[640,4096]total")
    assert {str(use.bucket): use.replays for use in tight.of_phase("decode")} == {
        "decode:8x640total": 16, "decode:8x4096total": 3,
    }  # fmt: skip


# ---- costs ---------------------------------------------------------------------------------------------------------


def skipped_costs(tile: int = 8, sequence_s: float = 0.0) -> list[ReplayCost]:
    """20 µs and 10 µs a computed row, 0.1 µs a pair; full and light loads, as a warm-up measures them."""
    costs = []
    for phase, batch, seq in (
        *(("prefill", b, s) for b in (1, 2, 4) for s in (64, 128)),
        *(("decode", b, s) for b in (1, 4, 16) for s in (128, 512)),
    ):
        bucket = Bucket(phase, batch, seq)
        full = (batch, bucket.max_tokens, seq)
        for sequences, tokens, context in {(batch, batch, 1), full}:
            mine = 1
            while mine < min(bucket.max_tokens, tile):
                mine *= 2
            rows = -(-tokens // mine) * mine
            seconds = 20e-6 + 10e-6 * rows + 1e-7 * num_pairs(sequences, tokens, context) + sequence_s * sequences
            costs.append(ReplayCost(bucket, sequences, tokens, context, seconds))
    return costs


def test_the_fit_finds_the_law_that_made_the_costs() -> None:
    law = LoadCost.fit(skipped_costs(), 8)
    assert law.pair_s["decode"] == pytest.approx(1e-7, rel=1e-6)
    assert law.pair_s["prefill"] == pytest.approx(1e-7, rel=1e-6)
    assert law.at([1, 16, 100, 512, 1024]) == pytest.approx([30e-6, 180e-6, 1020e-6, 5140e-6, 10260e-6], rel=1e-3)


def test_sequences_and_rows_are_told_apart() -> None:
    costs = skipped_costs(sequence_s=50e-6)
    law = LoadCost.fit(costs, 8)
    assert law.sequence_s == pytest.approx(50e-6, rel=1e-6)
    assert law.pair_s["decode"] == pytest.approx(1e-7, rel=1e-6)
    assert law.at([1, 16]) == pytest.approx([30e-6, 180e-6], rel=1e-6)
    table = StepCosts.of_table(CostTable({"p": "x"}, "ab" * 32, tuple(costs), "skipped"), "measured")
    decode, prefill = (table.curves(Bucket(phase, 16, 512), 8)[0] for phase in ("decode", "prefill"))
    assert decode.at(16) == pytest.approx(980e-6, rel=1e-3)
    assert prefill.at(16) == pytest.approx(230e-6, rel=1e-3)
    assert table.seconds(Bucket("decode", 16, 512)) == pytest.approx(980e-6 + 16 * 512e-7, rel=1e-3)


def test_costs_of_no_table_are_refused() -> None:
    with pytest.raises(BucketError, match="empty"):
        LoadCost.fit([])


def test_where_padding_is_skipped_a_step_costs_its_tiles() -> None:
    costs = StepCosts.of_table(CostTable({"p": "x"}, "ab" * 32, tuple(skipped_costs()), "skipped"), "measured")
    cost, exact = costs.curves(Bucket("decode", 16, 512), 8)
    at = {rows: np.interp(rows, cost.rows, cost.seconds) for rows in (1, 8, 9, 16)}
    assert at[1] == pytest.approx(at[8]) == pytest.approx(100e-6, rel=1e-3)
    assert at[9] == pytest.approx(at[16]) == pytest.approx(180e-6, rel=1e-3)
    assert np.interp(1, exact.rows, exact.seconds) == pytest.approx(30e-6, rel=1e-3)
    assert costs.seconds(Bucket("decode", 4, 512)) == pytest.approx(60e-6 + 4 * 512e-7, rel=1e-3)


def test_where_padding_is_computed_a_step_costs_its_bucket() -> None:
    full = [
        cost for cost in skipped_costs() if cost.context == cost.bucket.seq and cost.tokens == cost.bucket.max_tokens
    ]
    costs = StepCosts.of_table(CostTable({"p": "x"}, "ab" * 32, tuple(full), "computed"), "measured")
    bucket = Bucket("prefill", 1, 128)
    cost, _ = costs.curves(bucket)
    assert cost.seconds == (costs.seconds(bucket),)
    assert cost.pair_s == 0
    assert costs.seconds(bucket) == next(c.seconds for c in full if c.bucket == bucket)
    mixed = StepCosts.of_table(CostTable({"p": "x"}, "ab" * 32, tuple(full), "skipped"), "measured")
    assert mixed.seconds(Bucket("mixed", 4, 128)) > 0


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_one_request_by_hand() -> None:
    one = run(trace_of((0.0, 100, 3)), "prefill=1x128,decode=1x512")
    assert one.ttft_s == pytest.approx([0.128])
    assert one.total_s == pytest.approx([0.148])
    assert one.added_ttft_s == pytest.approx([0.028], abs=1e-3)
    assert one.added_s == pytest.approx([0.028], abs=1e-3)
    prefill, decode = one.graphs[1], one.graphs[0]
    assert (prefill.replays, prefill.asked, prefill.computed) == (1, 100, 128)
    assert prefill.padding_s == pytest.approx(0.028, abs=1e-3)
    assert (decode.replays, decode.asked, decode.computed) == (2, 101 + 102, 2 * 512)
    assert one.span_s == pytest.approx(0.148)
    assert one.busy_s == pytest.approx(0.148)
    assert one.warm_up_s == pytest.approx(0.138)


def test_a_bucket_of_exactly_the_prompt_pads_nothing() -> None:
    one = run(trace_of((0.0, 128, 1), (10.0, 128, 1)), "prefill=1x[128,512],decode=1x512")
    assert one.padded_tokens("prefill") == 0
    assert one.padding_s == pytest.approx(0, abs=1e-9)
    assert one.added_s == pytest.approx([0, 0], abs=1e-9)
    assert one.num_unused == 2


def test_a_smaller_ladder_adds_latency() -> None:
    rng = np.random.default_rng(3)
    requests = [(i * 0.4, int(n), 4) for i, n in enumerate(rng.integers(16, 500, 60))]
    fine = run(trace_of(*requests), "prefill=1x32:32:512,decode=[1,8]x512")
    coarse = run(trace_of(*requests), "prefill=1x512,decode=[1,8]x512")
    assert fine.padding("prefill") < coarse.padding("prefill")
    assert percentile(fine.added_s, 99) < percentile(coarse.added_s, 99)
    assert fine.unserved == coarse.unserved == 0


def test_one_long_context_among_short_ones_is_told() -> None:
    """By hand: ten tokens of four sequences are decoded together, the first of 22 and of 502 tokens of context."""
    ladder = "prefill=8x512,decode=8x512"
    even = run(trace_of(*[(0.0, 21, 11)] * 4), ladder)
    assert even.uneven_contexts == 0
    long = run(trace_of(*[(0.0, 21, 11)] * 3, (0.0, 501, 11)), ladder)
    short, tall = sum(range(22, 32)), sum(range(502, 512))
    assert long.uneven_contexts == pytest.approx(1 - (3 * short + tall) / (4 * tall))


def test_guesses_are_right_with_the_given_odds_and_save_steps() -> None:
    trace = trace_of(*((0.0, 20, 400) for _ in range(4)))
    plain = run(trace, "prefill=4x32,decode=[4,8,16,32]x512")
    guessing = run(trace, "prefill=4x32,decode=[4,8,16,32]x512", guesses=7, odds=0.6)
    assert (plain.drafted, plain.guessing_steps) == (0, 0)
    # A step costs the same with any rows, so all guesses go along once that is known: 1 + p + … + p^7 tokens a step.
    assert guessing.accepted / guessing.guessing_steps / 4 == pytest.approx(sum(0.6**n for n in range(1, 8)), rel=0.15)
    steps = [sum(use.replays for use in one.of_phase("decode")) for one in (plain, guessing)]
    assert steps[0] == 399
    assert 399 / steps[1] == pytest.approx(sum(0.6**n for n in range(8)), rel=0.25)
    assert guessing.span_s < 0.6 * plain.span_s
    assert next(use for use in guessing.graphs if use.bucket.batch == 32).replays > 0
    assert 0 < guessing.padding("decode") < 1
    # A draft takes its time, and few guesses go along where it is as slow as the model.
    spans = [
        run(trace, "prefill=4x32,decode=[4,8,16,32]x512", guesses=7, odds=0.6, draft_s=draft_s).span_s
        for draft_s in (0.0, 1e-3, 20e-3)
    ]
    assert guessing.span_s == spans[0] < spans[1] < spans[2] < 1.1 * plain.span_s
    # Without rows beside those of the sequences, nothing can be guessed.
    assert run(trace, "prefill=4x32,decode=4x512", guesses=7, odds=0.6).drafted == 0


def test_guesses_do_not_pay_where_rows_are_dear() -> None:
    """A step takes a second for each row: plain decoding is as fast, and guesses must lose little."""
    rows = StepCosts.of_table(CostTable({"p": "x"}, "ab" * 32, tuple(
        ReplayCost(Bucket(phase, b, 512), b, b * (512 if phase == "prefill" else 1), 512, 1e-3 * b)
        for phase, batches in (("prefill", (1,)), ("decode", (1, 2, 4, 8, 16))) for b in batches
    ), "computed"), "measured")  # fmt: skip
    trace = trace_of((0.0, 20, 300))
    spec = "prefill=1x32,decode=[1,2,4,8]x512"
    assert run(trace, spec, rows, guesses=3, odds=0.5).span_s < 1.05 * run(trace, spec, rows).span_s


def test_long_prompts_are_split_and_requests_clipped() -> None:
    trace = trace_of((0.0, 400, 10), (0.0, 4000, 4000))
    what_if = WhatIf(trace, Server(512, 8, 16), CONSTANT)
    one = what_if.run(ladder_of("prefill=1x128,decode=1x512"))
    assert what_if.clipped == 1
    assert what_if.prompts.tolist() == [400, 511]
    assert what_if.outputs.tolist() == [10, 1]
    assert one.split_prompts == 2
    assert sum(use.replays for use in one.of_phase("prefill")) == 8


def test_decodes_beyond_the_largest_batch_are_missed_and_strict_mode_fails_what_nothing_holds() -> None:
    requests = [(0.0, 16, 30)] * 4
    one = run(trace_of(*requests), "prefill=1x16,decode=2x512")
    assert one.unserved == 0
    assert max(load.num_seqs for load in one.loads) <= 2
    assert one.preemptions == 0


def test_speed_brings_arrivals_closer() -> None:
    trace = trace_of(*((float(i), 128, 1) for i in range(20)))
    slow, fast = (
        WhatIf(trace, Server(512, 8, 16), CONSTANT, speed=speed).run(ladder_of("prefill=1x128,decode=1x512"))
        for speed in (1.0, 100.0)
    )
    assert percentile(slow.ttft_s, 99) == pytest.approx(0.128)
    assert percentile(fast.ttft_s, 99) > 1.0
    assert fast.span_s < slow.span_s


@pytest.mark.parametrize("spec", ["prefill=1x128,decode=1x256", "prefill=1x128,decode=[1,2]x[64,128]"])
def test_a_ladder_that_cannot_hold_max_model_len_is_refused(spec: str) -> None:
    with pytest.raises(BucketError, match=r"holds contexts of \d+ tokens, max-model-len is 512: add a decode bucket"):
        run(trace_of((0.0, 10, 2)), spec)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (8.5e-4, "850 µs"), (0.0032, "3.2 ms"), (12.44, "12.4 s"), (300, "5 min"), (-0.02, "−20 ms")],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace_of(*((i * 0.3, int(n), 5) for i, n in enumerate(rng.integers(16, 700, 80)))))
    return path


LADDERS = ("prefill=1x128:128:512,decode=[1,4]x512", "prefill=[1,2]x512,decode=[1,2,4]x[256,512]")


def simulate(trace: Path, *more: str) -> int:
    return main(["buckets", "simulate", "--trace", str(trace), *more])


def test_json_has_every_figure(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace_file, "--buckets", LADDERS[0], "--buckets", LADDERS[1], "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["requests"] == 80
    assert data["clipped"] > 0
    first, second = data["ladders"]
    assert first["name"] != second["name"]
    assert (first["graphs"], second["graphs"]) == (6, 8)
    assert 0 < first["phases"]["prefill"]["padding"] < second["phases"]["prefill"]["padding"] < 1
    for one in data["ladders"]:
        assert one["unserved"] == 0
        assert sum(bucket["replays"] for bucket in one["buckets"]) == one["replays"]
        assert one["added_ttft_p50_s"] <= one["added_ttft_p99_s"]
        assert one["compile_s"] > 0
        assert one["arena_bytes"] > 0


def test_guesses_of_a_recorded_run(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.txt"
    metrics.write_text("# HELP x\nllmc_accepted_tokens_total 60.0\nllmc_judged_tokens_total 100.0\n")
    options = ("--buckets", "prefill=1x512,decode=[1,4,16]x512", "--max-num-seqs", "4", "--speculate", "3")
    assert simulate(trace_file, *options, "--acceptance", str(metrics), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["speculate"], data["acceptance"]) == (3, 0.6)
    assert 0 < data["ladders"][0]["accepted_tokens"] < data["ladders"][0]["drafted_tokens"]
    assert simulate(trace_file, *options) == 0
    out = capsys.readouterr().out
    assert "up to 3 guesses, each right with odds 0.7" in " ".join(out.split())
    assert "tokens gained, a step" in out
    metrics.write_text("llmc_accepted_tokens_total 0\n")
    for text, said in ((str(metrics), "tells of no guesses"), ("1", "out of range"), ("/nowhere", "cannot read")):
        assert simulate(trace_file, *options, "--acceptance", text) == 1
        assert said in capsys.readouterr().err


def test_the_table_says_that_costs_are_guessed(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace_file, "--buckets", LADDERS[0]) == 0
    out = capsys.readouterr().out
    assert "padding, time" in out
    assert "Times are guesses" in out


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        links = [(name, value or "") for name, value in attrs if name in ("src", "href", "srcset")]
        self.outside += [f"{name}={value}" for name, value in links if not value.startswith("#")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_sound_file(trace_file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    name = tmp_path / "<b>&.toml"
    name.write_text('prefill = "1x512"\ndecode = "[1,4]x512"\n')
    assert simulate(trace_file, "--buckets", str(name), "--buckets", LADDERS[1], "--html", str(report)) == 0
    text = report.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert page.count["script"] == 1  # its data, which is no code
    assert "script-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(", text)
    assert page.count["svg"] == 2 + 2 * 2 * 2
    assert "&lt;b&gt;&amp;" in text
    assert "nan" not in text.lower().replace("naninf", "")
    assert [path.name for path in tmp_path.glob(".report*")] == []


def test_the_picture_shows_the_whole_page(trace_file: Path, tmp_path: Path) -> None:
    if browser() is None:
        pytest.skip("Chromium is not installed")
    picture = tmp_path / "report.png"
    assert simulate(trace_file, "--buckets", LADDERS[1], "--png", str(picture)) == 0
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == 2560
    assert height > 2000


def test_without_a_browser_the_picture_is_one_sentence(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.runtime.report.screenshot.browser", lambda: None)
    assert simulate(trace_file, "--buckets", LADDERS[0], "--png", str(tmp_path / "x.png")) == 1
    assert "needs Chromium" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--buckets", "prefill=1x128"], "no decode"),
        (["--buckets", "decode=1x512,prefill=1x16", "--max-model-len", "4096"], "4096"),
        (["--buckets", "/nowhere.toml"], "cannot read bucket file"),
        (["--buckets", "nonsense"], "nonsense"),
        (["--buckets", LADDERS[0], "--cost-table", "/nowhere.json"], "cannot read cost table"),
        (["--buckets", LADDERS[0], "--model", "/nowhere"], "cannot read"),
        (["--buckets", LADDERS[0], "--html", "/nowhere/x.html"], "no directory"),
        (["--buckets", LADDERS[0], "--speed", "0"], "--speed"),
        (["--buckets", LADDERS[0], "--num-blocks", "3"], "3 KV blocks hold 96 tokens, max-model-len is 512"),
        ([], "--buckets"),
    ],
)
def test_errors_are_one_line(argv: list[str], says: str, trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace_file, *argv) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("llmc: error: ")
    assert error.count("\n") == 1
    assert says in error
    assert "internal error" not in error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ('{"llmc_trace": 1}\n', "has no requests"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}\n', "not a whole number from 1"),
        ("hello\n", "of no known form"),
    ],
)
def test_a_bad_trace_is_one_line(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert simulate(path, "--buckets", LADDERS[0]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
