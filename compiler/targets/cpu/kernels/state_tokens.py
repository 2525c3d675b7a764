"""The tokens of a sequence in a step of a layer with a state, and the KV blocks that have the state.

A block has the state behind the last token that was computed in it. So a step finds the state in the block of the token
before its own. It leaves the state where a block ends, and behind its last token.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b

BUFFERS = ("block_tables", "query_start", "token_seq", "positions")
"""Inputs that say where sequences and their blocks are, int32."""

NUM_SEQS, BLOCK_TABLE_STRIDE = 1, 3  # scalars


class Tokens:
    """A sequence's tokens of a step: rows `first` to `end`.

    position: of the first token. Before position 0 there is no state.
    """

    def __init__(self, k: b.Kernel, stride: b.Expr, sequence: b.Expr, block_size: int) -> None:
        """stride: the scalar of block tables."""
        self._k, self._block_size = k, block_size
        self.first, self.end = b.let(k["query_start"][sequence]), b.let(k["query_start"][sequence + 1])
        self._table = b.let(k["token_seq"][self.first] * stride)
        self.position = b.let(k["positions"][self.first])

    def block_before(self) -> b.Expr:
        """The block with the state before the first token, where there is one."""
        return self._block(self.position - 1)

    def block_of(self, row: b.Expr) -> b.Expr:
        return self._block(self.position + (row - self.first))

    def ends_block(self, row: b.Expr) -> b.Expr:
        return T.truncmod(self.position + (row - self.first) + 1, self._block_size) == 0

    def _block(self, position: b.Expr) -> b.Expr:
        return b.let(self._k["block_tables"][self._table + T.truncdiv(position, self._block_size)])
