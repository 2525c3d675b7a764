"""Ladders for prefill and decode servers: only what each of them computes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from llmc.buckets import BucketError, planner
from llmc.buckets.demand import ServerModel, demands
from llmc.buckets.roles import decode_server, prefill_ladder, prefill_trace
from llmc.buckets.trace import Trace, write_trace

PROMPTS = np.array([5, 32, 33, 100, 640, 1000, 2000, 3001], np.int64)
TRACE = Trace("t", np.arange(8, dtype=np.float64), PROMPTS, PROMPTS * 0 + 50)
SERVER = ServerModel(max_model_len=4096, max_num_seqs=4)


def test_a_prefill_server_gets_whole_blocks_of_long_prompts() -> None:
    got = prefill_trace(TRACE, 32, 100)
    assert got.prompt_tokens.tolist() == [96, 608, 992, 1984, 3000 // 32 * 32]
    assert got.output_tokens.tolist() == [1] * 5
    plan = planner.plan(got, SERVER, planner.Limits(max_graphs=5), phases=("prefill",))
    ladder = prefill_ladder(plan.ladder, SERVER)
    assert len(ladder.decode) == 1
    assert not ladder.mixed
    assert {bucket.seq for bucket in ladder.prefill} >= {96, 992, 1984, 2976}
    with pytest.raises(BucketError, match="lower --hand-over-tokens"):
        prefill_trace(TRACE, 32, 5000)


def test_a_decode_server_computes_what_is_left() -> None:
    server = decode_server(SERVER, 32, 100)
    rest = demands(TRACE, server, ("prefill",))["prefill"]
    wanted = sorted([5, 32, 33, *((prompt - 1) % 32 + 1 for prompt in PROMPTS.tolist() if prompt >= 100)])
    assert sorted(np.repeat(rest.seq, rest.weight.astype(int)).tolist()) == wanted
    decode = demands(TRACE, server, ("decode",))["decode"]
    assert decode.seq.max() == 3001 + 49
    assert server.max_chunk == 512
    assert decode_server(ServerModel(max_model_len=16), 32, 100).max_chunk == 16


@pytest.mark.parametrize(("role", "most"), [("prefill", 4096), ("decode", 512)])
def test_the_command_writes_a_ladder_of_the_role(
    role: str, most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from llmc.cli.main import main

    write_trace(tmp_path / "trace.jsonl", TRACE)
    output = tmp_path / "b.toml"
    options = ["--role", role, "--hand-over-tokens", "100", "--max-graphs", "6", "-o", str(output)]
    assert main(["buckets", "plan", "--trace", str(tmp_path / "trace.jsonl"), *options]) == 0
    ladder = tomllib.loads(output.read_text())
    assert max(seq for _, seq in ladder["prefill"]) == most
    assert (len(ladder["decode"]) == 1) == (role == "prefill")
    assert main(["buckets", "plan", "--trace", str(tmp_path / "trace.jsonl"), *options, "--phase", "decode"]) != 0
    assert "leave out --phase" in capsys.readouterr().err
