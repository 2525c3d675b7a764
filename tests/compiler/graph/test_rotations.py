"""Graphs in which attention does what rope_kv_write does: which do, and that a request has the same bits in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.graph.commands import GraphShape
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.registry import resolve_target
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.debug.diff import diff_artifacts
from llmc.runtime.graph_view import commands_of
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, compile_tiny, random_tokens, replay
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.families import CASES
from support.opencl import needs_opencl
from support.paged_attention import attention_params
from support.tiny_models import make_tiny_model

_ROTATION = {"rotary_dim": 64, "qk_norm": True, "norm_eps": 1e-6}
_ONE = GraphShape(1, 1, 1, 1, 0)
_LADDER = "prefill=[1]x[320],decode=[1,2]x[160,336]"
"""Contexts of the longer graphs are split."""


def _spec(heads: int, kv_heads: int, dim: int, **more: Any) -> KernelSpec:
    params = attention_params(heads, kv_heads, dim, "bf16", "bf16", 16, 0)
    return KernelSpec.of("attention", "rotated_attention", **params, segments=0, **_ROTATION, **more)


@pytest.mark.parametrize("name", ["opencl", "cuda:sm_90", "cuda:sm_90a+dependent"])
def test_in_which_graphs_gpus_join_both(name: str) -> None:
    """Where tokens of a sequence are never together, and one group has all heads of a KV head."""
    joins: Callable[[GraphShape, KernelSpec], bool] = resolve_target(name).rotates_in_attention
    assert joins(_ONE, _spec(32, 8, 128))
    # A decode graph of two rows may have a guess in the second one.
    assert not joins(replace(_ONE, tokens=2, samples=2), _spec(32, 8, 128))
    assert not joins(_ONE, _spec(32, 2, 128))
    assert joins(_ONE, _spec(32, 2, 128, reads_cache=True))
    assert not joins(_ONE, _spec(32, 8, 128, both_ways=True))


@pytest.mark.parametrize("name", ["native", "reference"])
def test_other_targets_have_two_kernels(name: str) -> None:
    assert not resolve_target(name).rotates_in_attention(_ONE, _spec(32, 8, 128))


def _counts(artifact: Path) -> dict[str, Counter[str]]:
    tables = read_graphs(artifact)
    return {graph.name: Counter(command.op for command in commands_of(tables, graph)) for graph in tables.graphs}


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3_text", pytest.param("gemma3n_text", marks=pytest.mark.slow)]
)
def test_graphs_of_one_row(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    """They have one command less in each layer, also where layers read the keys of others."""
    model = make_tiny_model(tmp_path / "model", CASES[family][0], **CASES[family][1])
    buckets = "prefill=[1]x[16],decode=[1,2]x[32]"
    for target in ("opencl", "reference"):
        compile_tiny(model, tmp_path / target, kernel_cache, target=target, buckets=buckets, dtype="f32").close()
    prefill, one, two = (
        _counts(tmp_path / "opencl")[f"{name}"] for name in ("prefill:1x16", "decode:1x32", "decode:2x32")
    )
    layers = two["paged_attention"]
    assert layers > 1
    assert prefill == two
    assert one["rotated_attention"] == layers
    assert one.total() == two.total() - layers
    both = Counter({"paged_attention": layers, "rope_kv_write": layers})
    assert one - Counter({"rotated_attention": layers}) == two - both
    plain = _counts(tmp_path / "reference")
    assert plain["decode:1x32"] == plain["decode:2x32"]


def test_what_is_written_and_which_layer_it_is_of(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", max_position_embeddings=512)
    buckets = "prefill=[1]x[16],decode=[1]x[320]"
    compile_tiny(model, tmp_path / "out", kernel_cache, target="opencl", buckets=buckets, dtype="f32").close()
    tables = read_graphs(tmp_path / "out")
    (graph,) = (graph for graph in tables.graphs if graph.phase == 1)
    rotated = [command for command in commands_of(tables, graph) if command.op == "rotated_attention"]
    assert [command.name for command in rotated] == [f"layers.{i}.rotated_attention" for i in range(len(rotated))]
    for i, command in enumerate(rotated):
        assert [buffer.kind for buffer in command.buffers if buffer.written] == ["k_pool", "v_pool", "arena", "arena"]
        assert command.layer == i


@needs_opencl
@pytest.mark.parametrize(
    ("family", "heads", "dim", "more"),
    [
        ("qwen3", {}, 16, {}),
        # Items have elements only under a condition, in loops between barriers.
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 60}, 20, {}),
        pytest.param("llama", {}, 128, {"kv_dtype": "int8"}, marks=pytest.mark.slow),
    ],
    ids=["norms", "few elements", "int8"],
)
def test_bits_are_those_of_graphs_with_both(
    family: str, heads: dict[str, int], dim: int, more: dict[str, Any], tmp_path: Path, kernel_cache: Path
) -> None:
    fields: dict[str, Any] = {"max_position_embeddings": 512, "num_hidden_layers": 1, "head_dim": dim, **heads}
    model = make_tiny_model(tmp_path / "model", family, **fields)
    options = {"buckets": _LADDER, "dtype": "f32", "max_model_len": 336, "block_size": 16, **more}
    with compile_tiny(model, tmp_path / "out", kernel_cache, target="opencl", **options) as artifact:
        _check_bits(artifact)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_bits_on_tensor_cores(family: str, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a driver that checks every call, with the kernels on the host."""
    model = make_tiny_model(tmp_path / "model", family, max_position_embeddings=512, head_dim=32)
    options = {"buckets": _LADDER, "dtype": "bf16", "max_model_len": 336, "block_size": 16}
    with fake_nvcc(tmp_path):
        compile_tiny(model, tmp_path / "out", kernel_cache, target="cuda:sm_90+dependent", **options).close()
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(kernels_on_host(tmp_path / "out", tmp_path)))
    stub = Stub(stub_library(tmp_path))
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    with Artifact(tmp_path / "out") as artifact:
        _check_bits(artifact)
    assert stub.report() == ""


