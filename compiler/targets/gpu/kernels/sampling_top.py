"""Sampling from the sorted likeliest tokens of a row, and logprobs: work on few candidates."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.exponential import exp_negative
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, spread, sync
from llmc.compiler.targets.gpu.kernels.sampling_jobs import (
    COUNT,
    FLAGS,
    FOUND,
    HOST,
    IDS,
    JOB,
    LARGEST,
    LOGIT,
    LOGITS,
    MASS,
    MIN_P,
    NONE,
    NUM,
    OF_JOBS,
    OF_TOPS,
    RESULT,
    SCALE,
    STATUS,
    TELLS,
    TOKEN,
    TOLD,
    TOP_K,
    TOP_P,
    Best,
    Job,
    Row,
    Sum,
    Sums,
    bits_of,
    float_word,
    in_order,
    is_finite,
    minus_infinity,
    pieces_of,
)
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.gpu.sampling import PIECE, SORTED
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when


class _Sorted:
    """The largest logits of a job with their tokens, best first; on ties the smaller id first."""

    def __init__(self, k: Frame, of: Job) -> None:
        self._k, self._of, self._item = k, of, calling(k).item
        self._fold, self._counts = Sum(k), Shared(ITEMS, "int32")
        self.values, self.tokens = Shared(SORTED), Shared(SORTED, "int32")

    def find(self, job: Expr, row: Row, count: Expr) -> Expr:
        """Sorts the candidates: logits with fewer than `count` larger ones in the row. Returns their number.

        If it exceeds SORTED, nothing is sorted. Every item of the group must call it.
        """
        least = self._least(job, count)
        total = self._gather(job, row, count, least)
        found = let(T.Select(total > SORTED, T.int32(0), total))
        size = Cell(T.int32(1), "int32")
        with T.While(size.get() < found):
            size.set(size.get() * 2)
        size = let(size.get())
        with T.serial(let(T.truncdiv(size - found - self._item + (ITEMS - 1), ITEMS))) as turn:
            at = let(found + turn * ITEMS + self._item)
            self.values[at], self.tokens[at] = minus_infinity(), T.int32(NONE)
        self._sort(size)
        return total

    def _least(self, job: Expr, count: Expr) -> Expr:
        """The largest value that at least `count` block maxima reach, found bit by bit."""
        k, least = self._k, Cell(T.int32(-(1 << 31)), "int32")
        with T.serial(let(T.min(calling(k).num_groups, 1) * 32)) as turn:
            bit = let(31 - turn)
            tried = let(
                T.Select(turn == 0, T.int32(0), T.bitwise_or(least.get(), T.shift_left(T.int32(1), T.min(bit, 30))))
            )
            reach = Cell(T.int32(0), "int32")
            with spread(k, self._of.blocks) as block, when(k.raw("maxima", job * self._of.blocks + block) >= tried):
                reach.set(reach.get() + 1)
            with when(self._fold(self._item, reach.get()) >= count):
                least.set(tried)
        return let(least.get())

    def _each(self, job: Expr, row: Row, wanted: Expr, least: Expr, use: Callable[[Expr, Expr], None]) -> None:
        """Calls `use` for each candidate in this item's blocks."""
        k, of = self._k, self._of
        with T.serial(let(T.truncdiv(of.blocks - self._item + (ITEMS - 1), ITEMS) * wanted)) as turn:
            block = let(turn * ITEMS + self._item)
            with when(k.raw("maxima", job * of.blocks + block) >= least):
                begin = let(block * of.block)
                with T.serial(let(T.min(of.block, of.vocab - begin))) as i:
                    x = row[let(begin + i)]
                    with when(T.And(in_order(x) >= least, x > minus_infinity())):
                        use(x, let(begin + i))

    def _gather(self, job: Expr, row: Row, count: Expr, least: Expr) -> Expr:
        wanted, counts, item = let(T.Cast("int32", count > 0)), self._counts, self._item
        mine = Cell(T.int32(0), "int32")
        self._each(job, row, wanted, least, lambda _x, _i: mine.set(mine.get() + 1))
        sync()
        counts[item] = mine.get()
        sync()
        at, total = Cell(T.int32(0), "int32"), Cell(T.int32(0), "int32")
        with T.serial(ITEMS) as other:
            with when(other < item):
                at.set(at.get() + counts[other])
            total.set(total.get() + counts[other])
        fits = let(wanted * T.Cast("int32", total.get() <= SORTED))

        def put(x: Expr, i: Expr) -> None:
            self.values[at.get()], self.tokens[at.get()] = x, i
            at.set(at.get() + 1)

        self._each(job, row, fits, least, put)
        sync()
        return let(total.get())

    def _sort(self, size: Expr) -> None:
        """Bitonic sort of a power-of-two size."""
        values, tokens = self.values, self.tokens
        with T.serial(let(T.min(calling(self._k).num_groups, 1) * (SORTED.bit_length() - 1))) as level:
            whole = let(T.shift_left(T.int32(2), level))
            pairs = let(T.truncdiv(size, 2) * T.Cast("int32", whole <= size))
            with T.serial(let(level + 1)) as down:
                apart = let(T.shift_left(T.int32(1), level - down))
                sync()
                with T.serial(let(T.truncdiv(pairs - self._item + (ITEMS - 1), ITEMS))) as turn:
                    pair = let(turn * ITEMS + self._item)
                    low = let(pair * 2 - T.bitwise_and(pair, apart - 1))
                    high = let(low + apart)
                    a, b = let(values[low], "float32"), let(values[high], "float32")
                    i, j = let(tokens[low]), let(tokens[high])
                    better = let(T.Cast("int32", T.Or(b > a, T.And(b == a, j < i))))
                    rising = let(T.Cast("int32", T.bitwise_and(low, whole) != 0))
                    with when(better != rising):
                        values[low], values[high] = b, a
                        tokens[low], tokens[high] = j, i
        sync()


