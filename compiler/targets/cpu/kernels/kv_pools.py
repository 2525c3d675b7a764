"""Layout `tiles` of the key and value pools (FORMAT.md), in 4-byte words, and its writer."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import kv_numbers, kv_stores
from llmc.kv_dtypes import KV_DTYPES

SMALLEST = 1e-30  # smaller magnitudes count as zero; the largest number of a dtype divided by this is finite


class KvPools:
    """The blocks of both pools.

    lanes: elements per word.
    key_words, value_words: size of one head's part of a block, with its scales after the numbers. A token has one for
    its value, and `num_key_scales` for its key: first those of all tokens for the key's first part, then for the next.
    """

    def __init__(self, dtype: str, kv_heads: int, head_dim: int, block: int, num_key_scales: int = 1) -> None:
        if dtype not in KV_DTYPES:
            raise KernelSpecError(f"kv_dtype {dtype!r} is not one of {', '.join(KV_DTYPES)}")
        self.dtype, self.lanes, self.largest = dtype, KV_DTYPES[dtype].per_word, KV_DTYPES[dtype].largest
        if head_dim % self.lanes or block % b.WIDTH:
            raise KernelSpecError(
                f"a KV cache of {dtype} needs a head_dim that is a multiple of {self.lanes} and blocks of a multiple "
                f"of {b.WIDTH} tokens, got {head_dim} and {block}"
            )
        self._kv_heads, self.block = kv_heads, block
        self.width = b.ceil_div(head_dim, b.WIDTH) * b.WIDTH
        """Elements of a value, padding included."""
        scales = 0 if self.largest is None else block
        self.key_scales, self.value_scales = head_dim // self.lanes * block, block // self.lanes * self.width
        """Where the scales begin in a head's part."""
        self.key_words = self.key_scales + num_key_scales * scales
        self.value_words = self.value_scales + scales

    @property
    def word_dtype(self) -> str:
        """TIR dtype of the pools' words."""
        return "float32" if self.dtype == "f32" else "int32"

    def keys(self, kv_block: b.Expr, head: b.Expr) -> b.Expr:
        """Offset of a head's keys in a block. Word `i // lanes` of a key is at `i // lanes · block` words."""
        return (kv_block * self._kv_heads + head) * self.key_words

    def values(self, kv_block: b.Expr, head: b.Expr) -> b.Expr:
        """Offset of a head's values in a block, where values of `lanes` tokens are interleaved."""
        return (kv_block * self._kv_heads + head) * self.value_words


class Head:
    """Writes one head of a token to a pool: put all elements, then finish. Numbers with a scale are buffered until
    then."""

    def __init__(
        self, pool: b.Expr, pools: KvPools, store: Callable[[b.Expr, int, int], None], scale_at: b.Expr, pieces: int
    ) -> None:
        self._pool, self._pools, self._store, self._scale_at = pool, pools, store, scale_at
        self._pieces: list[tuple[int, int]] = []
        if pools.largest is not None:
            self._kept, self._widest = b.Vectors(pieces), b.Vectors(1)
            self._widest[0] = b.splat(0.0)

    def put(self, value: b.Expr, start: int, count: int) -> None:
        """Takes elements [start, start + count); other lanes must be 0."""
        if self._pools.largest is None:
            self._store(value, start, count)
            return
        kept = len(self._pieces)
        self._kept[kept] = value
        self._widest[0] = b.call("widest", self._widest[0], self._kept[kept])
        self._pieces.append((start, count))

    def finish(self, scale: b.Expr | None) -> None:
        """scale: a float32 stated by the checkpoint; None: largest magnitude divided by the largest number."""
        largest = self._pools.largest
        if largest is None:
            return
        factors = b.Vectors(2)
        if scale is None:
            factors[0] = b.call("widest_lane", self._widest[0])
            factors[1] = b.call("div", b.splat(largest), b.call("max", factors[0], b.splat(SMALLEST)))
            factors[0] = b.call("div", factors[0], b.splat(largest))
        else:
            factors[0] = b.splat(scale)
        for kept, (start, count) in enumerate(self._pieces):
            value = self._kept[kept]
            self._store(
                b.call("mul", value, factors[1]) if scale is None else b.call("div", value, factors[0]), start, count
            )
        if scale is not None:
            # Infinity and NaN are conveyed by the scale alone.
            factors[0] = b.call("spoilt", factors[0], b.call("widest_lane", self._widest[0]))
        b.do("store_f32", factors[0], b.at(self._pool, self._scale_at), 1)


class Writer:
    """Stores the heads of tokens. keys, values: (start, count) of the vectors in which they are written."""

    def __init__(self, pools: KvPools, keys: list[tuple[int, int]], values: list[tuple[int, int]]) -> None:
        self._pools, self._keys, self._values = pools, keys, values

    def helpers(self) -> str:
        """IR text of the helpers that this uses."""
        pools, dtype = self._pools, self._pools.dtype
        scatters = [(pools.block, count, start % pools.lanes) for start, count in self._keys]
        stores = kv_stores.stores(dtype, scatters, [count for _, count in self._values])
        return stores if pools.largest is None else kv_numbers.rounding(dtype) + stores

    def key(self, pool: b.Expr, base: b.Expr, token: b.Expr, part: int = 0) -> Head:
        """A writer for the key of `token` in the block; base: see `KvPools.keys`. part: number of a part of the key
        with its own scale."""
        pools = self._pools

        def store(value: b.Expr, start: int, count: int) -> None:
            at = base + start // pools.lanes * pools.block + token
            b.do(kv_stores.scatter_name(pools.dtype, pools.block, count, start % pools.lanes), value, b.at(pool, at))

        return Head(pool, pools, store, base + (pools.key_scales + part * pools.block) + token, len(self._keys))

    def value(self, pool: b.Expr, base: b.Expr, token: b.Expr) -> Head:
        """A writer for the value of `token` in the block; base: see `KvPools.values`."""
        pools = self._pools

        def store(value: b.Expr, start: int, count: int) -> None:
            at = base + T.truncdiv(token, pools.lanes) * pools.width + start
            b.do(kv_stores.spread_name(pools.dtype, count), value, b.at(pool, at), T.truncmod(token, pools.lanes))

        return Head(pool, pools, store, base + pools.value_scales + token, len(self._values))
