"""Planning: exactness against brute force, bounds, limits, costs, and the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.buckets import Bucket, BucketError, parse_spec
from llmc.buckets.candidates import PhaseProblem
from llmc.buckets.cost import CostModel, FlopsCost, MeasuredCost, ModelShape, TokensCost
from llmc.buckets.demand import MAX_REPLAYED, Demand, ServerModel
from llmc.buckets.fixed import FAMILIES, batch_ladders, grid_ladders, length_ladders
from llmc.buckets.grid import lower_bound, search
from llmc.buckets.planner import Limits, Plan, Resources, plan
from llmc.buckets.trace import Trace, collect, read_trace, write_trace
from llmc.buckets.trace_lines import Request
from llmc.buckets.usage import usage
from llmc.cli.main import main

from support.planning import SERVER, SHAPE, made_up_trace
from support.traces import TRACES

TRACE = made_up_trace()


# ---- plans ---------------------------------------------------------------------------------------------------------


def assert_sound(planned: Plan, server: ServerModel, block_size: int) -> None:
    decode_top = Bucket("decode", server.max_num_seqs, server.max_model_len)
    assert decode_top in planned.ladder.decode
    assert planned.ladder.select("prefill", 1, server.max_chunk) is not None
    for phase in planned.phases:
        tops = {server.max_model_len, server.max_chunk}
        # Multiples of the block size, unless a ladder of other sizes is better than any of these.
        by_rule = any(phase.score.pairs == other.pairs for other in phase.others)
        assert by_rule or all(b.seq % block_size == 0 or b.seq in tops for b in phase.buckets)
        assert phase.score.graphs == len(phase.buckets)
        assert phase.lower_bound <= phase.score.cost * (1 + 1e-9)
        assert 0 <= phase.score.padding < 1
        for other in phase.others:
            assert other.graphs <= phase.score.graphs
            assert phase.score.cost <= other.cost * (1 + 1e-9), other.name


@given(
    st.integers(0, 1000),
    st.integers(1, 12),
    st.sampled_from([1, 2, 5, 20]),
    st.sampled_from([1, 3]),
    st.sampled_from([16, 32, 100]),
    st.sampled_from(["tokens", "flops", "measured"]),
)
@settings(max_examples=25, deadline=None)
def test_plans_cover_align_and_beat_fixed_ladders(
    seed: int, graphs: int, max_num_seqs: int, max_prefill_batch: int, block_size: int, cost: str
) -> None:
    models: dict[str, CostModel] = {
        "tokens": TokensCost(),
        "flops": FlopsCost(SHAPE, 1e9, 1e9),
        "measured": MeasuredCost({Bucket(p, b, s): 1e-3 * b * s + 1 for p in ("prefill", "decode") for b in (1, 4)
                                  for s in (64, 1024)}),
    }  # fmt: skip
    server = ServerModel(1000, max_num_seqs, max_prefill_batch, 600)
    planned = plan(made_up_trace(60, seed), server, Limits(max_graphs=graphs), models[cost], block_size=block_size)
    assert all(len(phase.buckets) <= graphs for phase in planned.phases)
    assert_sound(planned, server, block_size)


def test_prefill_of_one_sequence_is_optimal_by_brute_force() -> None:
    lengths = [3, 17, 18, 40, 41, 70, 100, 100, 128]
    trace = collect(Path("x"), [Request(float(n), length, 1) for n, length in enumerate(lengths)])
    candidates = range(16, 128, 16)
    for graphs in range(1, 6):
        planned = plan(
            trace, ServerModel(max_model_len=128), Limits(max_graphs=graphs), block_size=16, phases=("prefill",)
        )
        best = min(
            sum(min(s for s in (*sizes, 128) if s >= length) for length in lengths)
            for r in range(graphs)
            for sizes in combinations(candidates, r)
        )
        phase = planned.phases[0]
        by_rule = min(other.tokens for other in phase.others)
        assert phase.score.tokens == min(best, by_rule)
        assert phase.exact == (best <= by_rule)
        if phase.exact:
            assert phase.gap == 0


def test_more_graphs_never_cost_more() -> None:
    costs = [plan(TRACE, SERVER, Limits(max_graphs=n), phases=("prefill",)).phases[0].score.cost for n in (1, 2, 4, 8)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


@pytest.mark.parametrize("model", [TokensCost(), FlopsCost(SHAPE, 1e9, 1e9)])
def test_max_padding_takes_the_fewest_graphs(model: TokensCost | FlopsCost) -> None:
    phase = plan(TRACE, SERVER, Limits(max_padding=10), model, phases=("prefill",)).phases[0]
    assert phase.score.padding <= 0.10
    if isinstance(model, TokensCost):
        fewer = plan(TRACE, SERVER, Limits(max_graphs=len(phase.buckets) - 1), model, phases=("prefill",)).phases[0]
        assert fewer.score.padding > 0.10


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_unreachable_padding_names_what_can_be_reached(phase: str) -> None:
    with pytest.raises(BucketError, match=r"at most 0\.5 % cannot be reached with 3 .* pads ([0-9.]+) %") as caught:
        plan(TRACE, SERVER, Limits(max_graphs=3, max_padding=0.5), phases=(phase,))
    nearest = float(str(caught.value).split("pads ")[1].split(" %")[0])
    reached = plan(TRACE, SERVER, Limits(max_graphs=3, max_padding=nearest), phases=(phase,))
    assert reached.phases[0].score.padding * 100 <= nearest


def test_memory_and_time_limit_graphs() -> None:
    resources = Resources(bytes_per_token=1000, bytes_per_graph=10_000, compile_once_s=30, compile_graph_s=2)
    # 30 s once, a mixed graph, and four graphs of each phase.
    by_time = plan(TRACE, SERVER, Limits(max_compile_time=49), resources=resources)
    assert [len(phase.buckets) for phase in by_time.phases] == [4, 4]
    assert resources.compile_s(len(by_time.ladder)) == 48
    # 2,048 rows of arena leave room for 5 graphs.
    by_memory = plan(TRACE, SERVER, Limits(max_memory=2_100_000), phases=("prefill",), resources=resources)
    assert len(by_memory.phases[0].buckets) == 5
    # Less than the arena of a whole prompt: prompts are chunked.
    chunked = plan(TRACE, SERVER, Limits(max_memory=1_100_000), phases=("prefill",), resources=resources)
    assert max(bucket.max_tokens for bucket in chunked.ladder.prefill) <= 1090
    assert chunked.phases[0].score.held == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_compile_time=19.5), "too short: from an empty cache, 3 graphs, .* take about 19.6 s; allow that"),
        (Limits(max_memory=1000), "too small: .* need [0-9]+ bytes"),
    ],
)
def test_impossible_limits_name_the_nearest(limits: Limits, message: str) -> None:
    with pytest.raises(BucketError, match=message):
        plan(TRACE, SERVER, limits)


@pytest.mark.parametrize("phases", [("prefill",), ("decode",), ("prefill", "decode")])
def test_the_named_compile_time_is_enough(phases: tuple[str, ...]) -> None:
    with pytest.raises(BucketError) as caught:
        plan(TRACE, SERVER, Limits(max_compile_time=1), phases=phases)
    enough = float(str(caught.value).split("take about ")[1].split(" s")[0])
    planned = plan(TRACE, SERVER, Limits(max_compile_time=enough), phases=phases)
    assert Resources().compile_s(len(planned.ladder)) <= enough
    assert [len(phase.buckets) for phase in planned.phases] == [1] * len(phases)


def test_the_named_memory_is_enough() -> None:
    with pytest.raises(BucketError) as caught:
        plan(TRACE, SERVER, Limits(max_memory=1000))
    enough = int(str(caught.value).split("need ")[1].split(" bytes")[0])
    assert plan(TRACE, SERVER, Limits(max_memory=enough)).ladder


@pytest.mark.parametrize(
    "make",
    [
        lambda: Limits(max_graphs=0),
        lambda: Limits(max_graphs=10_000),
        lambda: Limits(max_padding=100),
        lambda: Limits(max_padding=float("nan")),
        lambda: ServerModel(max_num_seqs=0),
        lambda: ServerModel(max_model_len=-1),
        lambda: ServerModel(max_prefill_tokens=-1),
        lambda: ServerModel(decode_step_s=float("nan")),
        lambda: ServerModel(max_model_len=1 << 30),
        lambda: ServerModel(prefill_tokens_per_s=float("inf")),
        lambda: Limits(max_compile_time=float("nan")),
        lambda: plan(TRACE, block_size=0),
        lambda: plan(TRACE, block_size=1 << 20),
        lambda: plan(TRACE, phases=()),
        lambda: plan(TRACE, phases=("mixed",)),
    ],
)
def test_bad_arguments(make: Callable[[], object]) -> None:
    with pytest.raises(BucketError):
        make()


def test_a_phase_that_is_not_planned_has_its_default() -> None:
    from llmc.buckets import default_ladder

    planned = plan(TRACE, SERVER, Limits(max_graphs=3), phases=("decode",))
    assert planned.ladder.prefill == default_ladder(8, 2048, 32).prefill
    assert len(planned.ladder.decode) == 3


def test_a_long_trace_is_replayed_in_stretches() -> None:
    count = MAX_REPLAYED + 50_000
    trace = Trace("long", np.arange(count, dtype=np.float64) * 0.5, np.full(count, 100), np.full(count, 3))
    planned = plan(trace, SERVER, Limits(max_graphs=2))
    # Every request prefills once and decodes twice, alone.
    assert [phase.steps for phase in planned.phases] == [count, 2 * count]


def test_thinned_grids_keep_a_valid_bound() -> None:
    rng = np.random.default_rng(3)
    size = 4000
    demand = Demand(
        "decode", rng.integers(1, 65, size), rng.integers(1, 4097, size), rng.integers(1, 9, size).astype(float)
    )
    problem = PhaseProblem.of(demand, ServerModel(4096, 64), TokensCost(), 16)
    assert problem.for_bound.weight.size < problem.weight.size
    assert problem.for_bound.weight.sum() == demand.weight.sum()
    small, rows, columns = problem.for_search()
    cells = tuple((int(rows[i]), int(columns[j])) for i, j in search(small, 11))
    shrunk = problem.shrink(cells)
    assert problem.full.total(shrunk) <= problem.full.total(cells)
    assert lower_bound(problem.for_bound, 11, problem.full.total(shrunk)) <= problem.full.total(shrunk)
    assert problem.evaluate(problem.buckets_of(shrunk)).cost == pytest.approx(problem.full.total(shrunk))


# ---- fixed ladders, costs, use -------------------------------------------------------------------------------------


@given(st.sampled_from(FAMILIES), st.integers(1, 40), st.integers(1, 5000), st.sampled_from([1, 16, 32, 128]))
def test_fixed_ladders_hold_the_maximum_within_the_count(family: str, count: int, maximum: int, unit: int) -> None:
    for ladder in length_ladders(family, count, maximum, unit):
        assert ladder[-1] == maximum
        assert 1 <= len(ladder) <= count
    for ladder in batch_ladders(family, count, min(maximum, 300)):
        assert ladder[-1] == min(maximum, 300)
        assert 1 <= len(ladder) <= count


def test_even_ramp_up_meets_the_count() -> None:
    assert [len(ladder) for ladder in length_ladders("ramp-up", 24, 4096, 32)] == [24]
    assert all(len(grid) <= 24 and (16, 4096) in grid for grid in grid_ladders("ramp-up", 24, 16, 4096, 32))


def test_measured_cost_passes_through_its_table() -> None:
    table = {Bucket("prefill", 1, 128): 1.0, Bucket("prefill", 1, 256): 3.0, Bucket("prefill", 4, 128): 2.0}
    model = MeasuredCost(table)

    def at(batch: int, seq: int) -> float:
        return float(model.cost("prefill", np.array([batch]), np.array([seq]))[0])

    assert [at(b.batch, b.seq) for b in table] == list(table.values())
    assert at(1, 192) == 2.0
    assert at(1, 512) == 7.0
    assert at(1, 1) == 1.0
    assert at(2, 128) == pytest.approx(4 / 3)
    assert at(7, 128) == 3.0
    with pytest.raises(BucketError, match="no decode bucket"):
        model.cost("decode", np.array([1]), np.array([1]))


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"x": 1}', '{"prefill:1x1": 0}', '{"prefill:1x1": "1"}', '{"prefill:1x1": true}',
     '{"prefill:1x1": NaN}', '{"prefill:1x1": [1]}', "[" * 100_000],
)  # fmt: skip
def test_bad_cost_tables(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(BucketError):
        MeasuredCost.read(path)


def test_flops_cost_by_hand() -> None:
    model = FlopsCost(SHAPE, flops_per_s=1.0, bytes_per_s=1e30, overhead_s=5.0)
    weights = 2 * (64 * 16 * 12 + 3 * 64 * 128)
    # 10 rows; pairs of 2 sequences of 5 tokens: 2 · 5 · 5 / 2; the output matrix for 2 rows.
    expected = 5 + 2 * weights * 10 + 4 * 2 * 4 * 16 * 25 + 2 * 64 * 100 * 2
    assert model.cost("prefill", np.array([2]), np.array([5]))[0] == expected
    slow = FlopsCost(SHAPE, flops_per_s=1e30, bytes_per_s=1.0, overhead_s=0.0)
    traffic = (weights + 6400) * 2 + 2 * 2 * 2 * 16 * 2 * 3 * 7
    assert slow.cost("decode", np.array([3]), np.array([7]))[0] == traffic


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_model_shape_names_what_is_missing(missing: str) -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100}  # fmt: skip
    assert ModelShape.from_config(config) == SHAPE
    del config[missing]
    with pytest.raises(BucketError, match=missing):
        ModelShape.from_config(config)


def test_usage_follows_selection() -> None:
    ladder = parse_spec("prefill=1x1,decode=[1,4]x[16,64]")
    demand = Demand("decode", np.array([1, 2, 4, 5]), np.array([10, 10, 60, 1]), np.array([1.0, 2.0, 3.0, 4.0]))
    used = usage(demand, ladder.decode)
    assert {str(u.bucket): u.steps for u in used.uses} == {
        "decode:1x16": 1, "decode:1x64": 0, "decode:4x16": 2, "decode:4x64": 3
    }  # fmt: skip
    assert used.missed == 4
    assert used.uses[0].padding == pytest.approx(6 / 16)


# ---- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    write_trace(tmp_path / "trace.jsonl", made_up_trace(80))
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_plan_writes_what_compile_reads(
    trace_file: Path, suffix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = trace_file.with_suffix(suffix)
    assert main(["buckets", "plan", "--trace", str(trace_file), "--max-graphs", "5", "-o", str(output)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("planned", "ramp-up", "exponential", "held", "optimal", str(output)))
    ladder = parse_spec(str(output))
    assert len(ladder.prefill) <= 5
    assert Bucket("decode", 16, 4096) in ladder.decode
    assert main(["buckets", "show", str(output), "--trace", str(trace_file)]) == 0
    assert "steps" in capsys.readouterr().out


def test_plan_as_json(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buckets", "plan", "--trace", str(trace_file), "--phase", "prefill", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    planned, *others = data["phases"]["prefill"]["ladders"]
    assert [other["name"] for other in others] == list(FAMILIES)
    assert planned["padded_tokens"] <= min(other["padded_tokens"] for other in others)
    assert data["phases"]["prefill"]["buckets"] == data["ladder"]["prefill"]


def test_show_as_json(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = "prefill=1x[128,4096],decode=[1,16]x4096"
    assert main(["buckets", "show", spec, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decode"] == [{"batch": 1, "seq": 4096}, {"batch": 16, "seq": 4096}]
    assert main(["buckets", "show", spec, "--trace", str(trace_file), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sum(row["share"] for row in data["prefill"]) == pytest.approx(1)
    assert data["missed"] == {"prefill": 0, "decode": 0}


def test_show_an_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"buckets": ["prefill:1x64", "decode:2x128", "mixed:2x64"]}')
    assert main(["buckets", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("prefill: 1", "mixed: 1", "decode: 1", "128"))
    for text in ("{}", '{"buckets": [3]}', "nonsense"):
        manifest.write_text(text)
        assert main(["buckets", "show", str(tmp_path)]) == 1
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--trace", "/nowhere.jsonl"],
        ["plan", "--trace", "TRACE", "-o", "buckets.yaml"],
        ["plan", "--trace", "TRACE", "--cost", "measured"],
        ["plan", "--trace", "TRACE", "--cost", "flops"],
        ["plan", "--trace", "TRACE", "--cost-table", "/nowhere.json"],
        ["plan", "--trace", "TRACE", "--model", "/nowhere"],
        ["plan", "--trace", "TRACE", "--max-memory", "lots"],
        ["plan", "--trace", "TRACE", "--max-padding", "0", "--max-graphs", "1"],
        ["plan", "--trace", "TRACE", "--max-num-seqs", "0"],
        ["plan", "--trace", "TRACE", "-o", "/nowhere/b.toml"],
        ["show", "prefill=1x1"],
        ["show", "/nowhere.toml"],
        ["show", "prefill=1x1,decode=1x1", "--trace", "/nowhere.jsonl"],
    ],
)
def test_errors_are_one_line(argv: list[str], trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buckets", *(str(trace_file) if word == "TRACE" else word for word in argv)]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("llmc: error: ")
    assert error.count("\n") == 1
    assert "internal error" not in error


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", 0.45),
        ("mooncake-fast25/conversation_trace.jsonl", 0.60),
    ],
)
def test_planned_padding_on_published_traces(name: str, share: float) -> None:
    if not (TRACES / name).is_file():
        pytest.skip("the trace is not on this machine; LLMC_TEST_TRACES names its folder")
    phase = plan(read_trace(TRACES / name), limits=Limits(max_graphs=24), phases=("prefill",)).phases[0]
    ramp_up = phase.others[0]
    assert (ramp_up.name, ramp_up.graphs) == ("ramp-up", 24)
    assert phase.score.tokens * phase.score.padding <= share * ramp_up.tokens * ramp_up.padding
