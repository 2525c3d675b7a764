"""The running result of a query row: folding two results into one, and writing the final one."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.attention_scores import LOG2E
from llmc.compiler.targets.cpu.kernels.attention_split import partial_floats

FLOOR = -1.0e38  # maximum over no scores


def first_key(position: b.Expr, window: int, chunk: int) -> b.Expr:
    """The first key that a token sees: within its window of `window` tokens and its own chunk; 0 means no limit."""
    first = b.let(T.max(position - window + 1, 0)) if window else T.int32(0)
    return b.let(T.max(T.truncdiv(position, chunk) * chunk, first)) if chunk else first


def last_key(position: b.Expr, context: b.Expr, window: int) -> b.Expr:
    """The last key seen by a token with two-sided attention: within its context and less than `window` away."""
    return b.let(T.min(context, position + window) - 1) if window else b.let(context - 1)


def sink_of(k: b.Kernel, head: b.Expr) -> b.Expr:
    """A head's sink in log2 units: 2 to this power is added to the sum of weights."""
    return b.call("mul", b.splat(k["sinks"][head]), b.splat(LOG2E))


class Rows:
    """Running results of `count` rows: the maximum score, Σ weight and Σ weight · value relative to it, in `vectors`
    vectors."""

    def __init__(self, count: int, vectors: int) -> None:
        self.vectors = vectors
        self.top, self.total, self.out = b.Vectors(count), b.Vectors(count), b.Vectors(count * vectors)

    def clear(self, count: b.Expr) -> None:
        """Resets the first `count` rows to the result over no keys."""
        with T.serial(count) as row:
            self.top[row], self.total[row] = b.splat(FLOOR), b.splat(0.0)
        with T.serial(count * self.vectors) as i:
            self.out[i] = b.splat(0.0)

    def fold_totals(self, row: b.Expr, top: b.Expr, total: b.Expr) -> tuple[b.Expr, b.Expr]:
        """Merges the maximum and sum of later keys; returns the factors for the old and the new values."""
        cells = b.Vectors(3)
        cells[2] = b.call("larger", self.top[row], top)
        cells[0] = b.call("exp2", b.call("sub", self.top[row], cells[2]))
        cells[1] = b.call("exp2", b.call("sub", top, cells[2]))
        self.top[row] = cells[2]
        self.total[row] = b.call("fma", self.total[row], cells[0], b.call("mul", total, cells[1]))
        return cells[0], cells[1]

    def fold_values(self, at: b.Expr, values: b.Expr, keep: b.Expr, gain: b.Expr) -> None:
        """Merges a vector of values of later keys. at: row · vectors + column."""
        self.out[at] = b.call("fma", self.out[at], keep, b.call("mul", values, gain))

    def fold(self, row: b.Expr, top: b.Expr, total: b.Expr, values: Callable[[b.Expr], b.Expr]) -> None:
        """Merges the complete result of later keys. values: its vector, by column."""
        keep, gain = self.fold_totals(row, top, total)
        with T.serial(self.vectors) as column:
            self.fold_values(row * self.vectors + column, values(column), keep, gain)

    def fold_row(self, row: b.Expr, later: Rows) -> None:
        """Merges the same row of `later`, a result over later keys."""
        self.fold(row, later.top[row], later.total[row], lambda column: later.out[row * later.vectors + column])


class Partials:
    """The buffer `[token][head][segment][values, maximum, sum]` of float32 partial results."""

    def __init__(self, buffer: b.Expr, heads: int, segments: int, head_dim: int) -> None:
        self.buffer, self.heads, self.segments = buffer, heads, segments
        self.floats = partial_floats(head_dim)
        self.vectors = b.ceil_div(head_dim, b.WIDTH)

    def at(self, token: b.Expr, head: b.Expr, segment: b.Expr) -> b.Expr:
        return b.let(((token * self.heads + head) * self.segments + segment) * self.floats)

    def store(self, at: b.Expr, rows: Rows, row: b.Expr) -> None:
        with T.serial(self.vectors) as column:
            b.store_vector(self.buffer, rows.out[row * self.vectors + column], at + column * b.WIDTH)
        b.store_vector(self.buffer, rows.top[row], at + self.vectors * b.WIDTH)
        b.store_vector(self.buffer, rows.total[row], at + (self.vectors + 1) * b.WIDTH)

    def fold_into(self, rows: Rows, row: b.Expr, at: b.Expr) -> None:
        def vector(index: b.Expr) -> b.Expr:
            return b.load_vector(self.buffer, at + index * b.WIDTH)

        rows.fold(row, vector(self.vectors), vector(self.vectors + 1), vector)


def write_row(
    out: b.Expr,
    rows: Rows,
    row: b.Expr,
    token: b.Expr,
    head: b.Expr,
    heads: int,
    head_dim: int,
    act: str,
    row_tile: int,
    sink: b.Expr | None = None,
) -> None:
    """Writes one head of a token to the packed activation `out` [T, heads · head_dim]. sink: see `sink_of`."""
    words = b.ceil_div(heads * head_dim, b.lanes_of(act))
    base = b.packed_position(token, row_tile, words)
    inverse = b.Vectors(1)
    if sink is None:
        inverse[0] = b.call("div", b.splat(1.0), rows.total[row])
    else:
        keep, _ = rows.fold_totals(row, sink, b.splat(1.0))
        inverse[0] = b.call("div", keep, rows.total[row])
    for start, count in b.pieces(head_dim):
        value = b.call("mul", rows.out[row * rows.vectors + start // b.WIDTH], inverse[0])
        value = b.call("add", value, b.splat(0.0))  # avoids −0
        b.put(out, value, base, head * head_dim + start, act, row_tile, count)
