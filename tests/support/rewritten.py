"""An artifact with the same graphs, whose tables say something else."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc.compiler.store.graphs_writer import CommandRecord, FileSums, GraphRecord, write_graphs
from llmc.graphs_records import GraphSizes, ModelRecord, OperandRecord, Tables
from llmc.runtime.graphs_file import read_graphs

Change = Callable[[OperandRecord], OperandRecord]


def _graphs(tables: Tables, change: Change) -> list[GraphRecord]:
    sizes = [field.name for field in dataclasses.fields(GraphSizes)]
    return [
        GraphRecord(
            **{name: getattr(graph, name) for name in sizes},
            arena_bytes=graph.arena_bytes,
            commands=tuple(
                CommandRecord(c.kernel, tuple(map(change, tables.operands_of(c))), c.barrier, c.layer, c.family)
                for c in tables.commands_of(graph)
            ),
        )
        for graph in tables.graphs
    ]


def rewritten(
    artifact: Path,
    output: Path,
    *,
    model: ModelRecord | None = None,
    operand: Change = lambda operand: operand,
    **changed: Any,
) -> Path:
    """A copy of an artifact of one rank, with another model record, other operands, or other arguments of
    `write_graphs`."""
    tables = read_graphs(artifact)
    shutil.copytree(artifact, output)
    content = write_graphs(
        tables.target,
        model or tables.model,
        tables.kernels,
        tables.weights,
        _graphs(tables, operand),
        FileSums(tables.code, tables.header.weights_bytes, tables.header.weights_header_crc32),
        tables.adapters,
        **changed,
    )
    (output / "graphs.bin").write_bytes(content)
    return output
