"""`llmc compile --speculate`: decode buckets with more rows than sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.buckets import Bucket, BucketError
from llmc.compiler.config import CompileError
from llmc.compiler.extend import add_buckets
from llmc.manifest import read_manifest
from llmc.runtime.binding import Artifact, Engine, SamplingParams

from support.compiled import compile_tiny
from support.engine_driver import MIXED_LADDER, bits, drive, random_ids

pytestmark = pytest.mark.native


def test_rows_for_guesses_of_all_sequences(llama: tuple[Path, Artifact], kernel_cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    options = {"buckets": MIXED_LADDER, "dtype": "f32", "block_size": 16, "speculate": 2}
    with compile_tiny(llama[0], folder, kernel_cache, **options) as artifact:
        assert artifact.info.max_num_seqs == 8
        rows = {(g.batch, g.seq) for g in artifact.graphs() if g.phase == "decode"}
        # Eight sequences with two guesses each.
        assert rows == {(batch, seq) for batch in (1, 2, 4, 8, 16, 24) for seq in (64, 128)}
        likes = {token: 30.0 for token in random_ids(3, 1)}
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias=likes, num_logprobs=1)
        requests = [(random_ids(seed, 9 + seed), params) for seed in range(8)]
        with Engine(artifact, num_threads=1, speculate_tokens=2, speculate_always=1) as engine:
            found = [[bits(o) for o in outputs] for outputs in drive(engine, requests)]
            use = engine.graph_use()
        largest = max(range(len(use)), key=lambda i: artifact.graphs()[i].batch)
        assert use[largest][0] > 0
    with Engine(llama[1], num_threads=1) as engine:
        assert found == [[bits(o) for o in outputs] for outputs in drive(engine, requests)]
    assert read_manifest(folder)["speculate"] == 2
    report = add_buckets(folder, [Bucket("decode", 20, 64)], cache_dir=kernel_cache, jobs=1)
    assert report.added == ("decode:20x64",)
    with pytest.raises(CompileError, match="bucket decode:25x64 holds 25 sequences but the artifact runs at most 8"):
        add_buckets(folder, [Bucket("decode", 25, 64)], cache_dir=kernel_cache, jobs=1)


def test_planned_rows_are_taken_as_they_are(llama: tuple[Path, Artifact], kernel_cache: Path, tmp_path: Path) -> None:
    ladder = "prefill=1x32,decode=[1,2,5]x64"
    options = {"buckets": ladder, "dtype": "f32", "block_size": 16, "max_num_seqs": 2}
    with compile_tiny(llama[0], tmp_path / "out", kernel_cache, speculate=3, **options) as artifact:
        assert artifact.info.max_num_seqs == 2
        assert [graph.batch for graph in artifact.graphs() if graph.phase == "decode"] == [1, 2, 5]
    with pytest.raises(BucketError, match="bucket decode:5x64 holds 5 sequences but max-num-seqs is 2"):
        compile_tiny(llama[0], tmp_path / "none", kernel_cache, speculate=1, **options)


def test_guesses_are_for_models_that_write(tmp_path: Path, llama: tuple[Path, Artifact], kernel_cache: Path) -> None:
    with pytest.raises(CompileError, match="speculate 65 must be between 0 and 64 guesses"):
        compile_tiny(llama[0], tmp_path / "out", kernel_cache, speculate=65)
