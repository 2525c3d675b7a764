"""Sampling: rows of logits to tokens, in the order of operations of `runtime/native/sampling`, so with its bits.

A job reads a row, or the row's modified copy. Jobs lie in the order: the best token, a draw from all, a draw from the
top, logprobs. What a group cannot do, it leaves to the host (`_HOST`). Floats that the host computes in float64 are
computed so here, in the same chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, spread, sync
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.gpu.sampling import PIECE, SORTED, SPAN, block_of
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when

_JOB, _RESULT, _PARTIAL = 16, 64, 4  # words of a record
_ROW, _OWN, _TOLD, _TOKEN, _MASK, _MASK_WORDS, _SCALE, _MIN_P, _COUNT, _FLAGS = range(10)
_TOP_K, _TOP_P, _MASS, _TELLS = 1, 2, 4, 8  # flags
_OF_JOBS, _OF_EDITS, _OF_DRAWS, _OF_TOPS = range(4)  # scalars: numbers, then first jobs
_MAX, _FIRST, _BAD = range(3)  # of a partial record
_STATUS, _FOUND, _LARGEST, _LOGIT, _NUM, _IDS, _LOGITS = 0, 1, 2, 3, 4, 8, 28  # of a result
_HOST = 1
_CHAINS = 8
_NONE = 0x7FFFFFFF
_INFINITE = 0x7F800000


def _float_word(k: Frame, name: str, at: Expr) -> Expr:
    return let(T.reinterpret("float32", k.raw(name, at)), "float32")


def _bits(x: Expr) -> Expr:
    return T.reinterpret("int32", x)


def _lowest() -> Expr:
    return T.reinterpret("float32", T.int32(-(1 << 23)))  # minus infinity


def _ordered(x: Expr) -> Expr:
    """An integer for a float, in the same order."""
    bits = let(_bits(x))
    return let(T.bitwise_xor(bits, T.bitwise_and(T.shift_right(bits, T.int32(31)), T.int32(_NONE))))


def _is_finite(x: Expr) -> Expr:
    return T.bitwise_and(_bits(x), T.int32(_NONE)) < T.int32(_INFINITE)


def _exp(x: Expr) -> Expr:
    """ExpNegative of sampling/logit_rows.h, operation by operation."""
    t = let(T.Select(x < T.float32(-87.0), T.float32(-87.0), x), "float32")
    shifted = let(t * T.float32(1.44269504) + T.float32(12582912.0), "float32")
    n = let(shifted - T.float32(12582912.0), "float32")
    r = let(t - n * T.float32(0.693359375), "float32")
    r = let(r - n * T.float32(-2.12194440e-4), "float32")
    p = T.float32(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = let(p * r + T.float32(term), "float32")
    p = let(p * r * r + r + T.float32(1.0), "float32")
    scale = T.reinterpret("float32", (T.Cast("int32", n) + 127) * T.int32(1 << 23))
    return let(T.Select(x < T.float32(-87.0), T.float32(0.0), p * scale), "float32")


class _Row:
    """What a job reads."""

    def __init__(self, k: Frame, vocab: int, job: Expr) -> None:
        self._k = k
        self._row, self._own = let(k.raw("jobs", job * _JOB + _ROW) * vocab), let(k.raw("jobs", job * _JOB + _OWN))
        self._copy = let((self._own - 1) * vocab)

    def __getitem__(self, index: Expr) -> Expr:
        found = Cell(T.float32(0.0))
        with T.If(self._own == 0):
            with T.Then():
                found.set(self._k.raw("logits", self._row + index))
            with T.Else():
                found.set(self._k.raw("copies", self._copy + index))
        return let(found.get(), "float32")


class _Meeting:
    """What the items of a group make together of numbers of each: in a loop, for drivers take long over barriers."""

    def __init__(self, k: Frame) -> None:
        self._k = k

    @contextmanager
    def _halves(self, item: Expr) -> Iterator[Expr]:
        """The place that this item takes into its own, again and again."""
        with T.serial(let(T.min(calling(self._k).num_groups, 1) * (ITEMS.bit_length() - 1))) as level:
            half = let(T.shift_right(T.int32(ITEMS // 2), level))
            sync()
            with when(item < half):
                yield let(item + half)
        sync()


class _Sum(_Meeting):
    def __init__(self, k: Frame) -> None:
        super().__init__(k)
        self._memory = Shared(ITEMS, "int32")

    def __call__(self, item: Expr, value: Expr) -> Expr:
        """The same for every item. Every item of the group comes here."""
        memory = self._memory
        sync()
        memory[item] = value
        with self._halves(item) as other:
            memory[item] = memory[item] + memory[other]
        return let(memory[0])


class _Best(_Meeting):
    """Of numbers and their places: the largest, and of equal ones the first; and a sum."""

    def __init__(self, k: Frame) -> None:
        super().__init__(k)
        self._values, self._places, self._sums = Shared(ITEMS), Shared(ITEMS, "int32"), Shared(ITEMS, "int32")

    def __call__(self, item: Expr, value: Expr, place: Expr, number: Expr) -> tuple[Expr, Expr, Expr]:
        values, places, sums = self._values, self._places, self._sums
        sync()
        values[item], places[item], sums[item] = value, place, number
        with self._halves(item) as other:
            a, b = let(values[item], "float32"), let(values[other], "float32")
            i, j = let(places[item]), let(places[other])
            values[item] = T.Select(b > a, b, a)
            places[item] = T.Select(b > a, j, T.Select(a > b, i, T.min(i, j)))
            sums[item] = sums[item] + sums[other]
        return let(values[0], "float32"), let(places[0]), let(sums[0])


class _Job:
    """Sizes of the vocabulary, and a row's maximum."""

    def __init__(self, k: Frame, vocab: int) -> None:
        self._k, self.vocab = k, vocab
        self.pieces, self.spans = -(-vocab // PIECE), -(-vocab // SPAN)
        self.block = block_of(vocab)
        self.blocks = -(-vocab // self.block)

    def word(self, job: Expr, index: int) -> Expr:
        return let(self._k.raw("jobs", job * _JOB + index))

    def best(self, job: Expr, best: _Best) -> tuple[Expr, Expr, Expr]:
        """The largest logit, the first place of it, and how many pieces have something that is no finite number."""
        k, item = self._k, calling(self._k).item
        value, place, bad = Cell(_lowest()), Cell(T.int32(_NONE), "int32"), Cell(T.int32(0), "int32")
        with spread(k, self.pieces) as piece:
            at = let((job * self.pieces + piece) * _PARTIAL)
            found, first = _float_word(k, "partials", at + _MAX), let(k.raw("partials", at + _FIRST))
            # An item's pieces ascend.
            with when(found > value.get()):
                value.set(found)
                place.set(first)
            bad.set(bad.get() + k.raw("partials", at + _BAD))
        return best(item, value.get(), place.get(), bad.get())


@contextmanager
def _pieces(k: Frame, job: _Job, first: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Each piece of each row from job `first` on, a group at a time: the job, and the number of the piece."""
    with calling(k).share_groups(let((k.scalar(_OF_JOBS) - first) * job.pieces)) as unit:
        yield let(T.truncdiv(unit, job.pieces) + first), let(T.truncmod(unit, job.pieces))


def sample_mask(spec: KernelSpec) -> tirx.PrimFunc:
    """Copies rows that are about to change, without what their masks forbid."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "masks": "i32", "logits": "f32", "copies": "f32", "partials": "i32"}
    with Frame(spec.symbol(), buffers) as k:
        of, fold, item = _Job(k, vocab), _Sum(k), calling(k).item
        with _pieces(k, of, T.int32(0)) as (job, piece):
            own, row = of.word(job, _OWN), let(of.word(job, _ROW) * vocab)
            mask, words = of.word(job, _MASK), of.word(job, _MASK_WORDS)
            first, bad = let(piece * PIECE), Cell(T.int32(0), "int32")
            count = let(T.min(vocab - first, PIECE) * T.Cast("int32", own > 0))
            with T.serial(let(T.truncdiv(count - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(first + turn * ITEMS + item)
                x, allowed = let(k.raw("logits", row + i), "float32"), Cell(T.int32(1), "int32")
                bad.set(T.Select(_is_finite(x), bad.get(), T.int32(1)))
                with when(mask >= 0):
                    word = let(T.truncdiv(i, 32))
                    allowed.set(T.int32(0))
                    with when(word < words):
                        shifted = T.shift_right(k.raw("masks", mask + word), T.truncmod(i, 32))
                        allowed.set(T.bitwise_and(shifted, T.int32(1)))
                k.put_raw("copies", T.Select(allowed.get() == 1, x, _lowest()), let((own - 1) * vocab + i))
            found = fold(item, bad.get())
            with when(T.And(item == 0, own > 0)):
                k.put_raw("partials", found, let((job * of.pieces + piece) * _PARTIAL + _BAD))
    return k.function()


def sample_edit(spec: KernelSpec) -> tirx.PrimFunc:
    """Bias, stops that come too early and penalties: an item makes all changes of one logit, in their order."""
    vocab = int(spec.as_dict()["vocab"])
    with (
        Frame(spec.symbol(), {"edits": "i32", "changes": "i32", "copies": "f32"}) as k,
        k.share(k.scalar(_OF_EDITS)) as edit,
    ):
        copy, token, begin, count = (let(k.raw("edits", edit * 4 + word)) for word in range(4))
        at = let(copy * vocab + token)
        x = Cell(k.raw("copies", at))
        with T.serial(count) as i:
            kind, by = let(k.raw("changes", (begin + i) * 2)), _float_word(k, "changes", let((begin + i) * 2 + 1))
            now = let(x.get(), "float32")
            with when(kind == 0):
                x.set(now + by)
            with when(kind == 1):
                x.set(_lowest())
            with when(T.And(kind == 2, now > T.float32(0.0))):
                x.set(now / by)
            with when(T.And(kind == 2, T.Not(now > T.float32(0.0)))):
                x.set(now * by)
            with when(kind == 3):
                x.set(now - by)
        k.put_raw("copies", x.get(), at)
    return k.function()


def sample_scan(spec: KernelSpec) -> tirx.PrimFunc:
    """Of each piece the largest logit, and whether all are finite; of each block the largest."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "logits": "f32", "copies": "f32", "partials": "i32", "maxima": "i32"}
    with Frame(spec.symbol(), buffers) as k:
        of, best, item = _Job(k, vocab), _Best(k), calling(k).item
        with _pieces(k, of, T.int32(0)) as (job, piece):
            row, own, first = _Row(k, vocab, job), of.word(job, _OWN), let(piece * PIECE)
            value, place, bad = Cell(_lowest()), Cell(T.int32(_NONE), "int32"), Cell(T.int32(0), "int32")
            count = let(T.min(vocab - first, PIECE))
            with T.serial(let(T.truncdiv(count - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(first + turn * ITEMS + item)
                x = row[i]
                bad.set(T.Select(_is_finite(x), bad.get(), T.int32(1)))
                with when(x > value.get()):
                    value.set(x)
                    place.set(i)
            largest, at, found = best(item, value.get(), place.get(), bad.get())
            to = let((job * of.pieces + piece) * _PARTIAL)
            with when(item == 0):
                k.put_raw("partials", _bits(largest), to + _MAX)
                k.put_raw("partials", at, to + _FIRST)
                with when(own == 0):
                    k.put_raw("partials", found, to + _BAD)
            wanted = T.Cast("int32", T.And(job >= k.scalar(_OF_TOPS), of.word(job, _COUNT) > 0))
            blocks = let(T.truncdiv(count + (of.block - 1), of.block) * wanted)
            with T.serial(let(T.truncdiv(blocks - item + (ITEMS - 1), ITEMS))) as turn:
                block = let(turn * ITEMS + item)
                high, begin = Cell(T.int32(-(1 << 31)), "int32"), let(block * of.block)
                with T.serial(let(T.min(of.block, count - begin))) as i:
                    high.set(T.max(high.get(), _ordered(row[let(first + begin + i)])))
                k.put_raw("maxima", high.get(), let(job * of.blocks + piece * (PIECE // of.block) + block))
    return k.function()


def sample_sum(spec: KernelSpec) -> tirx.PrimFunc:
    """Sums of exponentials of spans, as SumRow has them."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "logits": "f32", "copies": "f32", "partials": "i32", "sums": "f64"}
    with Frame(spec.symbol(), buffers) as k:
        of, best, item = _Job(k, vocab), _Best(k), calling(k).item
        chains = Shared(ITEMS, "float64")
        with _pieces(k, of, k.scalar(_OF_DRAWS)) as (job, piece):
            row, (largest, _, _) = _Row(k, vocab, job), of.best(job, best)
            scale, least = (_float_word(k, "jobs", job * _JOB + word) for word in (_SCALE, _MIN_P))
            span = let(piece * (PIECE // SPAN) + T.truncdiv(item, _CHAINS))
            first = let(span * SPAN + T.truncmod(item, _CHAINS))
            total = Cell(T.float64(0.0), "float64")
            with T.serial(SPAN // _CHAINS) as turn:
                i = let(first + turn * _CHAINS)
                with when(i < vocab):
                    weight = _exp(let((row[i] - largest) * scale, "float32"))
                    with when(weight >= least):
                        total.set(total.get() + T.Cast("float64", weight))
            sync()
            chains[item] = total.get()
            sync()
            with when(T.And(T.truncmod(item, _CHAINS) == 0, span < of.spans)):
                whole = Cell(T.float64(0.0), "float64")
                with T.serial(_CHAINS) as chain:
                    whole.set(whole.get() + chains[item + chain])
                k.put_raw("sums", whole.get(), let(job * of.spans + span))
            sync()
    return k.function()


def sample_best(spec: KernelSpec) -> tirx.PrimFunc:
    """The tokens of greedy jobs."""
    vocab = int(spec.as_dict()["vocab"])
    with Frame(spec.symbol(), {"jobs": "i32", "partials": "i32", "results": "i32"}) as k:
        of, best, item = _Job(k, vocab), _Best(k), calling(k).item
        with calling(k).share_groups(k.scalar(_OF_DRAWS)) as job:
            largest, first, bad = of.best(job, best)
            with when(item == 0):
                fine = T.And(bad == 0, _is_finite(largest))
                k.put_raw("results", T.Select(fine, T.int32(0), T.int32(_HOST)), let(job * _RESULT + _STATUS))
                k.put_raw("results", first, let(job * _RESULT + _FOUND))
    return k.function()


class _Sums:
    """The sums of a job's spans, near at hand, and all of them together."""

    def __init__(self, k: Frame, of: _Job) -> None:
        self._k, self._of, self._near = k, of, Shared(of.spans, "float64")

    def __getitem__(self, span: Expr) -> Expr:
        return self._near[span]

    def load(self, job: Expr) -> None:
        """Every item comes here."""
        sync()
        with spread(self._k, self._of.spans) as span:
            self._near[span] = self._k.raw("sums", job * self._of.spans + span)
        sync()

    def total(self) -> Expr:
        """Added in their order."""
        total = Cell(T.float64(0.0), "float64")
        with T.serial(self._of.spans) as span:
            total.set(total.get() + self._near[span])
        return let(total.get(), "float64")


def sample_draw(spec: KernelSpec) -> tirx.PrimFunc:
    """Tokens drawn from whole rows."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "numbers": "f64", "logits": "f32", "copies": "f32", "partials": "i32", "sums": "f64",
               "results": "i32"}  # fmt: skip
    with Frame(spec.symbol(), buffers) as k:
        of, best, item = _Job(k, vocab), _Best(k), calling(k).item
        sums, weights = _Sums(k, of), Shared(SPAN)
        chosen, start = Shared(1, "int32"), Shared(2, "float64")
        first, end = k.scalar(_OF_DRAWS), k.scalar(_OF_TOPS)
        with calling(k).share_groups(let(end - first)) as unit:
            job = let(first + unit)
            row, (largest, _, bad) = _Row(k, vocab, job), of.best(job, best)
            scale = _float_word(k, "jobs", job * _JOB + _SCALE)
            sums.load(job)
            with when(item == 0):
                target = let(k.raw("numbers", job * 2) * sums.total(), "float64")
                before, span = Cell(T.float64(0.0), "float64"), Cell(T.int32(0), "int32")
                going = Cell(T.int32(1), "int32")
                with T.While(going.get() == 1):
                    behind = let(before.get() + sums[span.get()], "float64")
                    with T.If(T.And(span.get() < of.spans - 1, behind <= target)):
                        with T.Then():
                            before.set(behind)
                            span.set(span.get() + 1)
                        with T.Else():
                            going.set(T.int32(0))
                chosen[0] = span.get()
                start[0], start[1] = before.get(), target
            sync()
            base = let(chosen[0] * SPAN)
            count = let(T.min(vocab - base, SPAN))
            with T.serial(let(T.truncdiv(count - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(turn * ITEMS + item)
                weights[i] = _exp(let((row[let(base + i)] - largest) * scale, "float32"))
            sync()
            with when(item == 0):
                inside, i, token = Cell(start[0], "float64"), Cell(T.int32(0), "int32"), Cell(T.int32(-1), "int32")
                with T.While(T.And(token.get() < 0, i.get() < count)):
                    weight = let(weights[i.get()], "float32")
                    inside.set(inside.get() + T.Cast("float64", weight))
                    with when(T.And(weight > T.float32(0.0), inside.get() > start[1])):
                        token.set(base + i.get())
                    i.set(i.get() + 1)
                # Rounding may have put the target past this span: the host goes on.
                fine = T.And(T.And(bad == 0, _is_finite(largest)), token.get() >= 0)
                k.put_raw("results", T.Select(fine, T.int32(0), T.int32(_HOST)), let(job * _RESULT + _STATUS))
                k.put_raw("results", token.get(), let(job * _RESULT + _FOUND))
    return k.function()


class _Sorted:
    """A job's largest logits with their tokens, best first: of equal ones, the token with the smaller id."""

    def __init__(self, k: Frame, of: _Job) -> None:
        self._k, self._of, self._item = k, of, calling(k).item
        self._fold, self._counts = _Sum(k), Shared(ITEMS, "int32")
        self.values, self.tokens = Shared(SORTED), Shared(SORTED, "int32")

    def find(self, job: Expr, row: _Row, count: Expr) -> Expr:
        """How many there are, with those that no row has more than `count` of before them; more than SORTED: too many,
        and nothing is there. Every item comes here."""
        least = self._least(job, count)
        total = self._gather(job, row, count, least)
        found = let(T.Select(total > SORTED, T.int32(0), total))
        size = Cell(T.int32(1), "int32")
        with T.While(size.get() < found):
            size.set(size.get() * 2)
        size = let(size.get())
        with T.serial(let(T.truncdiv(size - found - self._item + (ITEMS - 1), ITEMS))) as turn:
            at = let(found + turn * ITEMS + self._item)
            self.values[at], self.tokens[at] = _lowest(), T.int32(_NONE)
        self._sort(size)
        return total

    def _least(self, job: Expr, count: Expr) -> Expr:
        """Largest blocks' maximum that `count` blocks reach, a bit after the other."""
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

    def _each(self, job: Expr, row: _Row, wanted: Expr, least: Expr, use: Callable[[Expr, Expr], None]) -> None:
        """Calls `use` for each candidate of this item's blocks."""
        k, of = self._k, self._of
        with T.serial(let(T.truncdiv(of.blocks - self._item + (ITEMS - 1), ITEMS) * wanted)) as turn:
            block = let(turn * ITEMS + self._item)
            with when(k.raw("maxima", job * of.blocks + block) >= least):
                begin = let(block * of.block)
                with T.serial(let(T.min(of.block, of.vocab - begin))) as i:
                    x = row[let(begin + i)]
                    with when(T.And(_ordered(x) >= least, x > _lowest())):
                        use(x, let(begin + i))

    def _gather(self, job: Expr, row: _Row, count: Expr, least: Expr) -> Expr:
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
        """Bitonic, of a power of two."""
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
    """Tokens drawn from the top of a row, and what is told of rows: their sum and their likeliest tokens."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "numbers": "f64", "logits": "f32", "copies": "f32", "partials": "i32", "maxima": "i32",
               "sums": "f64", "results": "i32", "totals": "f64"}  # fmt: skip
    with Frame(spec.symbol(), buffers) as k:
        of, best, item = _Job(k, vocab), _Best(k), calling(k).item
        sums, top, first = _Sums(k, of), _Sorted(k, of), k.scalar(_OF_TOPS)
        with calling(k).share_groups(let(k.scalar(_OF_JOBS) - first)) as unit:
            job = let(first + unit)
            row, (largest, _, bad) = _Row(k, vocab, job), of.best(job, best)
            count, flags, result = of.word(job, _COUNT), of.word(job, _FLAGS), let(job * _RESULT)
            scale, least = (_float_word(k, "jobs", job * _JOB + word) for word in (_SCALE, _MIN_P))
            sums.load(job)
            total = top.find(job, row, count)
            found = let(T.min(T.Select(total > SORTED, T.int32(0), total), count))
            tells = let(T.bitwise_and(flags, T.int32(_TELLS)))
            drawn = let(found * T.Cast("int32", tells == 0))
            with T.serial(let(T.truncdiv(drawn - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(turn * ITEMS + item)
                top.values[i] = _exp(let((top.values[i] - largest) * scale, "float32"))
            told = let(found - drawn)
            with T.serial(let(T.truncdiv(told - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(turn * ITEMS + item)
                k.put_raw("results", top.tokens[i], let(result + _IDS + i))
                k.put_raw("results", _bits(let(top.values[i], "float32")), let(result + _LOGITS + i))
            sync()
            fine = let(T.Cast("int32", T.And(T.And(bad == 0, _is_finite(largest)), total <= SORTED)))
            with when(item == 0):
                whole = sums.total()
                k.put_raw("totals", whole, job)
                k.put_raw("results", _bits(largest), let(result + _LARGEST))
                k.put_raw("results", found, let(result + _NUM))
                token = Cell(T.int32(0), "int32")
                with when(T.And(tells == 0, fine == 1)):
                    token.set(_drawn(k, job, top, flags, least, whole, count, total, found, vocab))
                host = T.Or(fine == 0, token.get() < 0)
                k.put_raw("results", T.Select(host, T.int32(_HOST), T.int32(0)), let(result + _STATUS))
                k.put_raw("results", token.get(), let(result + _FOUND))
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
    """The token that one item draws from sorted weights, -1 where they may be too few. As Sampler::Draw."""

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
    whole = let(T.Select(flag(_MASS), mass, summed.get()), "float64")
    limit = let(k.raw("numbers", job * 2 + 1) * whole, "float64")
    with when(flag(_TOP_P)):
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
    complete = T.Or(T.Or(flag(_TOP_K), total < count), count == vocab)
    target = let(k.raw("numbers", job * 2) * summed.get(), "float64")
    inside, at, token = Cell(T.float64(0.0), "float64"), Cell(T.int32(0), "int32"), Cell(T.int32(-1), "int32")
    with T.While(T.And(token.get() < 0, at.get() < kept.get())):
        inside.set(inside.get() + T.Cast("float64", weight(at.get())))
        with when(T.Or(inside.get() > target, at.get() == kept.get() - 1)):
            token.set(top.tokens[at.get()])
        at.set(at.get() + 1)
    return let(T.Select(T.Or(complete, ended.get() == 1), token.get(), T.int32(-1)))


def sample_rank(spec: KernelSpec) -> tirx.PrimFunc:
    """Of each piece how many tokens stand before the one that is told of, and that one's logit."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "logits": "f32", "copies": "f32", "results": "i32", "counts": "i32"}
    with Frame(spec.symbol(), buffers) as k:
        of, fold, item = _Job(k, vocab), _Sum(k), calling(k).item
        with _pieces(k, of, k.scalar(_OF_TOPS)) as (job, piece):
            row, told, given = _Row(k, vocab, job), of.word(job, _TOLD), of.word(job, _TOKEN)
            flags, token, first = of.word(job, _FLAGS), Cell(given, "int32"), let(piece * PIECE)
            with when(told >= 0):
                token.set(k.raw("results", told * _RESULT + _FOUND))
            # One that the host is going to draw is not known yet.
            known = let(T.Cast("int32", T.And(token.get() >= 0, token.get() < vocab)))
            token = let(token.get() * known)
            value, before = row[token], Cell(T.int32(0), "int32")
            tells = T.Cast("int32", T.bitwise_and(flags, T.int32(_TELLS)) != 0)
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
                    k.put_raw("results", _bits(value), let(job * _RESULT + _LOGIT))
    return k.function()
