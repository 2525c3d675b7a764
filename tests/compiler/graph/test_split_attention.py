"""Graphs that split long contexts over threads: which do, where the pieces lie, and the bits of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.buckets import Bucket
from llmc.compiler.graph.commands import GraphShape
from llmc.compiler.graph.plan import graph_shape
from llmc.compiler.ops.definition import GraphParams
from llmc.compiler.targets.registry import native_target
from llmc.graphs_format import FAMILIES, OPERAND_KINDS
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, compile_tiny, random_tokens, replay
from support.many_scores import WITH_ALL, checkpoint_with_all
from support.new_family import registered
from support.tiny_models import ModelFields, make_tiny_model

pytestmark = pytest.mark.native

LENGTH = 2200
LADDER = f"prefill=[1]x[32,256,{LENGTH}],decode=[1,4]x[512,2304]"


@pytest.mark.parametrize(
    ("bucket", "max_model_len", "segments"),
    [
        (Bucket("decode", 1, 1024), 32768, 0),
        (Bucket("decode", 1, 1056), 32768, 32),
        (Bucket("decode", 32, 32768), 32768, 32),
        (Bucket("decode", 33, 32768), 32768, 0),  # partial results would take too much memory
        (Bucket("decode", 64, 4096), 4096, 4),
        (Bucket("decode", 1, 512), 512, 0),
        (Bucket("prefill", 1, 64), 4096, 4),  # a short chunk may follow a long prefix
        (Bucket("prefill", 2, 64), 4096, 0),
        (Bucket("mixed", 4, 64), 4096, 4),
    ],
    ids=str,
)
def test_which_graphs_split(bucket: Bucket, max_model_len: int, segments: int) -> None:
    params = GraphParams(
        target=native_target(),
        shape=GraphShape(0, 0, 0, 0, 0),
        max_model_len=max_model_len,
        act_dtype="f32",
        kv_dtype="f32",
        block_size=32,
    )
    assert graph_shape(bucket, params).segments == segments


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def with_all(root: Path, kernel_cache: Path) -> Artifact:
    """Of a model with all that attention knows."""
    with registered(WITH_ALL):
        model = checkpoint_with_all(root / "all", attention_chunk_size=2100, num_hidden_layers=1, no_rope_layers=[1])
        options = {"buckets": LADDER, "dtype": "f32", "max_model_len": 2304, "block_size": 16}
        return compile_tiny(model, root / "artifact-all", kernel_cache, **options)


@pytest.fixture(scope="module")
def artifact(root: Path, kernel_cache: Path) -> Artifact:
    shape: ModelFields = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    }
    model = make_tiny_model(root / "model", "llama", **shape)
    options = {"buckets": LADDER, "dtype": "bf16", "max_model_len": 2304, "block_size": 16}
    return compile_tiny(model, root / "artifact", kernel_cache, **options)


def _graph(artifact: Artifact, name: str) -> int:
    return [f"{g.phase}:{g.batch}x{g.seq}" for g in artifact.graphs()].index(name)


def test_partial_results_lie_behind_the_planned_memory(artifact: Artifact, root: Path) -> None:
    tables = read_graphs(root / "artifact")
    counts = {}
    for graph in tables.graphs:
        attention = [c for c in tables.commands_of(graph) if FAMILIES[c.family] == "attention"]
        counts[graph.name] = len(attention) // tables.model.num_layers
        arena = [
            (o.offset, o.offset + o.bytes)
            for c in tables.commands_of(graph)
            for o in tables.operands_of(c)
            if OPERAND_KINDS[o.kind] == "arena"
        ]
        assert max(end for _, end in arena) <= graph.arena_bytes
        if counts[graph.name] == 2:
            partials = {(o.offset, o.offset + o.bytes) for o in (tables.operands_of(c)[-2] for c in attention)}
            assert len(partials) == 1, "all layers share them"
            ((start, _),) = partials
            assert all(end <= start for begin, end in arena if begin != start)
    split = {name for name, commands in counts.items() if commands == 2}
    assert split == {"prefill:1x32", "decode:1x2304", "decode:4x2304"}
    assert set(counts.values()) == {1, 2}


def test_same_bits_with_and_without(artifact: Artifact) -> None:
    check_same_bits(artifact)


@pytest.mark.slow
def test_same_bits_of_a_model_with_all(with_all: Artifact) -> None:
    check_same_bits(with_all)


def check_same_bits(artifact: Artifact) -> None:
    tokens = random_tokens(artifact.info.vocab_size, LENGTH)

    def pages() -> Pages:
        return Pages(300, artifact.info.block_size, seed=4)

    def replayer(threads: int) -> Replayer:
        return Replayer(artifact, num_threads=threads, num_blocks=300)

    whole = replay(replayer(1), _graph(artifact, f"prefill:1x{LENGTH}"), pages(), [(0, tokens, 0)])[0]
    for threads in (1, 2, 3):
        engine, table = replayer(threads), pages()
        start = LENGTH - 33
        replay(engine, _graph(artifact, f"prefill:1x{LENGTH}"), table, [(0, tokens[:start], 0)])
        replay(engine, _graph(artifact, "prefill:1x32"), table, [(0, tokens[start : LENGTH - 1], start)])
        for name in ("decode:1x2304", "decode:4x2304"):
            found = replay(engine, _graph(artifact, name), table, [(0, tokens[-1:], LENGTH - 1)])[0]
            assert (found == whole).all(), f"{name} on {threads} threads"
