"""Symbolic values of a graph: each element is a combination of elements of a token's rows, with known coefficients.

A tensor is represented elementwise: the token of each element, and the sum that it equals. So reshapes, transposes,
slices and concatenations are numpy's, however an exporter writes them; the result is read off at the end. A `Term` is a
source of rows; `Flat` is a token's row, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from llmc.models.convert import Array

Space = Literal["new", "cached", "all"]
"""Tokens of this step, cached tokens, or both in order."""


class Unrecognised(Exception):
    """A step that occurs in no known model; the message states it, as in `adds rows of tokens`."""


@dataclass(frozen=True, eq=False)
class Term:
    """A source of one row per token. width: elements of a row."""

    width: int


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight [rows, columns] as the graph reads it. name: of the initializer. array: computed values instead. turned:
    the initializer is [columns, rows]."""

    shape: tuple[int, int]
    name: str | None = None
    array: Array | None = None
    turned: bool = False

    @property
    def transposed(self) -> Matrix:
        return replace(self, shape=self.shape[::-1], turned=not self.turned)


@dataclass(frozen=True, eq=False)
class Part:
    """coef times element idx of a term's row, for each element of a tensor; idx and coef have its shape."""

    term: Term
    idx: Array
    coef: Array


@dataclass(frozen=True, eq=False)
class FlatPart:
    """idx [elements]; coef float32 [elements], or [tokens, elements] if it differs between tokens."""

    term: Term
    idx: Array
    coef: Array

    @cached_property
    def is_whole(self) -> bool:
        """Whether it is the term's whole row in order, up to factors."""
        return self.coef.ndim == 1 and np.array_equal(self.idx, np.arange(self.term.width))

    @cached_property
    def factor(self) -> float | None:
        """The common factor of all elements; None if they differ."""
        first = self.coef.flat[0] if self.coef.size else np.float32(1)
        return float(first) if np.all(self.coef == first) else None


@dataclass(frozen=True, eq=False)
class Flat:
    """A token's row: a sum of parts, plus const, shaped like `FlatPart.coef`; None for none."""

    size: int
    parts: tuple[FlatPart, ...]
    const: Array | None = None

    @property
    def only(self) -> Term | None:
        """The term whose unmodified row this is, or None."""
        if len(self.parts) != 1 or self.const is not None:
            return None
        part = self.parts[0]
        return part.term if part.is_whole and part.factor == 1.0 else None

    def same(self, other: Flat) -> bool:
        if self is other:
            return True
        if len(self.parts) != len(other.parts) or not _equal(self.const, other.const):
            return False
        return all(
            a.term is b.term and _equal(a.idx, b.idx) and _equal(a.coef, b.coef)
            for a, b in zip(self.parts, other.parts, strict=True)
        )


