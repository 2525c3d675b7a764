"""Decode buckets for a total of contexts: the bits of those for the longest one, on every target, in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.buckets import Bucket, BucketError
from llmc.compiler.config import CompileError
from llmc.compiler.extend import add_buckets
from llmc.graphs_format import GRAPH_INPUTS
from llmc.manifest import read_manifest
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer, SamplingParams
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, check_every_bucket, compile_tiny, random_tokens, replay
from support.engine_driver import MIXED_LADDER, bits, drive, mixed_requests
from support.families import CASES
from support.many_scores import WITH_ALL, checkpoint_with_all
from support.new_family import registered, targets_here
from support.opencl import needs_opencl
from support.parity import check_bits, reference_logits
from support.quirky_model import eager_logits
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
# Three sequences of 40 tokens have nine blocks of 16.
LADDER = "prefill=[2]x[16,32],decode=[4]x[64]+[4]x[160]total"
OPTIONS = {"buckets": LADDER, "dtype": "f32", "block_size": 16}


def check_forms(artifact: Artifact) -> None:
    """One long sequence among short ones: the same step in both forms, and what a total does not hold."""
    by_name = {str(graph.bucket): index for index, graph in enumerate(artifact.graphs())}
    tokens, results = random_tokens(artifact.info.vocab_size, 64), []
    for graph in (by_name["decode:4x64"], by_name["decode:4x160total"]):
        replayer, pages = Replayer(artifact, num_threads=2, num_blocks=20), Pages(20, 16, seed=4)
        for seq, length in enumerate((46, 5, 17)):
            for start in range(0, length, 32):
                replay(
                    replayer, by_name["prefill:2x32"], pages, [(seq, tokens[start : min(start + 32, length)], start)]
                )
        # Two tokens of one sequence, as guesses bring them; the others in another order than that of their blocks.
        step = [(2, tokens[17:19], 17), (0, tokens[46:47], 46), (1, tokens[5:6], 5)]
        results.append(replay(replayer, graph, pages, step))
        replayer.close()
    first, second = (found.view(np.int32) for found in results)
    np.testing.assert_array_equal(first, second)
    with Replayer(artifact, num_threads=1, num_blocks=20) as replayer:
        # What was never written may be read: only the counts are looked at.
        step = [(seq, tokens[length : length + 1], length) for seq, length in enumerate((60, 60, 40))]
        pages = Pages(20, 16)
        for seq, _, length in step:
            pages.slots(seq, range(length))
        with pytest.raises(LlmcError, match=r"context_lens\[0 … 2\] fill 11 blocks, the graph holds 10 in all"):
            replay(replayer, by_name["decode:4x160total"], pages, step)


def check(target: str, kv_dtype: str, folder: Path, cache: Path) -> None:
    """A model with windows, sinks, caps and biases."""
    with registered(WITH_ALL):
        model = checkpoint_with_all(folder / "model")
        with compile_tiny(model, folder / "out", cache, target=target, kv_dtype=kv_dtype, **OPTIONS) as artifact:
            tokens = random_tokens(artifact.info.vocab_size, 48)
            bound = {"f32": 1e-4, "int8": 5e-2}[kv_dtype]
            check_every_bucket(artifact, tokens, eager_logits(model, tokens, "f32"), bound)
            check_forms(artifact)
            check_bits(artifact)


def test_bits_of_both_forms(llama: tuple[Path, Artifact], tmp_path: Path, kernel_cache: Path) -> None:
    with compile_tiny(llama[0], tmp_path / "out", kernel_cache, **OPTIONS) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(llama[0], tokens))
        check_forms(artifact)
        check_bits(artifact)
    tables = read_graphs(tmp_path / "out")
    of_longest, of_total = tables.graphs[2:]
    assert (of_longest.name, of_total.name) == ("decode:4x64", "decode:4x160total")
    # The same kernels; of the total the table is ten blocks, not four rows.
    kernels = [[command.kernel for command in tables.commands_of(graph)] for graph in (of_longest, of_total)]
    assert kernels[0] == kernels[1]
    assert (tables.header.version, read_manifest(tmp_path / "out")["format_version"]) == (8, 8)
    table = GRAPH_INPUTS.index("block_tables")
    assert (of_longest.input_shape(table), of_total.input_shape(table)) == ((4, 4), (10,))


@needs_opencl
@pytest.mark.exhaustive
def test_all_that_attention_knows_on_opencl(tmp_path: Path, kernel_cache: Path) -> None:
    check("opencl", "f32", tmp_path, kernel_cache)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
def test_all_that_attention_knows_on_every_target(kv_dtype: str, tmp_path: Path, kernel_cache: Path) -> None:
    for target in targets_here():
        check(target, kv_dtype, tmp_path / target, kernel_cache)


@pytest.mark.exhaustive
def test_latent_attention(tmp_path: Path, kernel_cache: Path) -> None:
    family, fields = CASES["deepseek_v2-lite"]
    model = make_tiny_model(tmp_path / "model", family, **fields)
    with compile_tiny(model, tmp_path / "out", kernel_cache, **OPTIONS) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens))
        check_forms(artifact)


def test_an_engine_with_totals_alone(llama: tuple[Path, Artifact], kernel_cache: Path, tmp_path: Path) -> None:
    """Prefix hits, copies of blocks, preemption, misses and guesses, with the bits of the longest form."""
    ladder = "prefill=[1,8]x[8],decode=[1,8]x[128,256]total"
    options = {"buckets": ladder, "dtype": "f32", "block_size": 16, "max_model_len": 128}
    guessing: dict[str, Any] = {"speculate_tokens": 3, "speculate_always": 1}
    repeats = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={7: 30.0}, num_logprobs=1)
    requests = [*mixed_requests(), (random_tokens(500, 9), repeats)]
    with Engine(llama[1], num_threads=1) as engine:
        alone = [[bits(output) for output in outputs] for outputs in drive(engine, requests)]
    with compile_tiny(llama[0], tmp_path / "out", kernel_cache, **options) as artifact:
        names, used = [str(graph.bucket) for graph in artifact.graphs()], set[str]()
        for more in ({"num_blocks": 100}, {"num_blocks": 10, "max_num_seqs": 5}, {"num_blocks": 100, **guessing}):
            with Engine(artifact, num_threads=2, **more) as engine:
                found = drive(engine, requests)
                uses = [replays for replays, *_ in engine.graph_use()]
                misses, guesses = engine.bucket_misses(), engine.stats.accepted_tokens
            assert [[bits(output) for output in outputs] for outputs in found] == alone, more
            used |= {name for name, count in zip(names, uses, strict=True) if count > 0}
            # A miss asks for the longest form, whatever there is.
            assert all(not miss.wanted.total for miss in misses)
            assert (guesses > 0) == ("speculate_tokens" in more)
    assert {"decode:8x128total", "decode:8x256total"} <= used


def test_a_total_is_added_and_refused(llama: tuple[Path, Artifact], kernel_cache: Path, tmp_path: Path) -> None:
    options = {"buckets": MIXED_LADDER, "dtype": "f32", "block_size": 16}
    folder = tmp_path / "out"
    compile_tiny(llama[0], folder, kernel_cache, **options).close()
    assert read_graphs(folder).header.version == 5
    assert add_buckets(folder, [Bucket("decode", 4, 128, total=True)], cache_dir=kernel_cache, jobs=1).added == (
        "decode:4x128total",
    )
    assert read_graphs(folder).header.version == read_manifest(folder)["format_version"] == 8
    with pytest.raises(
        BucketError, match="decode:8x100total has less than a block of 16 tokens for each of 8 sequences"
    ):
        add_buckets(folder, [Bucket("decode", 8, 100, total=True)], cache_dir=kernel_cache, jobs=1)
    with pytest.raises(
        CompileError, match="bucket decode:2x272total holds 272 tokens but max-model-len of the artifact"
    ):
        add_buckets(folder, [Bucket("decode", 2, 272, total=True)], cache_dir=kernel_cache, jobs=1)
