"""Which graphs an artifact needs, and each one's command list: from the cache or by tracing the model once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from llmc.buckets import Bucket
from llmc.compiler import keys
from llmc.compiler.cache import GraphCache, key_of
from llmc.compiler.graph import Command, CommandList, Operand, round_up
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels.attention_split import num_segments
from llmc.compiler.templates import GraphParams

Item = TypeVar("Item")

_SPLIT_TOKENS = 64
_MOST_PARTIALS = 1024  # of a query head: 20 MiB where there are 32 heads of 128


@dataclass(frozen=True)
class GraphShape:
    """What a command list depends on; buckets of equal shape share one.

    tokens, samples: rows rounded up to their tiles. segments: as many as the longest context has, where attention
    splits contexts; 0 where it does not.
    """

    tokens: int
    samples: int
    row_tile: int
    sample_row_tile: int
    segments: int


def _segments(bucket: Bucket, params: GraphParams) -> int:
    """Contexts are split where they may be long and tokens alone may not occupy every core.

    A graph of many tokens has work for all of them without, and partial results would take much memory.
    """
    longest = min(bucket.seq, params.max_model_len) if bucket.phase == "decode" else params.max_model_len
    segments = num_segments(params.max_model_len, params.block_size)
    few = bucket.max_tokens <= _SPLIT_TOKENS and bucket.max_tokens * segments <= _MOST_PARTIALS
    return segments if few and num_segments(longest, params.block_size) > 1 else 0


def graph_shape(bucket: Bucket, params: GraphParams) -> GraphShape:
    """The rows of `bucket`'s graph: one sample a sequence."""
    row_tile = params.target.row_tile_for(bucket.max_tokens)
    sample_row_tile = params.target.row_tile_for(bucket.batch)
    return GraphShape(
        round_up(bucket.max_tokens, row_tile),
        round_up(bucket.batch, sample_row_tile),
        row_tile,
        sample_row_tile,
        _segments(bucket, params),
    )


def to_json(commands: CommandList) -> bytes:
    """The cached form of a command list: layers repeat, so specs and operands are listed once."""
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
    """The distinct command lists of `buckets`: the first bucket of each, and what its key is made of."""
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
    """Command lists of all buckets. `bind` traces on its first call; it is never called when the cache has them all.

    common: `keys.graph_components`.
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
                    replace(
                        params,
                        row_tile=shape.row_tile,
                        sample_row_tile=shape.sample_row_tile,
                        tokens=shape.tokens,
                        segments=shape.segments,
                    ),
                )
                cache.put(key, to_json(lists[shape]), components, {"bucket": str(bucket), "target": params.target.name})
            else:
                lists[shape] = from_json(payload)
        graphs[bucket] = (shape, lists[shape])
        on_graph(done, len(buckets))
    return graphs
