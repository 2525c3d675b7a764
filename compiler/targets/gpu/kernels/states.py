"""States of heads over the tokens of each sequence, in order: what the delta rule and Mamba-2 share.

A group has some lines of a head's state: columns of the delta rule's, rows of Mamba-2's. A team of items shares a few
lines (`state_tiles.py`), and keeps them in registers from the first token of a step to the last. All lines of a head
read the same two vectors of a token, such as its query and key. So each team prepares those of another token in shared
memory, and all teams read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync, turns, unrolled
from llmc.compiler.targets.gpu.kernels.teams import Team
from llmc.compiler.targets.gpu.state_tiles import LINES, PIECE, StateTile
from llmc.compiler.targets.reference.kernels.delta import Tokens
from llmc.compiler.targets.reference.kernels.frame import NUM_SEQS, Array, Cell, Expr, Frame, let, when

_POOL = "k_pool"


class States(ABC):
    """The states of a layer, in the K pool. Subclasses say what a token does to a line.

    tile: how groups share a state. by_lines: whether neighbouring lines are neighbours in the pool,
    [block, head, size, lines]; otherwise it is [block, head, lines, size]. facts: numbers of a token and head that all
    lines read. sums: of lines, that are added for a token at a time.
    """

    def __init__(
        self, k: Frame, tile: StateTile, heads: int, block_size: int, *, by_lines: bool, facts: int, sums: int
    ) -> None:
        self.k, self.tile, self._heads, self._block_size, self._by_lines = k, tile, heads, block_size, by_lines
        self.team = Team(k, tile.sharing, sums)
        self.state = Array(tile.pieces * PIECE * LINES)
        """By place of an element, then by line."""
        self._vectors, self._facts = Shared(tile.teams * 2 * tile.padded), Shared(tile.teams * facts)
        self._inputs, self._num_facts = Shared(tile.teams * tile.tile_lines), facts

    @abstractmethod
    def prepare(self, row: Expr) -> tuple[Sequence[Array], Sequence[Expr], Expr]:
        """What a token has for all lines of `self.head`: the parts of two vectors that this item has, facts, and the
        index of line 0's input in the first operand. The team works on it; every item calls it."""

    @abstractmethod
    def advance(self, vectors: Sequence[Array], facts: Sequence[Expr], inputs: Sequence[Expr]) -> list[Expr]:
        """Changes the item's part of its lines by a token, and gives the token's result for each line.

        vectors, facts: as `prepare` gave them. inputs: of each line.
        """

    def run(self, inputs: str) -> None:
        """inputs: the operand that has each line's input."""
        k, tile, heads = self.k, self.tile, self._heads
        of_sequence = heads * tile.tiles
        with calling(k).share_groups(let(k.scalar(NUM_SEQS) * of_sequence)) as unit:
            place = let(T.truncmod(unit, of_sequence))
            self.head, self._begin = (
                let(T.truncdiv(place, tile.tiles)),
                let(T.truncmod(place, tile.tiles) * tile.tile_lines),
            )
            self._line = let(self._begin + self.team.number * LINES)
            self._tokens = Tokens(k, let(T.truncdiv(unit, of_sequence)), self._block_size)
            self._fetch()
            first, end = self._tokens.first, self._tokens.end
            with turns(k, let(T.truncdiv(end - first + (tile.teams - 1), tile.teams))) as turn:
                begin = let(first + turn * tile.teams)
                self._prepare_together(inputs, begin, end)
                with turns(k, let(T.min(end - begin, tile.teams))) as at:
                    row = let(begin + at)
                    self._pass(row, at)
                    with when(self._tokens.leaves_state(row)):
                        self._keep(self._tokens.block_of(self._tokens.position(row)))

    def _prepare_together(self, operand: str, begin: Expr, end: Expr) -> None:
        """Each team prepares the token that has its number, or the last one again."""
        k, tile, member = self.k, self.tile, self.team.member
        row, own = let(T.min(begin + self.team.number, end - 1)), self.team.number
        vectors, facts, of_head = self.prepare(row)
        sync()  # All have read what was prepared before.
        for which, vector in enumerate(vectors):
            at = let((own * 2 + which) * tile.padded + member * PIECE)
            with self._each_place() as (place, behind):
                self._vectors[at + behind] = vector[place]
        with when(member == 0):
            for which, fact in enumerate(facts):
                self._facts[own * self._num_facts + which] = fact
        for done in range(0, tile.tile_lines, tile.sharing):
            line = let(member + done)
            with ExitStack() as within:
                if done + tile.sharing > tile.tile_lines:
                    within.enter_context(when(line < tile.tile_lines))
                given = let(of_head + T.min(self._begin + line, tile.lines - 1))
                self._inputs[own * tile.tile_lines + line] = k.raw(operand, given)
        sync()

    def _pass(self, row: Expr, at: Expr) -> None:
        """A token changes the states and has its results. at: the token among those that are prepared."""
        k, tile, member = self.k, self.tile, self.team.member
        vectors = [Array(tile.pieces * PIECE) for _ in range(2)]
        for which, vector in enumerate(vectors):
            first = let((at * 2 + which) * tile.padded + member * PIECE)
            with self._each_place() as (place, behind):
                vector[place] = self._vectors[first + behind]
        facts = [let(self._facts[at * self._num_facts + which], "float32") for which in range(self._num_facts)]
        first = let(at * tile.tile_lines + self.team.number * LINES)
        inputs = [let(self._inputs[first + line], "float32") for line in range(LINES)]
        found = Cell(T.float32(0.0))
        for line, result in enumerate(self.advance(vectors, facts, inputs)):
            with when(member == line):
                found.set(result)
        line = let(self._line + member)
        with when(member < LINES), self._when_a_line(line):
            k.store("out", found.get(), (row * self._heads + self.head) * tile.lines + line)

    @contextmanager
    def _each_place(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over the item's elements of a line: (place, elements behind the item's first one)."""
        with unrolled(self.tile.pieces) as piece, unrolled(PIECE) as i:
            yield piece * PIECE + i, let(piece * (self.tile.sharing * PIECE) + i)

    @contextmanager
    def each(self) -> Iterator[tuple[Expr, list[Expr]]]:
        """Loops over the item's elements of a line: (place, the places in `state` of each line's)."""
        with unrolled(self.tile.pieces * PIECE) as place:
            yield place, [place * LINES + line for line in range(LINES)]

    @contextmanager
    def _each_piece(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over the item's pieces that have elements: (piece, its first element)."""
        with ExitStack() as within:
            piece = within.enter_context(unrolled(self.tile.pieces))
            first = let((piece * self.tile.sharing + self.team.member) * PIECE)
            if self.tile.padded - self.tile.size >= PIECE:
                within.enter_context(when(first < self.tile.size))
            yield piece, first

    @contextmanager
    def _each_element(self, piece: Expr, first: Expr) -> Iterator[tuple[Expr, Expr]]:
        """Loops over the elements of a piece: (place, element)."""
        with ExitStack() as within:
            i = within.enter_context(unrolled(PIECE))
            element = let(first + i)
            if self.tile.size % PIECE:
                within.enter_context(when(element < self.tile.size))
            yield piece * PIECE + i, element

    def part(self, operand: str, index: Expr, aligned: bool) -> Array:
        """The item's part of `size` numbers of an operand, zeros behind the last one. aligned: whether the first one
        lies at a multiple of 16 bytes."""
        found = Array(self.tile.pieces * PIECE)
        if self.tile.padded > self.tile.size:
            with unrolled(self.tile.pieces * PIECE) as place:
                found[place] = T.float32(0.0)
        with self._each_piece() as (piece, first):
            if aligned and self.tile.size % PIECE == 0:
                words = Array(PIECE, "uint32")
                call("llmc_load16", words.address(0), self.k.address(operand, let(index + first)))
                with unrolled(PIECE) as i:
                    found[piece * PIECE + i] = T.reinterpret("float32", words[i])
            else:
                with self._each_element(piece, first) as (place, element):
                    found[place] = self.k.raw(operand, index + element)
        return found

    def _index(self, block: Expr, line: Expr, element: Expr) -> Expr:
        head, size, lines = block * self._heads + self.head, self.tile.size, self.tile.lines
        if self._by_lines:
            return let((head * size + element) * lines + line)
        return let((head * lines + line) * size + element)

    @property
    def _wide(self) -> bool:
        """Whether numbers that an item has side by side in the pool are aligned."""
        return self.tile.lines % LINES == 0 if self._by_lines else self.tile.size % PIECE == 0

    @property
    def _has_rest(self) -> bool:
        """Whether the last tile of a head has fewer lines."""
        return self.tile.lines % self.tile.tile_lines > 0

    @contextmanager
    def _when_a_line(self, line: Expr) -> Iterator[None]:
        """Whether the head has this line."""
        with when(line < self.tile.lines) if self._has_rest else nullcontext():
            yield

    def _line_of(self, line: int) -> Expr:
        """A line of the item's. Beyond the last one it is another one, which exists."""
        if not self._has_rest:
            return let(self._line + line)
        if self._wide and self._by_lines:
            return let(T.min(self._line, self.tile.lines - LINES) + line)
        return let(T.min(self._line + line, self.tile.lines - 1))

    def _fetch(self) -> None:
        """The lines behind the token before the step's first one: zeros before a sequence's first one."""
        with unrolled(self.tile.pieces * PIECE * LINES) as place:
            self.state[place] = T.float32(0.0)
        with when(self._tokens.start > 0):
            block = self._tokens.block_of(let(self._tokens.start - 1))
            lines = [self._line_of(line) for line in range(LINES)]
            with self._each_piece() as (piece, first):
                if not self._wide:
                    with self._each_element(piece, first) as (place, element):
                        for number, line in enumerate(lines):
                            self.state[place * LINES + number] = self.k.raw(_POOL, self._index(block, line, element))
                elif self._by_lines:
                    with self._each_element(piece, first) as (place, element):
                        words = Array(LINES, "uint32")
                        at = self._index(block, lines[0], element)
                        call("llmc_load8", words.address(0), self.k.address(_POOL, at))
                        for number in range(LINES):
                            self.state[place * LINES + number] = T.reinterpret("float32", words[number])
                else:
                    for number, line in enumerate(lines):
                        words = Array(PIECE, "uint32")
                        at = self._index(block, line, first)
                        call("llmc_load16", words.address(0), self.k.address(_POOL, at))
                        with unrolled(PIECE) as i:
                            self.state[(piece * PIECE + i) * LINES + number] = T.reinterpret("float32", words[i])

    def _keep(self, block: Expr) -> None:
        """Writes the item's part of its lines to the pool."""
        with self._each_piece() as (piece, first):
            if not self._wide:
                with self._each_element(piece, first) as (place, element):
                    for number in range(LINES):
                        line = let(self._line + number)
                        with self._when_a_line(line):
                            value = self.state[place * LINES + number]
                            self.k.put_raw(_POOL, value, self._index(block, line, element))
            elif self._by_lines:
                with self._when_a_line(self._line), self._each_element(piece, first) as (place, element):
                    words = Array(LINES, "uint32")
                    for number in range(LINES):
                        words[number] = T.reinterpret("uint32", self.state[place * LINES + number])
                    at = self._index(block, self._line, element)
                    call("llmc_store8", self.k.address(_POOL, at), words.address(0))
            else:
                for number in range(LINES):
                    line = let(self._line + number)
                    with self._when_a_line(line):
                        words = Array(PIECE, "uint32")
                        with unrolled(PIECE) as i:
                            words[i] = T.reinterpret("uint32", self.state[(piece * PIECE + i) * LINES + number])
                        call("llmc_store16", self.k.address(_POOL, self._index(block, line, first)), words.address(0))