def _equal(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or np.array_equal(a, b)


@dataclass(frozen=True, eq=False)
class Rows:
    """A tensor of the graph. tok: int32, same shape: the token of each element. const: added values."""

    tok: Array
    parts: tuple[Part, ...]
    const: Array | None = None
    space: Space = "new"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tok.shape

    def moved(self, function: Callable[[Array], Array]) -> Rows:
        """The same elements, rearranged by `function`."""
        parts = tuple(Part(part.term, function(part.idx), function(part.coef)) for part in self.parts)
        const = None if self.const is None else function(self.const)
        return Rows(function(self.tok), parts, const, self.space)

    def scaled(self, by: Array) -> Rows:
        """Multiplied by known numbers of a broadcastable shape."""
        whole = self._broadcast(by.shape)
        by = np.broadcast_to(np.asarray(by, np.float32), whole.shape)
        parts = tuple(Part(part.term, part.idx, part.coef * by) for part in whole.parts)
        return Rows(whole.tok, parts, None if whole.const is None else whole.const * by, whole.space)

    def shifted(self, by: Array) -> Rows:
        """Plus known numbers."""
        whole = self._broadcast(by.shape)
        by = np.broadcast_to(np.asarray(by, np.float32), whole.shape)
        return replace(whole, const=by if whole.const is None else whole.const + by)

    def _broadcast(self, shape: tuple[int, ...]) -> Rows:
        wanted = np.broadcast_shapes(self.shape, shape)
        return self if wanted == self.shape else self.moved(lambda array: np.broadcast_to(array, wanted))

    def plus(self, other: Rows) -> Rows:
        a, b = together(self, other)
        parts = list(a.parts)
        for part in b.parts:
            at = next((i for i, p in enumerate(parts) if p.term is part.term and np.array_equal(p.idx, part.idx)), None)
            if at is None:
                parts.append(part)
            else:
                parts[at] = Part(part.term, part.idx, parts[at].coef + part.coef)
        const = a.const if b.const is None else b.const if a.const is None else a.const + b.const
        return Rows(a.tok, tuple(parts), const, a.space)

    @cached_property
    def _order(self) -> tuple[Array, Array]:
        """(tokens, flat positions of each one's elements [tokens, elements])."""
        flat = self.tok.ravel()
        tokens, counts = np.unique(flat, return_counts=True)
        if not len(counts) or (counts != counts[0]).any():
            raise Unrecognised("takes some elements of one token and others of another")
        order = np.argsort(flat, kind="stable").reshape(len(tokens), -1)
        return tokens, order

    @cached_property
    def flat(self) -> Flat:
        """Each token's row, with elements in the tensor's order. Raises Unrecognised."""
        _, order = self._order
        parts = tuple(
            FlatPart(part.term, _alike(part.idx.ravel()[order]), _maybe_alike(part.coef.ravel()[order]))
            for part in self.parts
        )
        const = None if self.const is None else _maybe_alike(self.const.ravel()[order])
        if const is not None and not const.any():
            const = None
        return Flat(order.shape[1], parts, const)

    def of(self, term: Term) -> Rows:
        """A tensor of the same shape with a term's elements, by position in `flat`."""
        _, order = self._order
        idx = np.empty(self.tok.size, np.int32)
        idx[order] = np.arange(order.shape[1], dtype=np.int32)
        return Rows(self.tok, (Part(term, idx.reshape(self.shape), _ones(self.shape)),), None, self.space)


def _ones(shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(np.float32(1), shape)


def _alike(rows: Array) -> Array:
    if (rows != rows[:1]).any():
        raise Unrecognised("takes other elements of one token than of another")
    first: Array = rows[0]
    return first


def _maybe_alike(rows: Array) -> Array:
    return rows[0] if np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape)) else rows


def together(a: Rows, b: Rows) -> tuple[Rows, Rows]:
    """Both in a common shape with equal tokens per element. Raises Unrecognised if tokens mix."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    found = tuple(x if x.shape == shape else x.moved(lambda array: np.broadcast_to(array, shape)) for x in (a, b))
    if a.space != b.space or not np.array_equal(found[0].tok, found[1].tok):
        raise Unrecognised("mixes the rows of several tokens")
    return found[0], found[1]


def new_rows(term: Term, tok: Array, space: Space = "new") -> Rows:
    """Whole rows of a term, with elements on a new last axis. tok: without that axis."""
    shape = (*tok.shape, term.width)
    idx = np.broadcast_to(np.arange(term.width, dtype=np.int32), shape)
    return Rows(np.broadcast_to(tok[..., None], shape), (Part(term, idx, _ones(shape)),), None, space)


def concatenated(rows: Sequence[Rows], axis: int, space: Space) -> Rows:
    """Concatenates tensors; the n-th parts of equal terms are merged."""
    slots: dict[tuple[int, int], tuple[Term, dict[int, Part]]] = {}
    for number, one in enumerate(rows):
        count: dict[int, int] = {}
        for part in one.parts:
            key = id(part.term), count.get(id(part.term), 0)
            count[id(part.term)] = key[1] + 1
            slots.setdefault(key, (part.term, {}))[1][number] = part
    parts = []
    for term, of in slots.values():
        idx = [of[i].idx if i in of else np.zeros(one.shape, np.int32) for i, one in enumerate(rows)]
        coef = [of[i].coef if i in of else np.zeros(one.shape, np.float32) for i, one in enumerate(rows)]
        parts.append(Part(term, np.concatenate(idx, axis), np.concatenate(coef, axis)))
    const = None
    if any(one.const is not None for one in rows):
        given = [np.zeros(one.shape, np.float32) if one.const is None else one.const for one in rows]
        const = np.concatenate(given, axis)
    return Rows(np.concatenate([one.tok for one in rows], axis), tuple(parts), const, space)
