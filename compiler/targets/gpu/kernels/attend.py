"""The body of attention kernels: which rows and keys a group computes, and what becomes of their partitions.

It makes no difference whether one group computes all partitions, or several groups do and `attention_merge.py` folds
them; nor whether a group has one token or several.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.attention_split import PARTITION
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.gpu.kernels.partition import Keys, Partition
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.softmax import LEAST, Sums, folded, joined, later_maximum, scaled
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Expr, Frame, let, when


class Result:
    """What partitions in order are folded into. heads: rows of each token of a run."""

    def __init__(self, k: Frame, run: Run, heads: int, width: int) -> None:
        self._k, self._run, self._heads = k, run, heads
        rows = heads * run.most
        self._rows = range(rows)
        self._top, self._total, self._keep, self._gain = (Shared(rows) for _ in range(4))
        self._sums = Sums(k, rows, width)

    def begin(self) -> None:
        """Every item of the group must call it, and `sync` before `fold`."""
        item = calling(self._k).item
        self._sums.clear()
        sync()
        with when(item < len(self._rows)):
            self._top[item] = T.float32(LEAST)
            self._total[item] = T.float32(0.0)

    def fold(self, of: Partition) -> None:
        """Folds the partition computed last; item r does the sums of row r."""
        item = calling(self._k).item
        with when(item < self._run.count * self._heads):
            before, most = let(self._top[item], "float32"), of.most(item)
            top = later_maximum(before, most)
            keep, gain = scaled(before, top), scaled(most, top)
            self._total[item] = folded(self._total[item], keep, of.total(item), gain)
            self._top[item], self._keep[item], self._gain[item] = top, keep, gain
        sync()

        def fold(token: int) -> None:
            for row in self._rows[token * self._heads : (token + 1) * self._heads]:
                keep, gain = (let(shared[row], "float32") for shared in (self._keep, self._gain))
                self._sums.fold(row, of.sums, keep, gain)

        # A partition without keys leaves a result as it is, also the sign of a zero.
        of.each_token(fold)

    def finish(self, keys: Keys) -> None:
        """Writes the values."""
        item, sink = calling(self._k).item, keys.sink
        if sink is not None:
            sync()  # all items have read the factors of the last partition
            with when(item < self._run.count * self._heads):
                before, one = let(self._top[item], "float32"), let(sink(item), "float32")
                top = later_maximum(before, one)
                self._keep[item] = scaled(before, top)
                self._total[item] = joined(self._total[item], self._keep[item], scaled(one, top))
        sync()
        for token in range(self._run.most):
            with when(token < self._run.count):
                for row in self._rows[token * self._heads : (token + 1) * self._heads]:
                    self._write(keys, row)

    def _write(self, keys: Keys, row: int) -> None:
        total = let(self._total[row], "float32")
        keep = None if keys.sink is None else let(self._keep[row], "float32")

        def write(element: Expr, cell: Expr) -> None:
            value = cell.get() if keep is None else let(cell.get() * keep, "float32")
            keys.put(row, element, value / total)

        self._sums.each(row, write)


def attend(k: Frame, keys: Keys, heads: int, together: int, tokens: int, width: int, segments: int) -> None:
    """The body of a kernel: a group computes `together` heads of a run of at most `tokens` tokens, and of a split
    context one partition of it.

    segments: partitions side by side in the buffer `partials`; 0: a group walks the whole context.
    """
    parts, num_tokens, side = heads // together, k.scalar(NUM_TOKENS), max(1, segments)
    run = Run(k, tokens, keys.seen)
    tiles = let(T.truncdiv(num_tokens + (tokens - 1), tokens))
    units = let(tiles * parts)
    partition = Partition(k, run, keys, together, width)
    result = None if segments else Result(k, run, together, width)
    with calling(k).share_groups(let(units * (side * tokens))) as unit:
        # Units come later that seldom have work: later partitions, and runs that do not start with a tile of tokens.
        slot, rest = let(T.truncdiv(unit, units)), let(T.truncmod(unit, units))
        offset, own = let(T.truncdiv(slot, side)), let(T.truncmod(slot, side))
        # Later tokens see more keys, so they begin first.
        tile = let(tiles - 1 - T.truncdiv(rest, parts))
        head = let(T.truncmod(rest, parts) * together)
        run.begin(tile, offset)
        keys.begin(run, head)
        start, end = run.partitions()
        if segments:
            # As in `turns`, a compiler must not see that the loop has one turn at most.
            one = let(T.truncdiv(units, T.max(units, 1)))
            start, end = let(T.max(start, own)), let(T.min(end, own + one))
        if result is not None:
            result.begin()
        sync()
        # Also for units without keys: PoCL 3.1 misplaces what is guarded between two barriers.
        keys.write_own(start, end)
        keys.load()
        with T.serial(start, end) as number:
            partition.compute(let(number * PARTITION))
            if result is not None:
                result.fold(partition)
            else:
                record = let((run.token * heads + head) * segments + number)
                partition.store(record, heads * segments, segments, width)
        if result is not None:
            result.finish(keys)
