"""Artifacts whose layers are divided among stages, run by as many processes: they give the bits of undivided ones."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.graphs_format import SECTIONS, layout, tables_crc32
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer
from llmc.runtime.binding.ranks import LocalRanks
from llmc.runtime.binding.sampling import SamplingParams as EngineParams
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.graphs_file import parse_graphs, read_graphs
from llmc.runtime.llm import LLM
from llmc.runtime.outputs import RequestOutput
from llmc.runtime.params import SamplingParams

from support.compiled import Pages, random_tokens, replay
from support.falcon_h1_families import OF_FALCON_H1
from support.inspected import inspected, inspected_text
from support.mamba_families import OF_MAMBA
from support.marks import rare
from support.processes import gone, until
from support.qwen_families import DELTA_NETS
from support.tiny_models import make_tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 5], [100, 200, 300, 400] * 9, [5, 6, 7, 8] * 5, [5, 6, 7, 8] * 5 + [9]]
PROMPTS += [[i, 2 * i, 3 * i] * (1 + i % 5) for i in range(10, 17)]
SIZES: dict[str, Any] = {
    "vocab_size": 516, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
COMMON: dict[str, Any] = {"block_size": 16, "jobs": 1}
Artifacts = dict[tuple[int, int], Path]


def generated(llm: LLM) -> list[object]:
    """Ids and logprobs of greedy and of drawn tokens."""
    found: list[RequestOutput] = []
    for temperature in (0.0, 0.8):
        found += llm.generate(
            PROMPTS, SamplingParams(max_tokens=12, temperature=temperature, seed=7, logprobs=2, ignore_eos=True)
        )
    return [(one.token_ids, repr(one.logprobs)) for output in found for one in output.outputs]


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), rare(1, 4), (2, 2)])
def test_stages_change_no_bit(staged: Artifacts, ranks: int, stages: int) -> None:
    with LLM(staged[ranks, 1], num_threads=1) as llm:
        wanted = generated(llm)
    with LLM(staged[ranks, stages], num_threads=1) as llm:
        found = generated(llm)
        again = generated(llm)  # the prefix cache has all prompts by now
        pids, stats = llm.engine.ranks.pids, llm.engine.device_stats()
        assert len(pids) == ranks * stages - 1
        assert stats["working_ranks"] == ranks * stages
        assert stats["pass_on_ns"] > 0
        assert stats["pass_ons"] > 0
        assert stats["pass_ons"] % 2 == 0
        assert llm.engine.stats.num_ahead_steps > 0
    until(lambda: all(map(gone, pids)))
    assert found == wanted
    assert again == wanted
    # A pool in which sequences make way for one another, chunks of prompts, and other numbers of threads; also with
    # guesses, behind which a step waits for the one before.
    crowded: dict[str, Any] = {"num_blocks": 9, "prefix_cache": False, "max_tokens_per_step": 8}
    for speculate in (None, "ngram:3"):
        with LLM(staged[ranks, stages], num_threads=2, speculate=speculate, **crowded) as llm:
            assert generated(llm) == wanted
            stats = llm.engine.stats
            assert (stats.num_ahead_steps > 0) is (speculate is None)
            assert stats.num_preemptions > 0
            assert stats.num_mixed_steps > 0


def logits(path: Path, weights: str) -> np.ndarray:
    """Of a prompt, a chunk behind it, a decode step, and a mixed step of two."""
    a, b = random_tokens(500, 24, 1), random_tokens(500, 9, 2)
    steps: list[Any] = [
        (0, [(0, a[:12], 0)]),
        (0, [(0, a[12:20], 12)]),
        (1, [(0, a[20:21], 20)]),
        (2, [(0, a[21:22], 21), (1, b[:7], 0)]),
    ]
    with Artifact(path) as artifact, Replayer(artifact, num_threads=1, num_blocks=8, weight_memory=weights) as replayer:
        pages = Pages(8, 16)
        return np.concatenate([replay(replayer, graph, pages, given) for graph, given in steps])


@pytest.mark.parametrize(
    ("family", "fields", "options"),
    [
        ("qwen3", {}, {"dtype": "bf16"}),
        rare("llama", {"tie_word_embeddings": False}, {"dtype": "bf16", "quant": QuantConfig("w8a8")}),
        rare("gemma2", {"query_pre_attn_scalar": 16}, {"dtype": "bf16"}),
        (
            "gemma4_text",
            {
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "sliding_window": 6,
                "num_key_value_heads": 2,
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 10,
                "vocab_size_per_layer_input": 516,
            },
            {"dtype": "bf16"},
        ),
        rare(
            "qwen3_5_text",
            {
                **DELTA_NETS,
                "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
                "num_key_value_heads": 2,
            },
            {"dtype": "f32"},
        ),
        rare("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}, {"dtype": "f32"}),
        rare("falcon_h1", {**OF_FALCON_H1["falcon_h1"][1]}, {"dtype": "bf16"}),
        rare("nemotron_h", {**OF_MAMBA["nemotron_h"][1], "tie_word_embeddings": False}, {"dtype": "bf16"}),
        rare("gpt_neox", {"use_parallel_residual": True, "tie_word_embeddings": False}, {"dtype": "f32"}),
        rare("bloom", {"intermediate_size": 256}, {"dtype": "f32"}),
    ],
)
def test_stages_leave_the_logits_of_models(
    family: str, fields: dict[str, Any], options: dict[str, Any], tmp_path: Path, kernel_cache: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", family, **{**SIZES, **fields})
    ladder = "prefill=1x16,decode=1x32,mixed=2x16"
    for stages in (1, 3):
        compile_model(
            CompileConfig(
                model, tmp_path / str(stages), buckets=ladder, cache_dir=kernel_cache, tokenizer="none",
                pipeline_parallel=stages, **COMMON, **options,
            )
        )  # fmt: skip
    wanted = logits(tmp_path / "1", "mapped")
    for weights in ("mapped", "copied"):
        np.testing.assert_array_equal(logits(tmp_path / "3", weights).view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_is_cancelled_in_flight_changes_nothing_else(in_flight: int, staged: Artifacts) -> None:
    def tokens(path: Path, cancels: bool, **options: Any) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        with Artifact(path) as artifact, Engine(artifact, num_threads=1, **options) as engine:
            ids = [
                engine.submit(prompt, EngineParams(max_tokens=20, temperature=0, ignore_eos=True)) for prompt in PROMPTS
            ]
            for step in range(10_000):
                if not engine.step() and not engine.stats.num_running:
                    break
                for event in engine.poll():
                    if event.kind == "token":
                        found.setdefault(ids.index(event.request_id), []).append(event.token_id)
                if cancels and step in (3, 8, 9):
                    engine.cancel(ids[step])
            engine.check_integrity()
            assert (engine.stats.num_ahead_steps > 0) is (options.get("steps_in_flight", 1) > 1)
            assert engine.stats.num_free_blocks == engine.stats.num_blocks
        return found

    wanted = tokens(staged[1, 1], cancels=False)
    found = tokens(staged[1, 2], cancels=True, steps_in_flight=in_flight)
    for index, mine in wanted.items():
        told = found.get(index, [])
        assert told == (mine[: len(told)] if index in (3, 8, 9) else mine)


def test_a_killed_stage_is_named(staged: Artifacts) -> None:
    with Artifact(staged[2, 2]) as artifact, Engine(artifact, num_threads=1) as engine:
        for prompt in PROMPTS:
            engine.submit(prompt, EngineParams(max_tokens=40, ignore_eos=True))
        for _ in range(4):
            engine.step()
        assert engine.stats.num_ahead_steps > 0
        assert isinstance(engine.ranks, LocalRanks)
        pids = engine.ranks.pids
        os.kill(pids[-1], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(LlmcError, match=rf"Rank 3 of 4 has failed: its process {pids[-1]} .*SIGKILL"):
            until(lambda: not engine.step())
        assert time.monotonic() - killed < 5
        assert not engine.stats.num_running
        until(lambda: all(map(gone, pids)))


def test_an_engine_ends_with_steps_in_flight(staged: Artifacts) -> None:
    with Artifact(staged[1, 4]) as artifact, Engine(artifact, num_threads=1) as engine:
        for prompt in PROMPTS:
            engine.submit(prompt, EngineParams(max_tokens=40, ignore_eos=True))
        for _ in range(6):
            engine.step()
        assert engine.stats.num_ahead_steps > 0
        assert isinstance(engine.ranks, LocalRanks)
        pids = engine.ranks.pids
    until(lambda: all(map(gone, pids)))


def test_each_stage_has_its_layers_alone(staged: Artifacts) -> None:
    one, tables = read_graphs(staged[1, 1]), read_graphs(staged[1, 4])
    assert [weight.name for weight in tables.weights] == [weight.name for weight in one.weights]
    assert tables.header.weights_bytes == one.header.weights_bytes
    assert [(stage.first_layer, stage.num_layers) for stage in tables.stages] == [(i, 1) for i in range(4)]
    names = [weight.name for weight in tables.weights_of(0)]
    read = [{names[index] for index in tables.weights_read(stage)} for stage in range(4)]
    for stage, mine in enumerate(read):
        assert {name.split(".")[1] for name in mine if name.startswith("layers.")} == {str(stage)}
    assert "embed.weight" in read[0] & read[3]
    assert "embed.weight" not in read[1] | read[2]
    assert set().union(*read) == set(names)
    with Artifact(staged[1, 4]) as artifact, Artifact(staged[1, 1]) as undivided:
        assert artifact.info.num_ranks == 4
        assert artifact.info.kv_block_bytes * 4 == undivided.info.kv_block_bytes
        sizes = [sum(tables.weights[i].bytes for i in tables.weights_read(stage)) for stage in range(4)]
        assert artifact.info.rank_weight_bytes == max(sizes) < undivided.info.rank_weight_bytes
    stages = inspected(staged[1, 4])["ranks"]["stages"]
    assert [stage["weight_bytes"] for stage in stages] == sizes
    text = inspected_text(staged[2, 2])
    assert "\nranks: 4, in 2 stages" in text
    assert "\nstage 1: layers 2 to 3, on ranks 2 to 3, each of which reads " in text


def _changed(data: bytes, kind: str, index: int, field: int, value: int) -> bytes:
    """graphs.bin with another value of a 32-bit field of a record."""
    changed, header = bytearray(data), layout("header")
    for section in range(struct.unpack_from("<I", data, 24)[0]):
        number, size, offset, _ = struct.unpack_from("<IIQQ", data, header.size + 24 * section)
        if number == SECTIONS[kind]:
            struct.pack_into("<I", changed, offset + size * index + 4 * field, value)
    struct.pack_into("<I", changed, 28, tables_crc32(changed))
    return bytes(changed)


@pytest.mark.parametrize(
    ("kind", "index", "field", "value", "said"),
    [
        ("stage", 1, 0, 0, "stage 1 has 2 layers from 0 on, and the ones before end at 2"),
        ("stage", 1, 1, 1, "stages have 3 layers of 4"),
        ("stage", 0, 1, 0, "stage 0 has 0 layers"),
        ("collective", 0, 0, 3, "collective 0 has (the )?unknown op 3"),
        ("collective", 0, 0, 0, "collective 0 has (the )?unknown op 0"),
        ("collective", 0, 4, 2, "collective 0 is of stage 2 of 2"),
        ("collective", 0, 4, 1, "passes on results of stage 1 in stage 0"),
        ("collective", 1, 4, 0, "(passes on results of stage 0 in stage 1|ends in stage 1)"),
        ("collective", 0, 2, 1 << 20, "(operands of other kinds or sizes|bytes, .* are needed)"),
    ],
)
def test_damaged_stages_are_refused(
    kind: str, index: int, field: int, value: int, said: str, staged: Artifacts, tmp_path: Path
) -> None:
    good = (staged[1, 2] / "graphs.bin").read_bytes()
    damaged = _changed(good, kind, index, field, value)
    with pytest.raises(FormatError, match=said):
        parse_graphs(damaged)
    path = tmp_path / "damaged"
    shutil.copytree(staged[1, 2], path)
    (path / "graphs.bin").write_bytes(damaged)
    with pytest.raises(LlmcError, match=said):
        Artifact(path)
