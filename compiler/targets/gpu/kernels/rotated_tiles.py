"""Query rows of rotated_attention on tensor cores, which a unit makes of qkv; it writes the token's key and value, too.

A warp turns a head, so that it waits for no other one.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.groups import sync_written, unrolled
from llmc.compiler.targets.gpu.kernels.query_tiles import Lane, QueryTiles
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.turned import OfWarp, OwnHeads
from llmc.compiler.targets.gpu.tensor_attention import WARPS, TensorAttention
from llmc.compiler.targets.reference.kernels.attention import RopeWrite
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, when
from llmc.compiler.targets.reference.kernels.kv_pools import Pool


class RotatedTiles(QueryTiles):
    """Of a token alone. In no spec of tensor cores, the KV cache has scales."""

    def __init__(self, k: Frame, spec: KernelSpec, of: TensorAttention, run: Run, lane: Lane) -> None:
        super().__init__(k, of, run, lane)
        self._rope = RopeWrite(spec)
        self._elements = OfWarp(lane.number, of.width)
        self._own = OwnHeads(k, self._rope, self._elements)

    def begin(self, head: Expr, of_part: Expr) -> None:
        super().begin(head, of_part)
        self._own.begin(self._run.token)

    def write_own(self, start: Expr, end: Expr) -> None:
        if not self._own.writes:
            return
        kv_head = let(T.truncdiv(self._head, self._of.group))
        with when(self._own.is_among(start, end)):
            with when(self._lane.warp == 0):
                self._write(self._rope.keys, kv_head, self._own.key(kv_head))
            with when(self._lane.warp == 1):
                self._write(self._rope.values, kv_head, self._own.value(kv_head))

    def _write(self, pool: Pool, kv_head: Expr, found: Array) -> None:
        row = pool.row(*self._own.place(kv_head))
        with self._elements.each() as (place, i):
            self._k.store(pool.name, found[place], row + i)

    def load(self) -> None:
        with unrolled(self.rows // WARPS) as turn:
            row = let(turn * WARPS + self._lane.warp)
            pairs = Array(self._elements.places // 2, "uint32")
            with unrolled(self._elements.places // 2) as pair:
                pairs[pair] = T.uint32(0)
            with when(self.exists(row)):
                found = self._own.query(self.head(row))
                with unrolled(self._elements.places // 2) as pair:
                    numbers = found[2 * pair], found[2 * pair + 1]
                    pairs[pair] = T.call_pure_extern("uint32", f"llmc_rounded_{self._of.dtype}", *numbers)
            with self._elements.each_pair() as (pair, element):
                self.put(row, element, pairs[pair])
        if self._own.writes:
            sync_written()  # items may read values before they next meet