def _check_bits(artifact: Artifact) -> None:
    """Steps on both sides of ends of blocks and partitions, each in a graph of one row and in one of two."""
    graphs = {f"{g.phase}:{g.batch}x{g.seq}": i for i, g in enumerate(artifact.graphs())}
    tokens = random_tokens(artifact.info.vocab_size, 320)
    for start, graph in ((126, 160), (254, 336), (302, 336)):
        found = []
        for batch in (1, 2):
            with Replayer(artifact, num_blocks=30) as replayer:
                pages = Pages(29, artifact.info.block_size, seed=5)
                replay(replayer, graphs["prefill:1x320"], pages, [(0, tokens[:start], 0)])
                name = f"decode:{batch}x{graph}"
                steps = range(start, start + 4)
                found.append([replay(replayer, graphs[name], pages, [(0, tokens[at : at + 1], at)]) for at in steps])
        one, two = (np.concatenate(logits).view(np.uint32) for logits in found)
        np.testing.assert_array_equal(one, two)


@needs_opencl
def test_a_diff_leaves_out_what_attention_computes_within(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    for target in ("reference", "opencl"):
        options = {"buckets": "prefill=[1]x[16],decode=[1]x[32]", "dtype": "f32"}
        compile_tiny(model, tmp_path / target, kernel_cache, target=target, **options).close()
    prompt = [5, 6, 7]
    for a, b in (("reference", "opencl"), ("opencl", "reference")):
        first, later = (diff_artifacts(tmp_path / a, tmp_path / b, prompt, step) for step in (0, 2))
        assert "rope_kv_write" in {one.op for one in first.tensors}
        assert "rope_kv_write" not in {one.op for one in later.tensors}
        for found in (first, later):
            assert "paged_attention" in {one.op for one in found.tensors}
            assert found.first(1e-4) is None
            assert not found.only_a
            assert not found.only_b
