"""LoRA adapters of a linear layer (Hu et al., arXiv 2106.09685): a command before its own, and one after.

Each tile of rows names one adapter. `adapter_shrink` computes scale · x Aᵀ for its rows, and `adapter_expand` adds that
times Bᵀ to the layer's output. The layer's own kernel runs between them and needs nothing of the first. Each part of
the layer has its own A and B. Both products are added in float32, in an order that depends on no other row. Rows
without an adapter are in no tile and stay untouched.

An embedding has `adapter_pick` in place of the first: a token's input is a 1 among zeros, so it takes a column of A.

A layer of heads, each with a matrix of its own, has both products for each head of a row. Either A or B is one for all
heads.

The tiles of a step have rows of tokens. A layer over sampled rows has a third command, `adapter_samples`, which makes
tiles of sampled rows of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.adapter_slot import AdapterSlot, padded
from llmc.compiler.adapters import AdapterLimits, AdapterLinear
from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import NUM_SAMPLES, BufferSource, GraphParams, KernelCall
from llmc.compiler.targets.base import Target
from llmc.graphs_format import TILE_RECORD, TILE_ROWS

ADAPTERS, ADAPTER_X = "adapters", "adapter_x"
"""Attributes of a site with a pool: {"columns", "rows": of each part, "rank", "slots"}, of experts their number, of an
embedding "table", of heads their number and "own" (`AdapterHeads`); and the name of a linear's float input."""
SHRUNK, SAMPLE_TILES = "shrunk", "sample_tiles"
_SHRUNK, _SAMPLE_TILES = BufferSource.of_scratch(SHRUNK), BufferSource.of_scratch(SAMPLE_TILES)
_MOST_COUNTED = 1 << 31
"""Size limit of a pool: kernels index it with int32."""


def _slot(target: Target, sizes: Mapping[str, Any], rows: tuple[int, ...], dtype: str) -> AdapterSlot:
    """The slot of a layer. Of experts, all A lie side by side and all B below each other, padded with zeros. So do the
    matrices that heads have of their own.

    sizes: "columns", "rank", and "experts" or "heads" and "own" where the layer has them.
    """
    columns, experts, own = int(sizes["columns"]), int(sizes.get("experts", 0)), sizes.get("own")
    copies = experts or int(sizes.get("heads", 0))
    if experts or own == "a":
        columns = copies * padded(columns)
    if experts or own == "b":
        rows = tuple(copies * padded(count) for count in rows)
    return target.adapter_slot(columns, rows, int(sizes["rank"]), dtype)


def slot_of(site: Site, graph: GraphParams, weight: str = "weight") -> AdapterSlot:
    """The layout of a slot in the pool of one of the site's weights."""
    found = pool_of(site, weight)
    return _slot(graph.target, found, tuple(int(count) for count in found["rows"]), graph.act_dtype)


def is_too_large(linear: AdapterLinear, limits: AdapterLimits, target: Target, act_dtype: str) -> bool:
    """Whether a layer's pool has more numbers than kernels count."""
    sizes: dict[str, Any] = {"columns": linear.columns, "rank": limits.rank, "experts": linear.experts}
    if linear.heads is not None:
        sizes |= {"heads": linear.heads.count, "own": linear.heads.own}
    slot = _slot(target, sizes, linear.rows, act_dtype)
    return slot.bytes * limits.slots >= slot.counted_bytes * _MOST_COUNTED


def pool_of(site: Site, weight: str = "weight") -> Mapping[str, Any]:
    """The attributes of a pool."""
    found: Mapping[str, Any] = site.attributes[ADAPTERS]
    return found if weight == "weight" else found[weight]


def shrunk_width(slot: AdapterSlot, heads: int = 0) -> int:
    """Floats in a row of `adapter_shrink` output."""
    return max(1, heads) * len(slot.rows) * slot.shrunk_width


