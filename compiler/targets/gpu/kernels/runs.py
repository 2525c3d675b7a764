"""Runs: neighbouring tokens of one sequence, whose queries a group computes together, and the keys that each sees."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.attention_split import PARTITION
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Cell, Expr, Frame, let, when


class Run:
    """A run of at most `most` tokens. seen: the first and the last key that a token sees.

    After `begin`: token: the first. count: of tokens; 0: another unit has them. alone: whether there is one token, as
    1 or 0; None where there is never more. lowest, highest: keys that any token sees. common_first, common_last: all of
    them see the keys between, of which there may be none.
    """

    alone: Expr | None = None

    def __init__(self, k: Frame, most: int, seen: Callable[[Expr], tuple[Expr, Expr]]) -> None:
        self._k, self.most, self._seen = k, most, seen
        if most > 1:
            self._first, self._last = Shared(most, "int32"), Shared(most, "int32")

    def begin(self, tile: Expr, offset: Expr) -> None:
        """Starts with token `offset` of a tile of tokens, if a run starts there. Afterwards items must `sync`."""
        if self.most == 1:
            self.token, self.count = tile, T.int32(1)
            self.lowest, self.highest = self._seen(tile)
            self.common_first, self.common_last = self.lowest, self.highest
            return
        k, num_tokens = self._k, self._k.scalar(NUM_TOKENS)
        begin = let(tile * self.most)
        wanted = let(begin + offset)
        end = let(T.min(begin + self.most, num_tokens))
        self.token = token = let(T.min(wanted, num_tokens - 1))
        sequence = let(k.raw("token_seq", token))
        before = let(k.raw("token_seq", T.max(token - 1, 0)))
        starts = let(T.Cast("int32", T.And(wanted < num_tokens, T.Or(offset == 0, before != sequence))))
        count = Cell(T.int32(1), "int32")
        # Most units have no run: they look at no other token.
        with (
            T.serial(let(token + 1), let(token + 1 + (end - token - 1) * starts)) as other,
            when(k.raw("token_seq", other) == sequence),
        ):
            count.set(count.get() + 1)
        last_token = let(token + count.get() - 1)
        self.count = let(count.get() * starts)
        self.alone = let(T.Cast("int32", self.count == 1))
        # Later tokens see no earlier keys, and at least as many later ones.
        self.lowest, self.common_last = self._seen(token)
        self.common_first, self.highest = self._seen(last_token)
        sync()  # all items have read those of the run before
        item = calling(k).item
        with when(item < self.most):
            # Past the last token, it stands for those that there are not.
            self._first[item], self._last[item] = self._seen(let(T.min(token + item, last_token)))

    def partitions(self) -> tuple[Expr, Expr]:
        """The first partition of keys, and the one behind the last; none for a unit without tokens."""
        start, end = let(T.truncdiv(self.lowest, PARTITION)), let(T.truncdiv(self.highest, PARTITION) + 1)
        return start, end if self.most == 1 else let(start + (end - start) * T.min(self.count, 1))

    def first(self, token: Expr) -> Expr:
        """The first key that token `token` of the run sees."""
        return self.lowest if self.most == 1 else self._first[token]

    def last(self, token: Expr) -> Expr:
        """The last key that token `token` of the run sees."""
        return self.highest if self.most == 1 else self._last[token]

    def sees(self, token: Expr, first: Expr, last: Expr) -> Expr:
        """Whether token `token` of the run sees any of these keys."""
        if self.most == 1:
            return T.And(self.lowest <= last, first <= self.highest)
        return T.And(self._first[token] <= last, first <= self._last[token])
