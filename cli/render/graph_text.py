"""One bucket of an artifact as text: its commands and its memory plan."""

from __future__ import annotations

from llmc.cli.render.text_columns import table
from llmc.graphs_records import Graph, Tables
from llmc.runtime.graph_view import commands_of, memory_plan
from llmc.units import format_bytes


def graph_text(tables: Tables, graph: Graph) -> str:
    """One bucket as text: commands with their buffers, then the memory plan."""
    commands = commands_of(tables, graph)
    lines = [
        f"{graph.name}: up to {graph.max_tokens} tokens, {graph.max_seqs} sequences, {graph.max_samples} samples, "
        f"row unit {graph.row_unit}, arena {format_bytes(graph.arena_bytes)}",
        f"\ncommands ({len(commands)}); > marks what is written, | a barrier",
    ]
    for c in commands:
        layer = "" if c.layer < 0 else f"layer {c.layer}"
        lines.append(f"  {c.index:4d}{'|' if c.barrier else ' '} {c.symbol}  {layer}".rstrip())
        for b in c.buffers:
            size = f"{b.bytes} bytes{' a block' if b.kind in ('k_pool', 'v_pool') else ''}"
            where = f" at {b.offset}" if b.kind == "arena" else ""
            lines.append(f"        {'>' if b.written else ' '} {b.kind:7} {b.name}  {b.type}  {size}{where}")
    lines.append(f"\nmemory plan, arena of {graph.arena_bytes} bytes")
    lines.append(
        table(
            ("value", "type", "offset", "bytes", "first", "last"),
            [
                (v.name, f"{v.dtype}[{', '.join(map(str, v.shape))}]", v.offset, v.bytes, v.first, v.last)
                for v in memory_plan(commands)
            ],
        )
    )
    return "\n".join(lines) + "\n"
