"""Where a token's keys and values lie in the pools of layout `tiles` (FORMAT.md), in words of 4 bytes."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import f16, kv_stores
from llmc.kv_dtypes import KV_DTYPES


class KvPools:
    """Blocks of both pools. lanes: elements of a word; key_words, value_words: of one head's part of a block."""

    def __init__(self, dtype: str, kv_heads: int, head_dim: int, block: int) -> None:
        if dtype not in KV_DTYPES:
            raise KernelSpecError(f"kv_dtype {dtype!r} is not one of {', '.join(KV_DTYPES)}")
        self.dtype, self.lanes = dtype, KV_DTYPES[dtype].per_word
        if head_dim % self.lanes or block % b.WIDTH:
            raise KernelSpecError(
                f"a KV cache of {dtype} needs a head_dim that is a multiple of {self.lanes} and blocks of a multiple "
                f"of {b.WIDTH} tokens, got {head_dim} and {block}"
            )
        self._kv_heads, self.block = kv_heads, block
        self.width = b.ceil_div(head_dim, b.WIDTH) * b.WIDTH
        """Elements of a value, padding included."""
        self.key_words = head_dim // self.lanes * block
        self.value_words = block // self.lanes * self.width

    @property
    def word_dtype(self) -> str:
        """TIR dtype of the pools' words."""
        return "float32" if self.dtype == "f32" else "int32"

    def keys(self, kv_block: b.Expr, head: b.Expr) -> b.Expr:
        """Where the keys of a head begin in a block: word `i // lanes` of a key is `i // lanes · block` words on."""
        return (kv_block * self._kv_heads + head) * self.key_words

    def values(self, kv_block: b.Expr, head: b.Expr) -> b.Expr:
        """Where the values of a head begin in a block: those of `lanes` tokens lie together."""
        return (kv_block * self._kv_heads + head) * self.value_words


class Writer:
    """Stores the elements of one token. keys, values: (start, count) of the vectors that they are written in."""

    def __init__(self, pools: KvPools, keys: list[tuple[int, int]], values: list[tuple[int, int]]) -> None:
        self._pools, self._keys, self._values = pools, keys, values

    def helpers(self) -> str:
        """IR text of the helpers this uses."""
        pools, dtype = self._pools, self._pools.dtype
        scatters = [(pools.block, count, start % pools.lanes) for start, count in self._keys]
        rounding = f16.round_f16() if dtype == "f16" else ""
        return rounding + kv_stores.stores(dtype, scatters, [count for _, count in self._values])

    def key(self, pool: b.Expr, base: b.Expr, token: b.Expr, value: b.Expr, start: int, count: int) -> None:
        """Elements [start, start + count) of the key of a token of the block; base: see `KvPools.keys`."""
        pools = self._pools
        at = base + start // pools.lanes * pools.block + token
        b.do(kv_stores.scatter_name(pools.dtype, pools.block, count, start % pools.lanes), value, b.at(pool, at))

    def value(self, pool: b.Expr, base: b.Expr, token: b.Expr, value: b.Expr, start: int, count: int) -> None:
        """Elements of the value of a token of the block; base: see `KvPools.values`."""
        pools = self._pools
        at = base + T.truncdiv(token, pools.lanes) * pools.width + start
        b.do(kv_stores.spread_name(pools.dtype, count), value, b.at(pool, at), T.truncmod(token, pools.lanes))