def sample_top(spec: KernelSpec) -> tirx.PrimFunc:
    """Draws tokens from the top of a row, and reports logprobs: a row's sum and its likeliest tokens."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "numbers": "f64", "logits": "f32", "copies": "f32", "partials": "i32", "maxima": "i32",
               "sums": "f64", "results": "i32", "totals": "f64"}  # fmt: skip
    with Frame(spec.symbol(), buffers) as k:
        of, best, item = Job(k, vocab), Best(k), calling(k).item
        sums, top, first = Sums(k, of), _Sorted(k, of), k.scalar(OF_TOPS)
        with calling(k).share_groups(let(k.scalar(OF_JOBS) - first)) as unit:
            job = let(first + unit)
            row, (largest, _, bad) = Row(k, vocab, job), of.best(job, best)
            count, flags, result = of.word(job, COUNT), of.word(job, FLAGS), let(job * RESULT)
            scale, least = (float_word(k, "jobs", job * JOB + word) for word in (SCALE, MIN_P))
            sums.load(job)
            total = top.find(job, row, count)
            found = let(T.min(T.Select(total > SORTED, T.int32(0), total), count))
            tells = let(T.bitwise_and(flags, T.int32(TELLS)))
            drawn = let(found * T.Cast("int32", tells == 0))
            with T.serial(let(T.truncdiv(drawn - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(turn * ITEMS + item)
                top.values[i] = exp_negative(let((top.values[i] - largest) * scale, "float32"))
            told = let(found - drawn)
            with T.serial(let(T.truncdiv(told - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(turn * ITEMS + item)
                k.put_raw("results", top.tokens[i], let(result + IDS + i))
                k.put_raw("results", bits_of(let(top.values[i], "float32")), let(result + LOGITS + i))
            sync()
            fine = let(T.Cast("int32", T.And(T.And(bad == 0, is_finite(largest)), total <= SORTED)))
            with when(item == 0):
                whole = sums.total()
                k.put_raw("totals", whole, job)
                k.put_raw("results", bits_of(largest), let(result + LARGEST))
                k.put_raw("results", found, let(result + NUM))
                token = Cell(T.int32(0), "int32")
                with when(T.And(tells == 0, fine == 1)):
                    token.set(_drawn(k, job, top, flags, least, whole, count, total, found, vocab))
                host = T.Or(fine == 0, token.get() < 0)
                k.put_raw("results", T.Select(host, T.int32(HOST), T.int32(0)), let(result + STATUS))
                k.put_raw("results", token.get(), let(result + FOUND))
            sync()
    return k.function()


def _drawn(
    k: Frame,
    job: Expr,
    top: _Sorted,
    flags: Expr,
    least: Expr,
    mass: Expr,
    count: Expr,
    total: Expr,
    found: Expr,
    vocab: int,
) -> Expr:
    """The token drawn by one item from sorted weights; −1 if they may be too few. As Sampler::Draw."""

    def flag(which: int) -> Expr:
        return T.bitwise_and(flags, T.int32(which)) != 0

    def weight(i: Expr) -> Expr:
        return let(top.values[i], "float32")

    kept, going = Cell(T.int32(0), "int32"), Cell(T.int32(1), "int32")
    summed = Cell(T.float64(0.0), "float64")
    with T.While(T.And(going.get() == 1, kept.get() < found)):
        one = weight(kept.get())
        with T.If(one < least):
            with T.Then():
                going.set(T.int32(0))
            with T.Else():
                summed.set(summed.get() + T.Cast("float64", one))
                kept.set(kept.get() + 1)
    ended = Cell(T.Cast("int32", kept.get() < found), "int32")
    whole = let(T.Select(flag(MASS), mass, summed.get()), "float64")
    limit = let(k.raw("numbers", job * 2 + 1) * whole, "float64")
    with when(flag(TOP_P)):
        before, i, looking = Cell(T.float64(0.0), "float64"), Cell(T.int32(0), "int32"), Cell(T.int32(1), "int32")
        with T.While(T.And(looking.get() == 1, i.get() < kept.get())):
            before.set(before.get() + T.Cast("float64", weight(i.get())))
            i.set(i.get() + 1)
            with when(before.get() >= limit):
                looking.set(T.int32(0))
        with when(looking.get() == 0):
            ended.set(T.int32(1))
            kept.set(i.get())
            summed.set(before.get())
    complete = T.Or(T.Or(flag(TOP_K), total < count), count == vocab)
    target = let(k.raw("numbers", job * 2) * summed.get(), "float64")
    inside, at, token = Cell(T.float64(0.0), "float64"), Cell(T.int32(0), "int32"), Cell(T.int32(-1), "int32")
    with T.While(T.And(token.get() < 0, at.get() < kept.get())):
        inside.set(inside.get() + T.Cast("float64", weight(at.get())))
        with when(T.Or(inside.get() > target, at.get() == kept.get() - 1)):
            token.set(top.tokens[at.get()])
        at.set(at.get() + 1)
    return let(T.Select(T.Or(complete, ended.get() == 1), token.get(), T.int32(-1)))


def sample_rank(spec: KernelSpec) -> tirx.PrimFunc:
    """Per piece: how many tokens rank before the reported one, and that token's logit."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "logits": "f32", "copies": "f32", "results": "i32", "counts": "i32"}
    with Frame(spec.symbol(), buffers) as k:
        of, fold, item = Job(k, vocab), Sum(k), calling(k).item
        with pieces_of(k, of, k.scalar(OF_TOPS)) as (job, piece):
            row, told, given = Row(k, vocab, job), of.word(job, TOLD), of.word(job, TOKEN)
            flags, token, first = of.word(job, FLAGS), Cell(given, "int32"), let(piece * PIECE)
            with when(told >= 0):
                token.set(k.raw("results", told * RESULT + FOUND))
            # A token that the host will draw is not known yet.
            known = let(T.Cast("int32", T.And(token.get() >= 0, token.get() < vocab)))
            token = let(token.get() * known)
            value, before = row[token], Cell(T.int32(0), "int32")
            tells = T.Cast("int32", T.bitwise_and(flags, T.int32(TELLS)) != 0)
            count = let(T.min(vocab - first, PIECE) * tells)
            with T.serial(let(T.truncdiv(count - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(first + turn * ITEMS + item)
                x = row[i]
                with when(T.Or(x > value, T.And(x == value, i < token))):
                    before.set(before.get() + 1)
            found = fold(item, before.get())
            with when(T.And(item == 0, count > 0)):
                k.put_raw("counts", found, let(job * of.pieces + piece))
                with when(piece == 0):
                    k.put_raw("results", bits_of(value), let(job * RESULT + LOGIT))
    return k.function()
