"""Artifacts for several ranks, run by as many processes: the bits of requests, and what is left when a process ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.cli.main import main
from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer
from llmc.runtime.binding.ranks import LocalRanks, RanksError, own_cpus, parse_ranks, shares_of
from llmc.runtime.binding.sampling import SamplingParams as EngineParams
from llmc.runtime.llm import LLM
from llmc.runtime.outputs import RequestOutput
from llmc.runtime.params import SamplingParams
from llmc.runtime.warm_up.budget import BudgetOptions, plan_budget
from llmc.runtime.warm_up.cut_steps import least_cut_rows

from support.compiled import Pages, random_tokens, replay
from support.lockstep import Lockstep
from support.processes import gone, until

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 5], [100, 200, 300, 400] * 9, [5, 6, 7, 8] * 5, [5, 6, 7, 8] * 5 + [9]]


def _greedy(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, logprobs=2))


def _bits(output: RequestOutput) -> list[object]:
    return [(one.token_ids, repr(one.logprobs)) for one in output.outputs]


def _logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    return np.array([[step.logprob for step in output.outputs[0].logprobs or []] for output in outputs])


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_generate_what_one_does_and_the_same_bits_in_any_company(
    artifacts: dict[int, Path], ranks: int
) -> None:
    with LLM(artifacts[1], num_threads=1) as llm:
        one = _greedy(llm, PROMPTS)
    with LLM(artifacts[ranks], num_threads=1, device_options={"ranks": ranks}) as llm:
        together = _greedy(llm, PROMPTS)
        alone = [_greedy(llm, [prompt])[0] for prompt in PROMPTS]  # the prefix cache has some of them by now
        pids = llm.engine.ranks.pids
        assert len(pids) == ranks - 1
        assert llm.engine.device_stats()["working_ranks"] == ranks
    until(lambda: all(map(gone, pids)))
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in one]
    np.testing.assert_allclose(_logprobs(together), _logprobs(one), rtol=1e-5, atol=1e-5)
    # A pool in which sequences make way for one another, other buckets, chunks of prompts and threads.
    with LLM(artifacts[ranks], num_threads=2, num_blocks=7, prefix_cache=False, max_tokens_per_step=8) as llm:
        crowded = _greedy(llm, PROMPTS)
    assert [*map(_bits, alone)] == [*map(_bits, together)] == [*map(_bits, crowded)]


@pytest.mark.parametrize("least_rows", [2, 9])
def test_steps_in_two_parts_have_the_bits_of_whole_ones(artifacts: dict[int, Path], least_rows: int) -> None:
    """Decodes, prompts that both parts have rows of, and chunks: the same bits from 2 rows on, and only for prompts."""
    scored = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    found = []
    for overlap, threads in (("off", 1), (least_rows, 2)):
        with LLM(artifacts[2], num_threads=threads, device_options={"overlap_sums": overlap}) as llm:
            outputs = _greedy(llm, PROMPTS)
            found.append([*map(_bits, outputs), repr(llm.generate(PROMPTS[:1], scored)[0].prompt_logprobs)])
            stats = llm.engine.device_stats()
    assert found[0] == found[1]
    assert stats["overlap_rows"] == least_rows
    assert 0 < stats["overlapped_steps"] <= stats["replayed_steps"]
    assert stats["all_reduces"] == 5 * (stats["overlapped_steps"] + stats["replayed_steps"])
    with Artifact(artifacts[2]) as artifact, pytest.raises(RanksError, match="overlap-sums '1' is no number of rows"):
        Engine(artifact, num_threads=1, overlap_sums=1)


def _profiled(artifact: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    given = ["--phase", "prefill", "--threads", "1", "--repeat", "1", "--json", *flags]
    assert main(["profile", str(artifact), *given]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def _collectives(profile: dict[str, Any]) -> dict[str, int]:
    """How many there are of each; all must take time."""
    found = [one for one in profile["ops"] if one["name"] in ("all_reduce", "all_gather", "pass_on")]
    assert all(one["us"] > 0 for one in found)
    return {one["name"]: one["commands"] for one in found}


def test_a_profile_has_the_time_of_sums_and_of_each_collective(
    artifacts: dict[int, Path], staged: dict[tuple[int, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    told = _profiled(artifacts[2], capsys, "--overlap-sums", "16")
    sums = told["sums"]
    assert sums["count"] == 10  # five of each part
    assert sums["exposed_us"] > 0 == sums["hidden_us"]
    assert sums["overlap_rows"] == 16
    assert _collectives(told) == {"all_reduce": 5, "all_gather": 1}
    # Rank 0 sends rows on, and waits for the logits, which the last stage gathers.
    assert _collectives(_profiled(staged[1, 2], capsys)) == {"pass_on": 2}


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bf16"}, {"dtype": "f32", "target": "reference", "quant": QuantConfig("w4a16", group_size=32)}],
    ids=["bf16", "w4a16-reference"],
)
def test_processes_have_the_bits_of_ranks_one_after_the_other(
    options: dict[str, Any], artifacts: dict[int, Path], tmp_path: Path, kernel_cache: Path
) -> None:
    model, path = artifacts[1].parent / "model", tmp_path / "two"
    common: dict[str, Any] = {"buckets": "prefill=1x16,decode=1x32", "block_size": 16, "jobs": 1, "tokenizer": "none"}
    compile_model(CompileConfig(model, path, cache_dir=kernel_cache, tensor_parallel=2, **common, **options))

    def logits(machine: Any) -> np.ndarray:
        pages = Pages(8, 16)
        prompt = replay(machine, 0, pages, [(0, random_tokens(500, 12, 1), 0)])
        return np.concatenate([prompt, replay(machine, 1, pages, [(0, [7], 12)])])

    with Artifact(path) as artifact, Replayer(artifact, num_threads=1, num_blocks=8) as replayer:
        found = logits(replayer)
    np.testing.assert_array_equal(found.view(np.int32), logits(Lockstep(path, 8)).view(np.int32))


def test_a_rank_that_is_killed_ends_running_requests_and_says_so(artifacts: dict[int, Path]) -> None:
    with Artifact(artifacts[4]) as artifact, Engine(artifact, num_threads=1) as engine:
        assert isinstance(engine.ranks, LocalRanks)
        engine.submit(PROMPTS[0], EngineParams(max_tokens=40))
        engine.step()
        victim, *others = engine.ranks.pids
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(LlmcError, match=rf"Rank 1 of 4 has failed: its process {victim} .*SIGKILL") as raised:
            until(lambda: not engine.step())
        assert raised.value.name == "internal"
        with pytest.raises(LlmcError, match="Rank 1 of 4"):
            engine.wait(0)
        assert engine.device_stats()["working_ranks"] == 0
        until(lambda: all(map(gone, others)))


def test_an_idle_engine_learns_that_a_rank_was_killed(artifacts: dict[int, Path]) -> None:
    with Artifact(artifacts[2]) as artifact, Engine(artifact, num_threads=1) as engine:
        assert isinstance(engine.ranks, LocalRanks)
        os.kill(engine.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(LlmcError, match=r"Rank 1 of 2 has failed.*SIGKILL"):
            until(lambda: engine.wait(0.05) is None)


def test_no_rank_outlives_the_process_of_the_engine(artifacts: dict[int, Path]) -> None:
    program = (
        "import sys, time\nfrom llmc.runtime.binding import Artifact, Engine\n"
        "engine = Engine(Artifact(sys.argv[1]), num_threads=1)\n"
        "print(*engine.ranks.pids, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(artifacts[4])], stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        assert len(pids) == 3
        assert not any(map(gone, pids))
        leader.kill()
    until(lambda: all(map(gone, pids)))


def test_what_ranks_refuse_leaves_no_process(artifacts: dict[int, Path]) -> None:
    with Artifact(artifacts[2]) as artifact, Artifact(artifacts[1]) as draft:
        with pytest.raises(LlmcError, match="A draft model is for one rank and this device has 2"):
            Engine(artifact, num_threads=1, draft=draft, speculate_tokens=2)
        with Engine(artifact, num_threads=1) as engine, pytest.raises(LlmcError, match="takes no graphs once it was"):
            engine.add_graphs(artifact)
        with pytest.raises(RanksError, match="is for 3 ranks and the artifact for 2"):
            Engine(artifact, ranks="0|0|0")
        with pytest.raises(RanksError, match="'2' is for 2 ranks and the artifact for 1: leave ranks out, or compile"):
            Engine(draft, ranks=2)


def test_cpus_are_shared_by_nodes_and_cores() -> None:
    assert shares_of([[[0, 4], [1, 5], [2, 6], [3, 7]]], 2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert shares_of([[[0], [1], [2]]], 2) == [{0}, {1, 2}]
    assert shares_of([[[0, 2], [1, 3]]], 4) == [{0}, {2}, {1}, {3}]
    assert shares_of([[[0], [1]]], 3) == [{0, 1}] * 3
    two = [[[0], [2], [4]], [[1], [3], [5], [7]]]
    assert shares_of(two, 2) == [{0, 2, 4}, {1, 3, 5, 7}]
    assert shares_of(two, 4) == [{0}, {2, 4}, {1, 3}, {5, 7}]
    assert shares_of([*two, [[6]], [[8]]], 2) == [{0, 2, 4, 1, 3, 5, 7}, {6, 8}]
    assert shares_of(two, 3) == [{0, 2}, {4, 1}, {3, 5, 7}]
    assert shares_of([[[0]], [[1], [3]]], 4) == [{0, 1, 3}] * 4


def test_own_cpus_are_found_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine whose nodes have every other CPU; CPU 4 is not ours."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    for cpu in range(6):
        folder = tmp_path / "cpu" / f"cpu{cpu}"
        (folder / f"node{cpu % 2}").mkdir(parents=True)
        (folder / "topology").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}")
    assert own_cpus(tmp_path) == [[[0], [2]], [[1, 5], [3]]]
    assert own_cpus(tmp_path / "none") == [[[0], [1], [2], [3], [5]]]


def test_ranks_are_a_number_or_lists_of_cpus() -> None:
    assert parse_ranks("0-1|1, 0", 2) == [{0, 1}, {0, 1}]
    assert parse_ranks(" 2", 2) is parse_ranks("1", 1) is None
    assert parse_ranks("0|99999", 2, own=0) == [{0}, {99999}]
    for text, num_ranks, said in (
        ("0|4-2", 2, r"'4-2': give the number of ranks, or the CPUs of each, such as 0-3\|4-7"),
        ("two", 2, "'two': give the number of ranks"),
        ("0|", 2, "'': give the number"),
        ("-1", 2, "'-1': give the number"),
        ("0|99999", 2, "names CPU 99999"),
        ("0|1-99999999999999", 2, "which this process may not use"),
        ("4", 2, "'4' is for 4 ranks and the artifact for 2"),
        ("0-1", 1, "runs without ranks"),
    ):
        with pytest.raises(RanksError, match=said):
            parse_ranks(text, num_ranks)


def test_which_steps_a_budget_counts_twice(
    artifacts: dict[int, Path], staged: dict[tuple[int, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the device cuts: with a number anywhere, and over MPI, where that is measured later."""

    def rows(artifact: Path, **options: Any) -> int:
        with Artifact(artifact) as opened:
            return least_cut_rows(artifact, opened.info, options)

    shared = [rows(artifacts[2], **given) for given in ({}, {"overlap_sums": "off"}, {"overlap_sums": 7})]
    assert shared == [0, 0, 7]
    for name, value in (("PMI_RANK", "0"), ("PMI_SIZE", "2")):
        monkeypatch.setenv(name, value)
    over_mpi = [rows(artifacts[2], **given) for given in ({}, {"overlap_sums": "off"}, {"overlap_sums": 7})]
    assert over_mpi == [64, 0, 7]
    assert rows(artifacts[2], eager=True) == rows(artifacts[1]) == rows(staged[2, 2]) == 0


