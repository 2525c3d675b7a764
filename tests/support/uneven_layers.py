"""An artifact with the same graphs, whose KV cache has layers of other sizes between those that its commands use."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from llmc.compiler.store.graphs_writer import CommandRecord, FileSums, GraphRecord, write_graphs
from llmc.graphs_format import OPERAND_KINDS
from llmc.graphs_records import GraphSizes, KvLayerRecord, OperandRecord, Tables
from llmc.runtime.graphs_file import read_graphs

_POOLS = [OPERAND_KINDS.index(kind) for kind in ("k_pool", "v_pool")]
_OTHERS = (KvLayerRecord(192, 64), KvLayerRecord(320, 0))
"""Sizes that are not those of a model, and values that are a part of keys."""


def _moved(operand: OperandRecord) -> OperandRecord:
    return operand._replace(index=2 * operand.index + 1) if operand.kind in _POOLS else operand


def _graphs(tables: Tables) -> list[GraphRecord]:
    sizes = [field.name for field in dataclasses.fields(GraphSizes)]
    return [
        GraphRecord(
            **{name: getattr(graph, name) for name in sizes},
            arena_bytes=graph.arena_bytes,
            commands=tuple(
                CommandRecord(c.kernel, tuple(map(_moved, tables.operands_of(c))), c.barrier, c.layer, c.family)
                for c in tables.commands_of(graph)
            ),
        )
        for graph in tables.graphs
    ]


def with_uneven_layers(artifact: Path, output: Path) -> Path:
    """A copy of an artifact of one rank: layer 2 n + 1 stands for layer n, and no command uses the others."""
    tables = read_graphs(artifact)
    shutil.copytree(artifact, output)
    own = [tables.kv_layer(layer) for layer in range(tables.model.num_layers)]
    layers = [of for layer, one in enumerate(own) for of in (_OTHERS[layer % len(_OTHERS)], one)]
    files = FileSums(tables.code, tables.header.weights_bytes, tables.header.weights_header_crc32)
    content = write_graphs(
        tables.target,
        dataclasses.replace(tables.model, num_layers=len(layers)),
        tables.kernels,
        tables.weights,
        _graphs(tables),
        files,
        tables.adapters,
        kv_layers=layers,
    )
    (output / "graphs.bin").write_bytes(content)
    return output
