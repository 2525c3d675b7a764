"""The graphs that an artifact needs, and the command list of each: from the cache, or by tracing the model once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

from llmc.buckets import Bucket
from llmc.compiler.graph.commands import Command, CommandList, GraphShape, Operand
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import GraphParams
from llmc.compiler.store import keys
from llmc.compiler.store.cache import GraphCache, key_of

Item = TypeVar("Item")


def graph_shape(bucket: Bucket, params: GraphParams) -> GraphShape:
    """The shape of `bucket`'s graph, with one sample per sequence, or as many as rows are merged to."""
    samples = -(-bucket.max_tokens // params.merged) if params.merged else bucket.batch
    longest = min(bucket.seq, params.max_model_len) if bucket.phase == "decode" else params.max_model_len
    return params.target.graph_shape(bucket.max_tokens, samples, longest, params.max_model_len, params.block_size)


def to_json(commands: CommandList) -> bytes:
    """The cached form of a command list. Layers repeat, so specs and operands are listed once."""
    specs = list(dict.fromkeys(c.spec for c in commands.commands))
    operands = list(dict.fromkeys(o for c in commands.commands for o in c.operands))
    spec_index, operand_index = _positions(specs), _positions(operands)
    listed = {
        "specs": [[s.family, s.op, s.params] for s in specs],
        "operands": [[o.kind, o.name, o.layer, o.offset, o.nbytes] for o in operands],
        "commands": [
            [spec_index[c.spec], [operand_index[o] for o in c.operands], c.layer, c.barrier] for c in commands.commands
        ],
        "arena_bytes": commands.arena_bytes,
    }
    return json.dumps(listed, separators=(",", ":")).encode()


def _positions(items: Sequence[Item]) -> dict[Item, int]:
    return {item: i for i, item in enumerate(items)}


def from_json(payload: bytes) -> CommandList:
    """Reads `to_json`'s output."""
    raw = json.loads(payload)
    specs = [KernelSpec(family, op, tuple((k, v) for k, v in params)) for family, op, params in raw["specs"]]
    operands = [Operand(*fields) for fields in raw["operands"]]
    return CommandList(
        tuple(
            Command(specs[spec], tuple([operands[i] for i in which]), layer, barrier)
            for spec, which, layer, barrier in raw["commands"]
        ),
        raw["arena_bytes"],
    )


def needed_graphs(
    buckets: Sequence[Bucket], params: GraphParams, common: Mapping[str, str]
) -> dict[GraphShape, tuple[Bucket, dict[str, str]]]:
    """The distinct graph shapes of `buckets`, each with its first bucket and the components of its cache key."""
    needed: dict[GraphShape, tuple[Bucket, dict[str, str]]] = {}
    for bucket in buckets:
        shape = graph_shape(bucket, params)
        if shape not in needed:
            needed[shape] = bucket, keys.shape_components(common, asdict(shape))
    return needed


def plan_graphs(
    buckets: Sequence[Bucket],
    params: GraphParams,
    common: Mapping[str, str],
    cache: GraphCache,
    bind: Callable[[GraphShape, GraphParams], CommandList],
    on_graph: Callable[[int, int], None],
) -> dict[Bucket, tuple[GraphShape, CommandList]]:
    """Command lists of all buckets, from the cache where it has them.

    common: `keys.graph_components`.
    bind: makes a missing list; traces the model on its first call.
    on_graph: called with (graphs done, graphs in all).
    """
    needed = needed_graphs(buckets, params, common)
    lists: dict[GraphShape, CommandList] = {}
    graphs: dict[Bucket, tuple[GraphShape, CommandList]] = {}
    for done, bucket in enumerate(buckets, 1):
        shape = graph_shape(bucket, params)
        if shape not in lists:
            _, components = needed[shape]
            key = key_of(components)
            payload = cache.get(key)
            if payload is None:
                lists[shape] = bind(
                    shape,
                    replace(params, shape=shape),
                )
                cache.put(key, to_json(lists[shape]), components, {"bucket": str(bucket), "target": params.target.name})
            else:
                lists[shape] = from_json(payload)
        graphs[bucket] = (shape, lists[shape])
        on_graph(done, len(buckets))
    return graphs