def test_each_rank_has_its_part_of_a_budget(artifacts: dict[int, Path]) -> None:
    with Artifact(artifacts[2]) as of_two, Artifact(artifacts[1]) as of_one:
        info, graphs, one = of_two.info, of_two.graphs(), of_one.info
    assert info.weight_bytes / 2 < info.rank_weight_bytes < info.weight_bytes
    assert one.rank_weight_bytes == one.weight_bytes
    plan = plan_budget(info, graphs, range(len(graphs)), 64 << 20, BudgetOptions())
    alone = dataclasses.replace(info, num_ranks=1, weight_bytes=info.rank_weight_bytes)
    same = plan_budget(alone, graphs, range(len(graphs)), 32 << 20, BudgetOptions())
    assert plan.lines == ("2 of 2 ranks are on this host: each has 32.0 MiB", *same.lines)
    assert dataclasses.replace(plan, lines=()) == dataclasses.replace(same, lines=())
    with LLM(artifacts[2], num_threads=1, memory_utilization=0.01) as llm:
        assert llm.budget is not None
        assert _greedy(llm, PROMPTS[:1])[0].outputs[0].token_ids
        stats = llm.engine.device_stats()
        assert stats["all_reduces"] % (2 * 2 + 1) == 0 < stats["all_reduce_ns"]  # two a layer, and the embedding
        assert stats["all_gathers"] * 5 == stats["all_reduces"]
