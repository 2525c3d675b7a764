"""Layers of commands are those of the model, however layers of the KV cache are numbered."""

from __future__ import annotations

import pytest

from llmc.compiler.store import graphs_writer as w
from llmc.graphs_records import CodeRecord, KernelRecord, ModelRecord, OperandRecord, TargetRecord, WeightRecord
from llmc.runtime import graphs_file
from llmc.runtime.graph_view import commands_of, layer_of

TARGET = TargetRecord("cpu", "znver4", 4, "tiles")
MODEL = ModelRecord(3, 1, 8, 16, 1, 100, 64, 4, 1, 0, (2,), 1, 256, 256)
OPS = ("linear", "rope_kv_write", "paged_attention", "gather")
KERNELS = tuple(KernelRecord(f"{op}_0", count, 1) for op, count in zip(OPS, (1, 2, 1, 1), strict=True))
NAMES = (
    *(f"layers.{layer}.attention.{part}" for layer in range(3) for part in ("qkv.weight", "k_norm.weight")),
    "layers.0.attention.kv_scales",
    "ropes.0.cos_sin",
    "norm.weight",
)
WEIGHTS = tuple(WeightRecord(name, 0, (8,), 64 * i + 64, 32, 1, "rows") for i, name in enumerate(NAMES))
FILES = w.FileSums((CodeRecord("kernels.so", 4096, 0xC0DE),), 1024, 0xABC)


def reads(name: str) -> OperandRecord:
    return OperandRecord(1, NAMES.index(name), 0, 32)


def linear(name: str) -> w.CommandRecord:
    return w.CommandRecord(0, (reads(name),), True, -1, 2)


def writes_kv(kv_layer: int, weight: str) -> w.CommandRecord:
    return w.CommandRecord(1, (reads(weight), OperandRecord(3, kv_layer, 0, 256)), True, kv_layer, 3)


def attention(kv_layer: int) -> w.CommandRecord:
    return w.CommandRecord(2, (OperandRecord(3, kv_layer, 0, 256),), True, kv_layer, 4)


def gather() -> w.CommandRecord:
    return w.CommandRecord(3, (OperandRecord(0, 0, 0, 64),), True, -1, 1)


@pytest.mark.parametrize("kv_layers", [(0, 1, 2), (0, 2, 0), (0, 0, 0), (2, 1, 0)])
@pytest.mark.parametrize("weight", ["layers.{}.attention.k_norm.weight", "layers.0.attention.kv_scales", NAMES[7]])
def test_a_command_that_accesses_the_cache_is_of_the_layer_ahead(kv_layers: tuple[int, ...], weight: str) -> None:
    commands = [gather()]
    for layer, kv_layer in enumerate(kv_layers):
        commands += [
            linear(f"layers.{layer}.attention.qkv.weight"),
            writes_kv(kv_layer, weight.format(layer)),
            attention(kv_layer),
        ]
    commands += [gather(), linear("norm.weight")]
    graph = w.GraphRecord(0, 1, 16, 16, 1, 1, 4, 4, 64, tuple(commands))
    tables = graphs_file.parse_graphs(w.write_graphs(TARGET, MODEL, KERNELS, WEIGHTS, (graph,), FILES))
    views = commands_of(tables, tables.graphs[0])
    assert [view.layer for view in views] == [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, -1, -1]
    written = "attention.k_norm" if "k_norm" in weight else "rope_kv_write"
    assert [view.name for view in views[4:7]] == [
        "layers.1.attention.qkv",
        f"layers.1.{written}",
        "layers.1.paged_attention",
    ]
    # Buffers have the numbers of the pools.
    pools = [b.name.split(".")[0] for view in views for b in view.buffers if b.kind == "k_pool"]
    assert pools == [f"k_pool_{kv_layer}" for kv_layer in kv_layers for _ in range(2)]


def test_the_layer_of_a_weight() -> None:
    names = ("layers.12.mlp.down.weight", "rank0.layers.3.mlp.down.weight", "layers.2", *NAMES[-3:])
    assert [layer_of(name) for name in names] == [12, 3, 2, -1, -1, -1]
