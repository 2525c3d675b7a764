"""Query rows of a unit as tensor core operands: tiles of 8, each row a head of a token of the run, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fragments import LANES, call
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, unrolled
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.tensor_attention import STEP, TILE_ROWS, WARPS, Source, TensorAttention
from llmc.compiler.targets.gpu.tensor_cores import WARP
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, when

PIECE = 2 * STEP
"""Elements of a row that its lanes read at once, for two products."""
_WORDS = 4  # of a lane's part of a piece


class Lane:
    """This item's place. warp: of the group. row: of operands, also the key of a product. pair: of a row's elements,
    also the columns of a product."""

    def __init__(self, k: Frame) -> None:
        item = calling(k).item
        self.item = item
        self.warp, self.number = let(T.truncdiv(item, WARP)), let(T.truncmod(item, WARP))
        self.row, self.pair = let(T.truncdiv(self.number, LANES)), let(T.truncmod(self.number, LANES))


class QueryTiles:
    """Rows past the last one, and those of heads that a unit lacks, are zeros."""

    def __init__(self, k: Frame, of: TensorAttention, run: Run, lane: Lane) -> None:
        self._k, self._of, self._run, self._lane = k, of, run, lane
        self.count, self.rows = of.tiles, of.tiles * TILE_ROWS
        width = sum(source.width for source in of.sources)
        self.whole, self.rest = divmod(width, PIECE)
        """Pieces of a row that its lanes read at once, and elements behind them."""
        self._pieces = self.whole + bool(self.rest)
        self._staged = Shared(of.tiles * self._pieces * WARP * _WORDS, "uint32")

    def begin(self, head: Expr, of_part: Expr) -> None:
        """head: the first of a unit. of_part: heads from there on that share its keys."""
        self._head, self._heads = head, let(T.min(of_part, self._of.heads))

    def token(self, row: Expr) -> Expr:
        """The token of a row within the run; for those that there are not, the last one that a run may have."""
        return let(T.min(T.truncdiv(row, self._of.heads), self._run.most - 1))

    def head(self, row: Expr) -> Expr:
        """The head of a row; for those that a unit lacks, its last one."""
        return let(self._head + T.min(T.truncmod(row, self._of.heads), self._heads - 1))

    def exists(self, row: Expr) -> Expr:
        token, within = T.truncdiv(row, self._of.heads), T.truncmod(row, self._of.heads)
        return T.And(token < self._run.count, within < self._heads)

    def column(self, tile: Expr, odd: Expr) -> Expr:
        """The row that is one of this lane's two columns of a product."""
        return let(tile * TILE_ROWS + self._lane.pair * 2 + odd)

    def tokens_of(self, tile: Expr) -> tuple[Expr, Expr]:
        """The first and the last token of a tile, within the run."""
        return self.token(let(tile * TILE_ROWS)), self.token(let(tile * TILE_ROWS + (TILE_ROWS - 1)))

    @property
    def shared(self) -> bool:
        """Whether a tile may have rows of several tokens."""
        return self._run.most > 1 and self._of.heads % TILE_ROWS != 0

    @contextmanager
    def each(self) -> Iterator[Expr]:
        """Loops over the tiles that have rows."""
        with unrolled(self.count) as tile:
            if self._run.most == 1:
                yield tile
                return
            with when(self._run.count > self.tokens_of(tile)[0]):
                yield tile

    def write_own(self, start: Expr, end: Expr) -> None:
        """As `Keys.write_own`."""

    def load(self) -> None:
        """Stages the rows, rounded. Afterwards items must `sync`."""
        total = self._of.tiles * self._pieces
        with T.serial(-(-total // WARPS)) as turn:
            place = let(turn * WARPS + self._lane.warp)
            with when(place < total):
                tile, piece = let(T.truncdiv(place, self._pieces)), let(T.truncmod(place, self._pieces))
                row = let(tile * TILE_ROWS + self._lane.row)
                words = Array(_WORDS, "uint32")
                for i in range(_WORDS):
                    words[i] = T.uint32(0)
                with when(self.exists(row)):
                    for source in self._of.sources:
                        self._round(words, row, piece, source)
                call("llmc_store16", self._at(tile, piece), words.address(0))

    def _round(self, words: Array, row: Expr, piece: Expr, source: Source) -> None:
        """Fills a lane's words, if a piece is of this source."""
        of, (whole, rest) = self._of, divmod(source.width, PIECE)
        token = let(self._run.token + T.truncdiv(row, of.heads))
        start = let((token * (of.kv_heads * of.group) + self.head(row)) * source.width)
        number = let(piece - source.begin // PIECE)

        def fill(count: int) -> None:
            with unrolled(count // 4) as half:
                numbers = Array(4, "uint32")
                at = let(start + number * PIECE + self._lane.pair * count + half * 4)
                call("llmc_load16", numbers.address(0), self._k.address(source.name, at))
                for i in range(2):
                    pair = [T.reinterpret("float32", numbers[2 * i + odd]) for odd in range(2)]
                    words[half * 2 + i] = T.call_pure_extern("uint32", f"llmc_rounded_{of.dtype}", *pair)

        if whole:
            with when(T.And(number >= 0, number < whole)):
                fill(PIECE // LANES)
        if rest:
            with when(number == whole):
                fill(rest // LANES)

    def _at(self, tile: Expr, piece: Expr) -> Expr:
        return self._staged.address(let(((tile * self._pieces + piece) * WARP + self._lane.number) * _WORDS))

    def put(self, row: Expr, element: Expr, pair: Expr) -> None:
        """Stages two neighbours, rounded, of a row, the first of them even."""
        tile, piece, within = T.truncdiv(row, TILE_ROWS), let(T.truncdiv(element, PIECE)), T.truncmod(element, PIECE)
        of_lane = PIECE // LANES
        if self.rest:
            of_lane = let(T.Select(piece < self.whole, T.int32(of_lane), T.int32(self.rest // LANES)))
        lane = T.truncmod(row, TILE_ROWS) * LANES + T.truncdiv(within, of_lane)
        at = let(((tile * self._pieces + piece) * WARP + lane) * _WORDS)
        self._staged[let(at + T.truncdiv(T.truncmod(within, of_lane), 2))] = pair

    def words(self, tile: Expr, piece: Expr) -> Array:
        """This lane's part of a piece of its row of a tile."""
        words = Array(_WORDS, "uint32")
        call("llmc_load16", words.address(0), self._at(tile, piece))
        return words
