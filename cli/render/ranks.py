"""Output of `llmc inspect` for an artifact with several ranks: bytes read per rank, and collective results of a
step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmc.graphs_records import Graph, Tables
from llmc.units import format_bytes


def joined_bytes(tables: Tables, graph: Graph) -> int:
    """Bytes of collective results in a step that fills `graph`; float32."""
    total = 0
    for command in tables.commands_of(graph):
        if command.collective is not None:
            record = tables.collectives[command.collective]
            total += 4 * record.width * (graph.max_tokens, graph.max_samples)[record.rows]
    return total


def ranks_data(tables: Tables) -> dict[str, Any] | None:
    """Bytes of weights shared by all ranks and of one rank's own weights, and collective bytes per bucket. None for one
    rank."""
    model = tables.model
    if not model.num_ranks:
        return None
    shared, all_of_rank = tables.weights[: model.num_shared_weights], tables.weights_of(0)
    return {
        "count": model.num_ranks,
        "shared_weight_bytes": sum(weight.bytes for weight in shared),
        "rank_weight_bytes": sum(weight.bytes for weight in all_of_rank[len(shared) :]),
        "joins": [
            {
                "bucket": graph.name,
                "collectives": sum(command.collective is not None for command in tables.commands_of(graph)),
                "bytes": joined_bytes(tables, graph),
            }
            for graph in tables.graphs
        ],
    }


def ranks_text(ranks: dict[str, Any] | None) -> Iterator[str]:
    """The same as lines of text."""
    if ranks is None:
        return
    yield (
        f"ranks: {ranks['count']}, which run each step together; each reads {format_bytes(ranks['rank_weight_bytes'])} "
        f"of weights of its own and {format_bytes(ranks['shared_weight_bytes'])} that all share"
    )
    most = max(ranks["joins"], key=lambda join: join["bytes"])
    least = min(ranks["joins"], key=lambda join: join["bytes"])
    yield (
        f"joined by all ranks in a step: {least['collectives']} results, {format_bytes(least['bytes'])} in "
        f"{least['bucket']} and {format_bytes(most['bytes'])} in {most['bucket']}"
    )
