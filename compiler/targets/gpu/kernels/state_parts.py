"""The elements of a state's lines that an item has: pieces of neighbours, in turn with the items of its team."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.gpu.kernels.groups import unrolled
from llmc.compiler.targets.gpu.state_tiles import LINES, PIECE, StateTile
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, when


class Parts:
    """member: the item's number in its team. places: elements of a line that an item has, also beyond its last one."""

    def __init__(self, k: Frame, tile: StateTile, member: Expr) -> None:
        self._k, self._tile, self._member = k, tile, member
        self.places = tile.pieces * PIECE

    @contextmanager
    def each_place(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over the item's elements: (place, elements behind the item's first one)."""
        with unrolled(self._tile.pieces) as piece, unrolled(PIECE) as i:
            yield piece * PIECE + i, let(piece * (self._tile.sharing * PIECE) + i)

    @contextmanager
    def each_piece(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over the item's pieces in which a line has elements: (piece, its first element)."""
        tile = self._tile
        with unrolled(tile.pieces) as piece:
            first = let((piece * tile.sharing + self._member) * PIECE)
            with when(first < tile.size) if tile.padded - tile.size >= PIECE else nullcontext():
                yield piece, first

    @contextmanager
    def each_element(self, piece: Expr, first: Expr) -> Iterator[tuple[Expr, Expr]]:
        """Loops over the elements of a piece: (place, element)."""
        with ExitStack() as within:
            i = within.enter_context(unrolled(PIECE))
            element = let(first + i)
            if self._tile.size % PIECE:
                within.enter_context(when(element < self._tile.size))
            yield piece * PIECE + i, element

    def read(self, operand: str, index: Expr, aligned: bool, to: Array) -> None:
        """Reads the item's part of `size` float32 numbers. aligned: whether they begin at a multiple of 16 bytes."""
        with self.each_piece() as (piece, first):
            if aligned and self._tile.size % PIECE == 0:
                words = Array(PIECE, "uint32")
                call("llmc_load16", words.address(0), self._k.address(operand, let(index + first)))
                with unrolled(PIECE) as i:
                    to[piece * PIECE + i] = T.reinterpret("float32", words[i])
            else:
                with self.each_element(piece, first) as (place, element):
                    to[place] = self._k.raw(operand, index + element)


class StatePool:
    """The layer's states in the K pool, float32 [slot, head, size, lines] if by_lines, else
    [slot, head, lines, size]. heads: of the layer.

    An item has `LINES` neighbouring lines. In its array, those of an element lie side by side.
    """

    def __init__(self, k: Frame, tile: StateTile, parts: Parts, heads: int, *, by_lines: bool) -> None:
        self._k, self._tile, self._parts, self._heads, self._by_lines = k, tile, parts, heads, by_lines
        # Whether numbers that an item has side by side in the pool are aligned.
        self._wide = tile.lines % LINES == 0 if by_lines else tile.size % PIECE == 0
        self._has_rest = tile.lines % tile.tile_lines > 0

    @contextmanager
    def when_a_line(self, line: Expr) -> Iterator[None]:
        """If the state has this line: the last tile may have fewer."""
        with when(line < self._tile.lines) if self._has_rest else nullcontext():
            yield

    def read(self, slot: Expr, head: Expr, line: Expr, to: Array) -> None:
        """Reads the item's part of its lines. line: the first one. For those that the state does not have, others are
        read."""
        lines = [let(self._existing(line, number)) for number in range(LINES)]
        with self._parts.each_piece() as (piece, first):
            if not self._wide:
                with self._parts.each_element(piece, first) as (place, element):
                    for number in range(LINES):
                        at = self._index(slot, head, lines[number], element)
                        to[place * LINES + number] = self._k.raw("k_pool", at)
            elif self._by_lines:
                with self._parts.each_element(piece, first) as (place, element):
                    words, at = Array(LINES, "uint32"), self._index(slot, head, lines[0], element)
                    call("llmc_load8", words.address(0), self._k.address("k_pool", at))
                    for number in range(LINES):
                        to[place * LINES + number] = T.reinterpret("float32", words[number])
            else:
                for number in range(LINES):
                    words, at = Array(PIECE, "uint32"), self._index(slot, head, lines[number], first)
                    call("llmc_load16", words.address(0), self._k.address("k_pool", at))
                    with unrolled(PIECE) as i:
                        to[(piece * PIECE + i) * LINES + number] = T.reinterpret("float32", words[i])

    def write(self, slot: Expr, head: Expr, line: Expr, given: Array) -> None:
        """Writes the item's part of those of its lines that the state has. line: the first one."""
        lines = [let(line + number) for number in range(LINES)]
        with self._parts.each_piece() as (piece, first):
            if not self._wide:
                with self._parts.each_element(piece, first) as (place, element):
                    for number in range(LINES):
                        with self.when_a_line(lines[number]):
                            at = self._index(slot, head, lines[number], element)
                            self._k.put_raw("k_pool", given[place * LINES + number], at)
            elif self._by_lines:
                with self.when_a_line(line), self._parts.each_element(piece, first) as (place, element):
                    words, at = Array(LINES, "uint32"), self._index(slot, head, line, element)
                    for number in range(LINES):
                        words[number] = T.reinterpret("uint32", given[place * LINES + number])
                    call("llmc_store8", self._k.address("k_pool", at), words.address(0))
            else:
                for number in range(LINES):
                    with self.when_a_line(lines[number]):
                        words, at = Array(PIECE, "uint32"), self._index(slot, head, lines[number], first)
                        with unrolled(PIECE) as i:
                            words[i] = T.reinterpret("uint32", given[(piece * PIECE + i) * LINES + number])
                        call("llmc_store16", self._k.address("k_pool", at), words.address(0))

    def _existing(self, line: Expr, number: int) -> Expr:
        if not self._has_rest:
            return line + number
        if self._wide and self._by_lines:  # of one read
            return T.min(line, self._tile.lines - LINES) + number
        return T.min(line + number, self._tile.lines - 1)

    def _index(self, slot: Expr, head: Expr, line: Expr, element: Expr) -> Expr:
        of_head, size, lines = slot * self._heads + head, self._tile.size, self._tile.lines
        if self._by_lines:
            return let((of_head * size + element) * lines + line)
        return let((of_head * lines + line) * size + element)
