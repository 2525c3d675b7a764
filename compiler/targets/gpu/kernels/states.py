"""States of heads over the tokens of each sequence, in order: what the delta rule and Mamba-2 share.

A group has some lines of a head's state: columns of the delta rule's, rows of Mamba-2's. A team of items shares a few
lines (`state_tiles.py`), and keeps them in registers from the first token of a step to the last. All lines of a head
read the same two vectors of a token, such as its query and key. So each team prepares those of another token in shared
memory, and all teams read them. What the next tokens need is read meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync, turns, unrolled
from llmc.compiler.targets.gpu.kernels.state_parts import Parts, StatePool
from llmc.compiler.targets.gpu.kernels.teams import Team
from llmc.compiler.targets.gpu.state_tiles import LINES, PIECE, StateTile
from llmc.compiler.targets.reference.kernels.delta import Tokens
from llmc.compiler.targets.reference.kernels.frame import NUM_SEQS, Array, Cell, Expr, Frame, let, when

_VECTORS = 2


@dataclass(frozen=True)
class Inputs:
    """Where a token has what a head needs. vectors: first elements, and lines: that of line 0, in the first operand.
    facts: (operand, index) of numbers that are the same for all lines."""

    vectors: tuple[Expr, Expr]
    lines: Expr
    facts: Sequence[tuple[str, Expr]]


class States(ABC):
    """The states of a layer, in the K pool. Subclasses say what a token does to them.

    operand: the first one, float32 [T, X], which has vectors and a number for each line. aligned: whether vectors begin
    at multiples of 16 bytes. tile: how groups share a state. by_lines: as `StatePool` has it. facts: how many of a
    token are read, and how many `prepare` gives. sums: of lines, that are added for a token at a time.
    """

    def __init__(
        self, k: Frame, operand: str, tile: StateTile, heads: int, *, aligned: bool, by_lines: bool,
        facts: tuple[int, int], sums: int,
    ) -> None:  # fmt: skip
        self._k, self._operand, self.tile, self._heads = k, operand, tile, heads
        self._aligned, self._num_facts = aligned, facts[1]
        self.team = Team(k, tile.sharing, sums)
        self._parts = parts = Parts(k, tile, self.team.member)
        self._pool = StatePool(k, tile, parts, heads, by_lines=by_lines)
        self.state = Array(parts.places * LINES)
        """By place of an element, then by line."""
        # What is read of the token that the team prepares next: vectors, facts, and numbers of lines.
        self._next = [Array(parts.places) for _ in range(_VECTORS)]
        self._next_facts = [Cell(T.float32(0.0)) for _ in range(facts[0])]
        self._next_lines = [Cell(T.float32(0.0)) for _ in range(0, tile.tile_lines, tile.sharing)]
        # What is prepared, by token.
        self._vectors = Shared(tile.teams * _VECTORS * tile.padded)
        self._facts, self._lines = Shared(tile.teams * facts[1]), Shared(tile.teams * tile.tile_lines)

    @abstractmethod
    def inputs(self, row: Expr, head: Expr) -> Inputs:
        """Of the token in a row of [T, X]."""

    def prepare(self, vectors: Sequence[Array], facts: Sequence[Expr]) -> Sequence[Expr]:
        """Changes this item's part of a token's vectors, and gives its facts. Every item calls it, each team for
        another token. facts: those that were read."""
        return facts

    @abstractmethod
    def advance(self, vectors: Sequence[Array], facts: Sequence[Expr], lines: Sequence[Expr]) -> list[Expr]:
        """Changes the item's part of its lines by a token, and gives the token's result for each line.

        vectors, facts: as `prepare` made them. lines: numbers of the item's lines.
        """

    def run(self) -> None:
        k, tile, heads = self._k, self.tile, self._heads
        of_sequence = heads * tile.tiles
        with calling(k).share_groups(let(k.scalar(NUM_SEQS) * of_sequence)) as unit:
            place = let(T.truncmod(unit, of_sequence))
            self._head = let(T.truncdiv(place, tile.tiles))
            self._begin = let(T.truncmod(place, tile.tiles) * tile.tile_lines)
            self._line = let(self._begin + self.team.number * LINES)
            self._tokens = tokens = Tokens(k, let(T.truncdiv(unit, of_sequence)))
            self._read(tokens.first)
            _clear(self.state, self._parts.places * LINES)
            with when(tokens.start > 0):
                self._pool.read(tokens.slot, self._head, self._line, self.state)
            count = let(tokens.end - tokens.first)
            with turns(k, let(T.truncdiv(count + (tile.teams - 1), tile.teams))) as turn:
                begin = let(tokens.first + turn * tile.teams)
                self._prepare()
                with when(begin + tile.teams < tokens.end):
                    self._read(let(begin + tile.teams))
                with turns(k, let(T.min(tokens.end - begin, tile.teams))) as at:
                    row = let(begin + at)
                    self._pass(row, at)
                    with when(row == tokens.keep_row):
                        self._pool.write(tokens.keep_slot, self._head, self._line, self.state)
            self._pool.write(tokens.slot, self._head, self._line, self.state)

    def _read(self, begin: Expr) -> None:
        """Each team reads what it needs of the token that has its number, counted from `begin`, or of the last one."""
        k, tile = self._k, self.tile
        given = self.inputs(let(T.min(begin + self.team.number, self._tokens.end - 1)), self._head)
        for index, vector in zip(given.vectors, self._next, strict=True):
            if tile.padded > tile.size:
                _clear(vector, self._parts.places)  # behind a line's last element: a token may have left NaN there
            self._parts.read(self._operand, index, self._aligned, vector)
        for (operand, index), fact in zip(given.facts, self._next_facts, strict=True):
            fact.set(k.raw(operand, index))
        for turn, number in enumerate(self._next_lines):
            line = T.min(self._begin + self.team.member + turn * tile.sharing, tile.lines - 1)
            number.set(k.raw(self._operand, let(given.lines + line)))

    def _prepare(self) -> None:
        """Each team prepares its token, of which it has read what it needs."""
        tile, own, member = self.tile, self.team.number, self.team.member
        facts = self.prepare(self._next, [fact.get() for fact in self._next_facts])
        sync()  # All have read what was prepared before.
        for which, vector in enumerate(self._next):
            first = self._place_of(own, which)
            with self._parts.each_place() as (place, behind):
                self._vectors[first + behind] = vector[place]
        with when(member == 0):
            for which, fact in enumerate(facts):
                self._facts[own * self._num_facts + which] = fact
        for turn, number in enumerate(self._next_lines):
            line = let(member + turn * tile.sharing)
            with when(line < tile.tile_lines) if tile.tile_lines % tile.sharing else nullcontext():
                self._lines[own * tile.tile_lines + line] = number.get()
        sync()

    def _place_of(self, token: Expr, which: int) -> Expr:
        """Where the item's part of a vector begins. token: among those that are prepared."""
        return let((token * _VECTORS + which) * self.tile.padded + self.team.member * PIECE)

    def _pass(self, row: Expr, at: Expr) -> None:
        """A token changes the states and has its results. at: the token among those that are prepared."""
        tile, member = self.tile, self.team.member
        vectors = [Array(self._parts.places) for _ in range(_VECTORS)]
        for which, vector in enumerate(vectors):
            first = self._place_of(at, which)
            with self._parts.each_place() as (place, behind):
                vector[place] = self._vectors[first + behind]
        facts = [let(self._facts[at * self._num_facts + which], "float32") for which in range(self._num_facts)]
        first = let(at * tile.tile_lines + self.team.number * LINES)
        lines = [let(self._lines[first + number], "float32") for number in range(LINES)]
        found = Cell(T.float32(0.0))
        for number, result in enumerate(self.advance(vectors, facts, lines)):
            with when(member == number):
                found.set(result)
        line = let(self._line + member)
        with when(member < LINES), self._pool.when_a_line(line):
            self._k.store("out", found.get(), (row * self._heads + self._head) * tile.lines + line)

    @contextmanager
    def each(self) -> Iterator[tuple[Expr, list[Expr]]]:
        """Loops over the item's elements of a line: (place, the places in `state` of each line's)."""
        with unrolled(self._parts.places) as place:
            yield place, [place * LINES + number for number in range(LINES)]


def _clear(array: Array, size: int) -> None:
    with unrolled(size) as place:
        array[place] = T.float32(0.0)