def adapter_spec(
    op: str, slot: AdapterSlot, columns: int = 0, rows: tuple[int, ...] = (), /, **params: Any
) -> KernelSpec:
    """The spec of `adapter_shrink` or `adapter_expand` for a pool. columns, rows: of one expert or head, where the slot
    has those of all. params: act_dtype, of experts their number and `top_k`, of heads their number, "own" and `stride`,
    the floats between heads of a row of x, and the target's row parameters.

    The spec contains all that a kernel needs to know of the layout of slots and tiles.
    """
    parts = range(len(slot.rows))
    return KernelSpec.of(
        "other",
        op,
        k=columns or slot.columns,
        parts=" ".join(map(str, rows or slot.rows)),
        rank=slot.rank,
        width=shrunk_width(slot, int(params.get("heads", 0))),
        slot_bytes=slot.bytes,
        a_offsets=" ".join(str(slot.a_offset(part)) for part in parts),
        b_offsets=" ".join(str(slot.b_offset(part)) for part in parts),
        tile_rows=TILE_ROWS,
        **params,
    )


def spec_slot(spec: KernelSpec, target: Target) -> AdapterSlot:
    """The slot layout in the spec of such a kernel."""
    p = spec.as_dict()
    rows = tuple(map(int, str(p["parts"]).split()))
    return _slot(target, {**p, "columns": p["k"]}, rows, str(p["act_dtype"]))


def samples_spec(samples: int) -> KernelSpec:
    """The kernel that makes tiles of sampled rows. samples: the most of a step."""
    return KernelSpec.of("other", "adapter_samples", samples=samples, rows=NUM_SAMPLES, tile_rows=TILE_ROWS)


def with_adapters(site: Site, graph: GraphParams, calls: list[KernelCall]) -> list[KernelCall]:
    """The kernels of a linear or an embedding, with those of its adapters if it has a pool."""
    if ADAPTERS not in site.attributes:
        return calls
    slot, on_samples = slot_of(site, graph), bool(site.attributes["on_samples"])
    rows = {"rows": NUM_SAMPLES} if on_samples else {}
    layout = graph.row_params(on_samples=on_samples)
    shrink = adapter_spec("adapter_shrink", slot, act_dtype=graph.act_dtype, **layout, **rows)
    expand = adapter_spec("adapter_expand", slot, act_dtype=graph.act_dtype, **rows)
    tiles, pool, first, x = BufferSource.ADAPTER_TILES, BufferSource.ADAPTER_POOL, list[KernelCall](), ADAPTER_X
    if pool_of(site).get("table"):
        shrink, x = adapter_spec("adapter_pick", slot, act_dtype=graph.act_dtype), "ids"
    if on_samples:
        first = [KernelCall(samples_spec(graph.shape.samples), (tiles, BufferSource.SAMPLE_INDEX, _SAMPLE_TILES))]
        tiles = _SAMPLE_TILES
    return [
        *first,
        KernelCall(shrink, (x, tiles, pool, _SHRUNK), barrier=False),
        *calls,
        KernelCall(expand, (_SHRUNK, tiles, pool, "out")),
    ]


def with_head_adapters(site: Site, graph: GraphParams, stride: int, calls: list[KernelCall]) -> list[KernelCall]:
    """The kernels of a layer of heads over tokens, with those of its adapters if it has a pool. stride: floats between
    heads of a row of x."""
    if ADAPTERS not in site.attributes:
        return calls
    slot, found = slot_of(site, graph), pool_of(site)
    columns, rows = int(found["columns"]), tuple(map(int, found["rows"]))
    of_heads = {"heads": int(found["heads"]), "own": str(found["own"]), "act_dtype": graph.act_dtype}
    shrink = adapter_spec("adapter_shrink", slot, columns, rows, stride=stride, **of_heads)
    expand = adapter_spec("adapter_expand", slot, columns, rows, **of_heads)
    tiles, pool = BufferSource.ADAPTER_TILES, BufferSource.ADAPTER_POOL
    return [
        KernelCall(shrink, ("x", tiles, pool, _SHRUNK), barrier=False),
        *calls,
        KernelCall(expand, (_SHRUNK, tiles, pool, "out")),
    ]


def adapter_scratch(site: Site, graph: GraphParams) -> dict[str, int]:
    """Scratch bytes for a linear's adapters, by part."""
    if ADAPTERS not in site.attributes:
        return {}
    shape, width = graph.shape, shrunk_width(slot_of(site, graph), int(pool_of(site).get("heads", 0)))
    if site.attributes["on_samples"]:
        # A tile of tokens has a tile of samples, which may be empty.
        return {SHRUNK: 4 * shape.samples * width, SAMPLE_TILES: 4 * (1 + TILE_RECORD * shape.tokens)}
    return {SHRUNK: 4 * shape.tokens * width}
