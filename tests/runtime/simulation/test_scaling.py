"""A trace on ranks, stages and replicas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.buckets import parse_spec
from llmc.buckets.arrangement import Arrangement, DividedModel, Link
from llmc.buckets.cost import FlopsCost, ModelShape
from llmc.buckets.grids import Limits
from llmc.buckets.step_cost import StepCosts
from llmc.buckets.trace import Trace, write_trace
from llmc.cli.main import main
from llmc.runtime.simulation.scaling import Stages, scaled, share_out
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf

SHAPE = ModelShape(hidden=512, intermediate=2048, layers=8, heads=8, kv_heads=8, head_dim=64, vocab=8000)
COSTS = StepCosts.of_model(FlopsCost(SHAPE, 1e11, 1e10), "a roofline")
LADDER = Ladder("grid", tuple(parse_spec("prefill=1x[64,256,512],decode=[1,4,8]x512", Limits(8, 512, 16))))
FAST, SLOW = Link(1e-6, 1e-7, 1e10), Link(1e-3, 1e-4, 1e8)


def some_trace(count: int = 200) -> Trace:
    rng = np.random.default_rng(5)
    ids = [[group, 100 + group * 10 + i % 3] for i in range(count) for group in (int(rng.integers(8)),)]
    return Trace(
        "some",
        np.sort(rng.uniform(0, 4, count)),
        rng.integers(130, 400, count),
        rng.integers(1, 60, count),
        np.arange(0, 2 * count + 1, 2, dtype=np.int64),
        np.array(ids, np.int64).ravel(),
        64,
    )


def test_replicas_share_all_requests_by_their_beginnings() -> None:
    trace = some_trace()
    tokens = trace.prompt_tokens + trace.output_tokens
    for replicas in (1, 3, 16):
        parts = share_out(trace, replicas)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(trace)))
        given = [int(tokens[part].sum()) for part in parts]
        assert max(given) <= 1.25 * tokens.sum() / replicas + 2 * tokens.max()
    owners: dict[int, set[int]] = {}
    for replica, part in enumerate(share_out(trace, 3)):
        for index in part.tolist():
            owners.setdefault(int(trace.prefix_of(index)[-1]), set()).add(replica)
    assert sum(len(found) == 1 for found in owners.values()) > len(owners) / 2


def test_a_single_rank_is_what_simulate_shows() -> None:
    what_if = WhatIf(some_trace(), Server(512, 8, 16), COSTS)
    found = scaled(what_if, LADDER, DividedModel(SHAPE, Arrangement(), SLOW))
    outcome = what_if.run(LADDER)
    np.testing.assert_array_equal(found.ttft_s, outcome.ttft_s)
    np.testing.assert_array_equal(found.total_s, outcome.total_s)
    assert found.message_share == 0
    span = WhatIf(what_if.trace, what_if.server, COSTS, speed=1e12).run(LADDER).span_s
    assert found.tokens_per_s == pytest.approx(what_if.outputs.sum() / span)


def test_more_is_faster_unless_messages_are_slow() -> None:
    what_if = WhatIf(some_trace(), Server(512, 8, 16), COSTS)

    def rate(link: Link, *numbers: int) -> float:
        return scaled(what_if, LADDER, DividedModel(SHAPE, Arrangement(*numbers), link)).tokens_per_s

    one = rate(FAST)
    assert 3 * one < rate(FAST, 4) < 4 * one
    assert 3 * one < rate(FAST, 1, 1, 4) < 4.2 * one
    assert rate(SLOW, 4) < one
    shares = [scaled(what_if, LADDER, DividedModel(SHAPE, Arrangement(4), link)).message_share for link in (FAST, SLOW)]
    assert 0 < shares[0] < 0.2
    assert 0.5 < shares[1] < 1


def test_stages_work_at_the_same_time_on_different_requests() -> None:
    trace = some_trace()
    one_token = replace(trace, output_tokens=np.ones(len(trace), np.int64))
    prompts = WhatIf(one_token, Server(512, 8, 16, prefix_cache=False), COSTS)
    # Steps that take as long as it takes to read all weights.
    reads = StepCosts.of_model(FlopsCost(SHAPE, 1e13, 1e10), "a roofline")
    short = Ladder("short", tuple(parse_spec("prefill=8x8,decode=8x64", Limits(8, 64, 16))))
    like = replace(trace, prompt_tokens=np.full(len(trace), 2), output_tokens=np.full(len(trace), 60))
    answers = WhatIf(like, Server(64, 8, 16, prefix_cache=False), reads)

    def gain(what_if: WhatIf, ladder: Ladder, count: int = 2, stages: Stages | None = None) -> float:
        many, one = (DividedModel(SHAPE, Arrangement(1, n), FAST) for n in (count, 1))
        found = scaled(what_if, ladder, many, stages=stages or Stages()).tokens_per_s
        return found / scaled(what_if, ladder, one).tokens_per_s

    for what_if, ladder in ((prompts, LADDER), (answers, short)):
        in_turn = gain(what_if, ladder, stages=Stages(steps_in_flight=1))
        assert in_turn == pytest.approx(1, rel=0.01)
        assert 1.6 < gain(what_if, ladder) < 2
        assert 3 < gain(what_if, ladder, 4) < 4
    # Steps of unequal length leave a stage idle, unless another one is in flight.
    assert gain(prompts, LADDER) < 1.8 < 1.9 < gain(prompts, LADDER, stages=Stages(steps_in_flight=3)) < 2
    # Prompts mostly compute, and one memory bus of all stages is no matter. Answers mostly read.
    assert gain(prompts, LADDER, stages=Stages(bus_share=1)) == pytest.approx(gain(prompts, LADDER), rel=0.01)
    assert gain(answers, short, stages=Stages(bus_share=0.5)) == pytest.approx(gain(answers, short))
    # Nine tenths of a step are weights that it reads.
    for share in (0.65, 1):
        wanted = gain(answers, short) / (2 * 0.9 * share)
        assert gain(answers, short, stages=Stages(bus_share=share)) == pytest.approx(wanted, rel=0.03)


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "trace.jsonl", some_trace(40))
    config = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
              "vocab_size": 8000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["buckets", "scale", "--trace", str(tmp_path / "trace.jsonl"), "--model", str(tmp_path), "--buckets",
             "prefill=1x[64,512],decode=[1,8]x512", "--ranks", "1", "--ranks", "4x2x3"]  # fmt: skip
    assert main(asked) == 0
    assert "4x2x3" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)["arrangements"]
    assert one["of_first"] == one["of_first_per_rank"] == 1
    assert other["of_first_per_rank"] == pytest.approx(other["of_first"] / 24)
    assert other["message_share"] > 0
    assert main([*asked, "--ranks", "3"]) == 1
    error = capsys.readouterr().err
    assert "8 attention heads cannot be divided among 3 ranks" in error
    ranked = tmp_path / "ranked.llmc"
    ranked.mkdir()
    (ranked / "manifest.json").write_text(json.dumps({"tensor_parallel": 2}))
    assert main([*asked, "--cost-table", str(ranked)]) == 1
    assert "ranked.llmc runs on several ranks: give costs of one rank" in capsys.readouterr().err
