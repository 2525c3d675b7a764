"""Output of `llmc inspect` for an artifact with several ranks: layers and bytes of stages and ranks, and what ranks
hand each other in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmc.graphs_records import Graph, Tables, kv_block_bytes, state_bytes
from llmc.runtime.graph_view import layer_of
from llmc.units import format_bytes


def joined_bytes(tables: Tables, graph: Graph) -> int:
    """Bytes of collective results in a step that fills `graph`; float32."""
    return _bytes(tables, graph, passed=False)


def _bytes(tables: Tables, graph: Graph, *, passed: bool) -> int:
    total = 0
    for command in tables.commands_of(graph):
        if command.collective is not None:
            record = tables.collectives[command.collective]
            if record.passes_on == passed:
                total += 4 * record.width * (graph.max_tokens, graph.max_samples)[record.rows]
    return total


def _count(tables: Tables, graph: Graph) -> int:
    """The results that the ranks of a stage join."""
    named = (command.collective for command in tables.commands_of(graph))
    return sum(number is not None and not tables.collectives[number].passes_on for number in named)


def ranks_data(tables: Tables) -> dict[str, Any] | None:
    """Bytes of weights shared by all ranks and of one rank's own weights, layers and bytes of stages, and collective
    bytes per bucket. None for one rank."""
    model = tables.model
    if tables.num_ranks == 1:
        return None
    shared, all_of_rank = tables.weights[: model.num_shared_weights], tables.weights_of(0)
    return {
        "count": tables.num_ranks,
        "shared_weight_bytes": sum(weight.bytes for weight in shared),
        "rank_weight_bytes": sum(weight.bytes for weight in all_of_rank[len(shared) :]),
        "stages": [_stage(tables, stage) for stage in range(len(tables.stages))],
        "joins": [
            {
                "bucket": graph.name,
                "collectives": _count(tables, graph),
                "bytes": joined_bytes(tables, graph),
                **({"passed_bytes": _bytes(tables, graph, passed=True)} if tables.stages else {}),
            }
            for graph in tables.graphs
        ],
    }


def _stage(tables: Tables, stage: int) -> dict[str, Any]:
    record, ranks, known = tables.stages[stage], tables.num_ranks // tables.num_stages, tables.weights_of(0)
    weights = [known[index] for index in tables.weights_read(stage)]
    layers = {layer_of(weight.name) for weight in weights} - {-1}
    return {
        "ranks": list(range(stage * ranks, (stage + 1) * ranks)),
        "first_layer": min(layers),
        "layers": len(layers),
        "weight_bytes": sum(weight.bytes for weight in weights),
        "kv_block_bytes": kv_block_bytes(tables.model, tables.kv_layers, (record,), tables.state_layers),
        "state_bytes": state_bytes(tables.model, tables.kv_layers, (record,), tables.state_layers),
    }


def _of_states(num_bytes: int) -> str:
    return f" and {format_bytes(num_bytes)} of a sequence's states" if num_bytes else ""


def ranks_text(ranks: dict[str, Any] | None) -> Iterator[str]:
    """The same as lines of text."""
    if ranks is None:
        return
    stages, joins = ranks["stages"], ranks["joins"]
    most, least = (choose(joins, key=lambda join: join["bytes"]) for choose in (max, min))
    if not stages:
        yield (
            f"ranks: {ranks['count']}, which run each step together; each reads "
            f"{format_bytes(ranks['rank_weight_bytes'])} of weights of its own and "
            f"{format_bytes(ranks['shared_weight_bytes'])} that all share"
        )
    else:
        yield f"ranks: {ranks['count']}, in {len(stages)} stages"
    for number, stage in enumerate(stages):
        first, last = stage["ranks"][0], stage["ranks"][-1]
        of = f"rank {first}" if first == last else f"ranks {first} to {last}, each of which"
        end = stage["first_layer"] + stage["layers"] - 1
        yield (
            f"stage {number}: layers {stage['first_layer']} to {end}, on {of} reads "
            f"{format_bytes(stage['weight_bytes'])} of weights and has {format_bytes(stage['kv_block_bytes'])} of a KV "
            f"block{_of_states(stage['state_bytes'])}"
        )
    if stages:
        passed = [join["passed_bytes"] for join in joins]
        yield f"passed from stage to stage in a step: {format_bytes(min(passed))} to {format_bytes(max(passed))}"
    if most["collectives"]:
        who = "the ranks of each stage" if stages else "all ranks"
        yield (
            f"joined by {who} in a step: {least['collectives']} results, {format_bytes(least['bytes'])} in "
            f"{least['bucket']} and {format_bytes(most['bytes'])} in {most['bucket']}"
        )
