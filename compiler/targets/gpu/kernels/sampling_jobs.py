"""Records of sampling jobs, the rows they read, and the folding of a row's pieces (FORMAT.md, sampling)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, spread, sync
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.gpu.sampling import PIECE, SPAN, block_of
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when

JOB, RESULT, PARTIAL = 16, 64, 4  # words per record
ROW, OWN, TOLD, TOKEN, MASK, MASK_WORDS, SCALE, MIN_P, COUNT, FLAGS = range(10)
TOP_K, TOP_P, MASS, TELLS = 1, 2, 4, 8  # flags
OF_JOBS, OF_EDITS, OF_DRAWS, OF_TOPS = range(4)  # scalars: counts, then first jobs
MAX, FIRST, BAD = range(3)  # of a partial record
STATUS, FOUND, LARGEST, LOGIT, NUM, IDS, LOGITS = 0, 1, 2, 3, 4, 8, 28  # of a result record
HOST = 1
CHAINS = 8
NONE = 0x7FFFFFFF
INFINITE = 0x7F800000


def float_word(k: Frame, name: str, at: Expr) -> Expr:
    return let(T.reinterpret("float32", k.raw(name, at)), "float32")


def bits_of(x: Expr) -> Expr:
    return T.reinterpret("int32", x)


def minus_infinity() -> Expr:
    return T.reinterpret("float32", T.int32(-(1 << 23)))  # minus infinity


def in_order(x: Expr) -> Expr:
    """Maps a float to an integer of the same order."""
    bits = let(bits_of(x))
    return let(T.bitwise_xor(bits, T.bitwise_and(T.shift_right(bits, T.int32(31)), T.int32(NONE))))


def is_finite(x: Expr) -> Expr:
    return T.bitwise_and(bits_of(x), T.int32(NONE)) < T.int32(INFINITE)


class Row:
    """The row that a job reads."""

    def __init__(self, k: Frame, vocab: int, job: Expr) -> None:
        self._k = k
        self._row, self._own = let(k.raw("jobs", job * JOB + ROW) * vocab), let(k.raw("jobs", job * JOB + OWN))
        self._copy = let((self._own - 1) * vocab)

    def __getitem__(self, index: Expr) -> Expr:
        found = Cell(T.float32(0.0))
        with T.If(self._own == 0):
            with T.Then():
                found.set(self._k.raw("logits", self._row + index))
            with T.Else():
                found.set(self._k.raw("copies", self._copy + index))
        return let(found.get(), "float32")


class Meeting:
    """Folds numbers of a group's items; a loop, because drivers compile barriers slowly."""

    def __init__(self, k: Frame) -> None:
        self._k = k

    @contextmanager
    def _halves(self, item: Expr) -> Iterator[Expr]:
        """The position that this item folds into its own, step after step."""
        with T.serial(let(T.min(calling(self._k).num_groups, 1) * (ITEMS.bit_length() - 1))) as level:
            half = let(T.shift_right(T.int32(ITEMS // 2), level))
            sync()
            with when(item < half):
                yield let(item + half)
        sync()


class Sum(Meeting):
    def __init__(self, k: Frame) -> None:
        super().__init__(k)
        self._memory = Shared(ITEMS, "int32")

    def __call__(self, item: Expr, value: Expr) -> Expr:
        """The folded number, equal in every item. Every item of the group must call it."""
        memory = self._memory
        sync()
        memory[item] = value
        with self._halves(item) as other:
            memory[item] = memory[item] + memory[other]
        return let(memory[0])


class Best(Meeting):
    """Folds (number, position) pairs to the largest number, first position on ties; also folds a sum."""

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


class Job:
    """Sizes that depend on the vocabulary, and a row's maximum."""

    def __init__(self, k: Frame, vocab: int) -> None:
        self._k, self.vocab = k, vocab
        self.pieces, self.spans = -(-vocab // PIECE), -(-vocab // SPAN)
        self.block = block_of(vocab)
        self.blocks = -(-vocab // self.block)

    def word(self, job: Expr, index: int) -> Expr:
        return let(self._k.raw("jobs", job * JOB + index))

    def best(self, job: Expr, best: Best) -> tuple[Expr, Expr, Expr]:
        """(largest logit, its first position, number of pieces with a value that is not finite)."""
        k, item = self._k, calling(self._k).item
        value, place, bad = Cell(minus_infinity()), Cell(T.int32(NONE), "int32"), Cell(T.int32(0), "int32")
        with spread(k, self.pieces) as piece:
            at = let((job * self.pieces + piece) * PARTIAL)
            found, first = float_word(k, "partials", at + MAX), let(k.raw("partials", at + FIRST))
            # An item visits pieces in ascending order.
            with when(found > value.get()):
                value.set(found)
                place.set(first)
            bad.set(bad.get() + k.raw("partials", at + BAD))
        return best(item, value.get(), place.get(), bad.get())


@contextmanager
def pieces_of(k: Frame, job: Job, first: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Loops over (job, piece) for rows from job `first` on, one per group at a time."""
    with calling(k).share_groups(let((k.scalar(OF_JOBS) - first) * job.pieces)) as unit:
        yield let(T.truncdiv(unit, job.pieces) + first), let(T.truncmod(unit, job.pieces))


class Sums:
    """The span sums of a job in shared memory, and their total."""

    def __init__(self, k: Frame, of: Job) -> None:
        self._k, self._of, self._near = k, of, Shared(of.spans, "float64")

    def __getitem__(self, span: Expr) -> Expr:
        return self._near[span]

    def load(self, job: Expr) -> None:
        """Every item of the group must call it."""
        sync()
        with spread(self._k, self._of.spans) as span:
            self._near[span] = self._k.raw("sums", job * self._of.spans + span)
        sync()

    def total(self) -> Expr:
        """The sums added in order."""
        total = Cell(T.float64(0.0), "float64")
        with T.serial(self._of.spans) as span:
            total.set(total.get() + self._near[span])
        return let(total.get(), "float64")
