"""`llmc compile --pipeline-parallel`: how layers are divided among stages, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.buckets import Bucket
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.dry_run import dry_run
from llmc.compiler.extend import add_buckets
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.stages import divide_layers, divided, stage_ends
from llmc.compiler.store.bundle import BundleError, create_bundle
from llmc.quantize import Recipe
from llmc.runtime.graphs_file import read_graphs

from support.tiny_models import make_tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 516, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def test_the_largest_stage_is_as_small_as_can_be() -> None:
    rng = np.random.default_rng(3)
    for _ in range(80):
        costs = list(map(float, rng.integers(1, 9, rng.integers(1, 9))))
        made_by = [int(rng.integers(max(0, layer - 2), layer + 1)) for layer in range(len(costs))]
        allowed = [*(end for end in range(1, len(costs)) if min(made_by[end:]) >= end), len(costs)]
        assert stage_ends(made_by) == allowed
        stages = int(rng.integers(1, len(allowed) + 1))
        found = divided(costs, stages, allowed)
        assert (len(found), sum(found), min(found) > 0) == (stages, len(costs), True)
        assert set(np.cumsum(found)) <= set(allowed)
        largest = [
            max(sum(costs[a:b]) for a, b in zip((0, *ends), (*ends, len(costs)), strict=True))
            for ends in combinations(allowed[:-1], stages - 1)
        ]
        ends = np.cumsum((0, *found))
        assert max(sum(costs[a:b]) for a, b in pairwise(ends)) == min(largest)


def test_layers_that_share_keys_and_values_are_in_one_stage(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", **{**SIZES, "num_hidden_layers": 6})
    resolved = resolve(CompileConfig(model=model, output=tmp_path / "out", dtype="f32"))
    # The middle is between two layers of which one reads the other's keys and values.
    sharing = replace(resolved.model, kv_layers=(0, 1, 2, 2, 2, 5))
    assert divide_layers(sharing, Recipe({}), "f32", 2) in ((2, 4), (5, 1))
    assert divide_layers(sharing, Recipe({}), "f32", 4) == (1, 1, 3, 1)
    with pytest.raises(CompileError, match=r"pipeline-parallel is 5, .* so 6 layers make 4 at most: choose at most 4"):
        divide_layers(sharing, Recipe({}), "f32", 5)
    with pytest.raises(CompileError, match="6 layers make 1 at most: leave out --pipeline-parallel"):
        divide_layers(replace(resolved.model, kv_layers=(0,) * 6), Recipe({}), "f32", 2)


def test_a_large_output_projection_counts(tmp_path: Path) -> None:
    fields = {**SIZES, "num_hidden_layers": 6, "vocab_size": 4096, "tie_word_embeddings": True}
    model = make_tiny_model(tmp_path / "model", "qwen3", **fields)
    resolved = resolve(CompileConfig(model=model, output=tmp_path / "out", dtype="f32", pipeline_parallel=2))
    # The first stage has the embedding, whose bytes it reads and which multiplies nothing.
    assert resolved.stage_layers[0] > resolved.stage_layers[1] > 0
    assert [(stage.first_layer, stage.num_layers) for stage in resolved.stage_records()] == [
        (0, resolved.stage_layers[0]),
        (resolved.stage_layers[0], resolved.stage_layers[1]),
    ]


@pytest.mark.parametrize(
    ("family", "fields", "options", "said"),
    [
        ("llama", {}, {"pipeline_parallel": 4}, "pipeline-parallel is 4, but llama has 3 layers: choose at most 3"),
        ("llama", {}, {"pipeline_parallel": 0}, "pipeline-parallel 0 must be at least 1 stage"),
        ("llama", {}, {"lora_slots": 2}, "--lora-slots and --pipeline-parallel do not go together"),
        ("llama", {}, {"leave_states": True}, "--eagle and --pipeline-parallel do not go together"),
        (
            "llama",
            {"num_hidden_layers": 130, "num_attention_heads": 2, "head_dim": 32},
            {"pipeline_parallel": 129, "tensor_parallel": 2},
            "129 stages of 2 ranks are 258 ranks, of which at most 256",
        ),
    ],
)
def test_what_has_no_stages_is_refused(
    family: str, fields: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", family, **{**SIZES, **fields})
    given: dict[str, Any] = {"pipeline_parallel": 2, "dtype": "f32", "buckets": "prefill=1x16,decode=1x16", **options}
    with pytest.raises(CompileError, match=said) as caught:
        resolve(CompileConfig(model=model, output=tmp_path / "out", block_size=16, **given))
    assert "\n" not in str(caught.value)


def test_buckets_are_added_and_no_bundle_is_made(tmp_path: Path, kernel_cache: Path) -> None:
    model, artifact = make_tiny_model(tmp_path / "model", "llama", **SIZES), tmp_path / "out"
    options: dict[str, Any] = {"target": "reference", "dtype": "f32", "block_size": 16, "jobs": 1, "tokenizer": "none"}
    config = CompileConfig(
        model, artifact, cache_dir=kernel_cache, buckets="prefill=1x16,decode=1x32", pipeline_parallel=2, **options
    )
    compile_model(config)
    before = read_graphs(artifact)
    add_buckets(artifact, [Bucket.parse("decode:1x16")], cache_dir=kernel_cache, jobs=1)
    after = read_graphs(artifact)
    assert (after.stages, after.model, after.weights) == (before.stages, before.model, before.weights)
    assert after.collectives[: len(before.collectives)] == before.collectives
    assert len(after.graphs) == len(before.graphs) + 1
    with pytest.raises(BundleError, match="is for 2 ranks, which a bundle does not hold yet"):
        create_bundle([artifact], tmp_path / "bundle.tar")
    found = dry_run(config)
    assert (found.ranks, found.stage_layers) == (2, tuple(stage.num_layers for stage in before.stages))
    weights = before.weights_of(0)
    read = [sum(weights[i].bytes for i in before.weights_read(stage)) for stage in range(2)]
    # A file has a header, too, and pads tensors.
    for predicted, stored in zip(found.stage_weight_bytes, read, strict=True):
        assert stored <= predicted < stored + 8192
