"""Attention that runs on tensor cores, and its tiles. Imports no tvm.

A graph's kernels all use them, or none does, so that a query has one order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from llmc.compiler.dtypes import HALVES
from llmc.compiler.kernel_spec import KernelSpec

ITEMS = 128
"""Work items per group: four warps, which divide keys where they find scores, and elements where they add values."""
WARPS = ITEMS // 32
TILE_ROWS = 8
"""Query rows of one product."""
STEP = 16
"""Keys of one product, and elements of a tile of values."""
_MOST_TILES = 8  # of rows in a group
_MOST_SUMS = 12  # tiles of rows times tiles of elements per warp, so that sums stay in registers
_WIDE_TILES = 2  # of rows of the widest values, whose sums leave room for little else
_MOST_WIDTH = 512  # of values


@dataclass(frozen=True)
class Source:
    """A buffer of queries, and the elements of keys that they are multiplied by."""

    name: str
    begin: int
    width: int


@dataclass(frozen=True)
class TensorAttention:
    """dtype: of keys and values, in which queries and weights are multiplied. width: of values. sources: of queries.
    group: query heads that share keys. kv_heads: of a token. runs: whether a sequence may have several tokens in a
    step."""

    dtype: str
    width: int
    sources: tuple[Source, ...]
    group: int
    kv_heads: int
    runs: bool

    @property
    def most_tiles(self) -> int:
        """Tiles of query rows that a unit has registers for."""
        return min(_MOST_TILES, max(_WIDE_TILES, _MOST_SUMS // (self.pieces_per_warp * self.piece)))

    @property
    def splits(self) -> int:
        """Units into which query heads that share keys are divided.

        One tile of rows leaves registers for values that are on their way, and neighbouring tokens fill others. Wide
        values have no such room, so as many heads as possible share a read of them.
        """
        tiles = self.most_tiles if self.most_tiles == _WIDE_TILES else 1
        return -(-self.group // (TILE_ROWS * tiles))

    @property
    def heads(self) -> int:
        """Query heads of a unit; the last unit of a KV head may have fewer."""
        return -(-self.group // self.splits)

    @property
    def tokens(self) -> int:
        """Neighbouring tokens of a sequence that share one read of keys and values."""
        return max(1, self.most_tiles * TILE_ROWS // self.heads) if self.runs else 1

    @property
    def tiles(self) -> int:
        """Tiles of query rows of a unit."""
        return -(-self.heads * self.tokens // TILE_ROWS)

    @property
    def units(self) -> int:
        """Units of a token, or of a tile of tokens."""
        return self.kv_heads * self.splits

    @property
    def piece(self) -> int:
        """Tiles of elements whose values a lane reads at once: 4 bytes of each position for every tile."""
        return gcd(self.width // STEP // WARPS, 4) if self.width % (STEP * WARPS) == 0 else 1

    @property
    def pieces(self) -> int:
        return self.width // (STEP * self.piece)

    @property
    def pieces_per_warp(self) -> int:
        return -(-self.pieces // WARPS)


def tensor_attention(spec: KernelSpec) -> TensorAttention | None:
    """The attention on tensor cores; None if it needs plain multiply-adds."""
    p = spec.as_dict()
    if spec.op not in ("paged_attention", "rotated_attention", "latent_attention") or p["kv_dtype"] not in HALVES:
        return None
    width, heads, kv_heads = int(p["head_dim"]), int(p["num_heads"]), int(p["num_kv_heads"])
    sources: tuple[Source, ...] = (Source("q", 0, width),)
    if spec.op == "latent_attention":
        rank = int(p["rank"])
        sources, width = (Source("q", 0, rank), Source("q_rotated", rank, width - rank)), rank
        if rank % (2 * STEP):
            return None
    elif p["act_dtype"] == "f32":
        return None
    if width > _MOST_WIDTH or any(one.width % STEP for one in sources) or int(p["block_size"]) % STEP:
        return None
    return TensorAttention(str(p["kv_dtype"]), width, sources, heads // kv_heads, kv_heads, bool(p.get("runs")))
