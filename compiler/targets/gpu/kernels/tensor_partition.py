"""The softmax of query rows over one partition of keys on tensor cores: the arithmetic of attention, in all graphs.

Keys, and elements of values, are rows of products; query rows are columns. A score is one chain of products over the
key's elements, and a sum of values one over keys, 16 at a time. Weights are relative to the row's maximum in the
partition and are rounded before they are added: each lane adds 4 keys, lanes of a warp meet in a tree, and warps
follow in order. Keys that a row does not see have weights of 0, so bits of a row do not depend on those beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.attention_split import PARTITION
from llmc.compiler.targets.gpu.kernels.exponential import exp_negative
from llmc.compiler.targets.gpu.kernels.fragments import LANES, call
from llmc.compiler.targets.gpu.kernels.groups import Shared, sync, unrolled
from llmc.compiler.targets.gpu.kernels.query_tiles import PIECE, Lane, QueryTiles
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.softmax import LEAST
from llmc.compiler.targets.gpu.tensor_attention import STEP, WARPS, TensorAttention
from llmc.compiler.targets.gpu.tensor_cores import WARP
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, let, when
from llmc.compiler.targets.reference.kernels.kv_pools import Pool

_STEPS = 2  # of keys of a warp
_HALF = 8  # distance between the two keys of a lane's results
_OF_WARP = PARTITION // WARPS
_LANES_OF_COLUMN = (4, 8, 16)  # distances of the lanes that share a column


class Attended(Protocol):
    """What an op attends to. shapes: whether scores are more than scaled products. sinks: whether heads have a score
    without values."""

    @property
    def keys(self) -> Pool: ...

    @property
    def values(self) -> Pool: ...

    @property
    def shapes(self) -> bool: ...

    @property
    def sinks(self) -> bool: ...

    def begin(self, k: Frame, token: Expr, head: Expr, stride: Expr) -> None:
        """Starts a unit. head: its first one. stride: of the block tables."""

    def place_of(self, position: Expr) -> tuple[Expr, Expr, Expr]:
        """(block, head, position in the block) of a token position."""

    def score(self, value: Expr, head: Expr, last: Expr, position: Expr) -> Expr:
        """The score of a key for a head, given the scaled product. last: the last key that the token sees."""

    def write(self, token: Expr, head: Expr, element: Expr, value: Expr) -> None:
        """Writes an element of a result."""


class TensorPartition:
    """The partition computed last. sums: of values, by tile of rows, tile of elements, and place in the product."""

    def __init__(
        self, k: Frame, of: TensorAttention, attention: Attended, scale: float, run: Run, rows: QueryTiles, lane: Lane
    ) -> None:
        self._k, self._of, self._a, self._scale = k, of, attention, scale
        self._run, self._rows, self._lane = run, rows, lane
        self._scores = Array(rows.count * _STEPS * 4)
        # A lane's part of 32 keys side by side: what it reads as an operand.
        self._weights = Shared(rows.count * WARPS * WARP * 4, "uint32")
        self._tops, self._totals = Shared(WARPS * rows.rows), Shared(WARPS * rows.rows)
        self.parts = of.pieces_per_warp * of.piece
        self.sums = Array(rows.count * self.parts * 4)

    def compute(self, start: Expr, between: Callable[[], None] = lambda: None) -> None:
        """start: the partition's first key. between: what an item does once `most` and `total` are known."""
        self._start, run = start, self._run
        self._own = let(start + self._lane.warp * _OF_WARP)
        self._all_seen = T.And(start >= run.common_first, start + (PARTITION - 1) <= run.common_last)
        ahead = [self._load(T.int32(part)) for part in range(WARPS)] if self._ahead else None
        sync()  # all items have read what they need of the partition before
        self._find_products()
        self._find_scores()
        sync()
        self._find_weights()
        sync()
        between()
        with unrolled(self._rows.count * self.parts * 4) as i:
            self.sums[i] = T.float32(0.0)
        if ahead is not None:
            for part, words in enumerate(ahead):
                self._add(T.int32(part), words)
            return
        with T.serial(WARPS) as part:
            first = let(start + part * _OF_WARP)
            with when(T.And(first <= run.highest, first + (_OF_WARP - 1) >= run.lowest)):
                self._add(part, self._load(part))

    @property
    def _ahead(self) -> bool:
        """Whether values are read before scores are found: in one tile of rows, there are registers for them."""
        return self._rows.count == 1 and self.parts <= 2

    def _row(self, pool: Pool, position: Expr) -> Expr:
        """Index of the first of 16 positions, which lie in one block; of the nearest that a row sees."""
        low, high = (let(T.truncdiv(one, STEP) * STEP) for one in (self._run.lowest, self._run.highest))
        return pool.row(*self._a.place_of(let(T.max(T.min(position, high), low))))

    def _find_products(self) -> None:
        """Each warp those of its 32 keys, with all rows."""
        rows, lane, keys, scores = self._rows, self._lane, self._a.keys, self._scores
        with unrolled(rows.count * _STEPS * 4) as i:
            scores[i] = T.float32(0.0)
        with when(T.And(self._own <= self._run.highest, self._own + (_OF_WARP - 1) >= self._run.lowest)):
            firsts = [self._row(keys, let(self._own + step * STEP)) for step in range(_STEPS)]
            places = [[let(at + (lane.row + half * _HALF) * keys.width) for half in range(2)] for at in firsts]

            def multiply(piece: Expr, count: int) -> None:
                of_lane = count // LANES
                at = let(piece * PIECE + lane.pair * of_lane)
                read = [[self._words(keys.name, let(key + at), of_lane // 2) for key in pair] for pair in places]
                with rows.each() as tile:
                    query = rows.words(tile, piece)
                    for word in range(0, of_lane // 2, 2):
                        for step, (low, high) in enumerate(read):
                            key = low[word], high[word], low[word + 1], high[word + 1]
                            to = scores.address(let((tile * _STEPS + step) * 4))
                            call(f"llmc_mma_{self._of.dtype}", to, *key, query[word], query[word + 1])

            if rows.whole:
                with unrolled(rows.whole) as piece:
                    multiply(piece, PIECE)
            if rows.rest:
                multiply(T.int32(rows.whole), rows.rest)

    def _words(self, pool: str, index: Expr, count: int) -> Array:
        words = Array(count, "uint32")
        call(f"llmc_load{4 * count}", words.address(0), self._k.address(pool, index))
        return words

    def _position(self, step: int, half: int) -> Expr:
        """The key of a lane's results."""
        return let(self._own + self._lane.row + (step * STEP + half * _HALF))

    def _find_scores(self) -> None:
        """From products; and the maxima of each warp's keys."""
        rows, lane, scores = self._rows, self._lane, self._scores
        with rows.each() as tile, unrolled(2) as odd:
            row = rows.column(tile, odd)
            token, head, first = rows.token(row), rows.head(row), let(tile * (_STEPS * 4) + odd)
            places = [(step, half, let(first + step * 4 + half * 2)) for step in range(_STEPS) for half in range(2)]
            for step, half, i in places:
                score = let(scores[i] * T.float32(self._scale), "float32")
                if self._a.shapes:
                    score = self._a.score(score, head, self._run.last(token), self._position(step, half))
                scores[i] = score
            with when(T.Not(self._all_seen)):
                for step, half, i in places:
                    position = self._position(step, half)
                    scores[i] = T.Select(self._run.sees(token, position, position), scores[i], T.float32(LEAST))
            most = Cell(T.float32(LEAST))
            for _, _, i in places:
                most.set(T.max(most.get(), scores[i]))
            for lanes in _LANES_OF_COLUMN:
                most.set(T.max(most.get(), _of_lane(most, lanes)))
            with when(lane.row == 0):
                self._tops[lane.warp * rows.rows + row] = most.get()

    def most(self, row: Expr) -> Expr:
        """The maximum of a row; LEAST if it sees no key."""
        found = let(self._tops[row], "float32")
        for warp in range(1, WARPS):
            found = let(T.max(found, self._tops[row + warp * self._rows.rows]), "float32")
        return found

    def total(self, row: Expr) -> Expr:
        """The sum of a row's weights."""
        found = let(self._totals[row], "float32")
        for warp in range(1, WARPS):
            found = let(found + self._totals[row + warp * self._rows.rows], "float32")
        return found

    def _find_weights(self) -> None:
        rows, lane, dtype = self._rows, self._lane, self._of.dtype
        with rows.each() as tile:
            columns = [rows.column(tile, T.int32(odd)) for odd in range(2)]
            tops = [self.most(row) for row in columns]
            totals = [Cell(T.float32(0.0)) for _ in columns]
            words = Array(4, "uint32")
            with unrolled(4) as key:
                at = let(tile * (_STEPS * 4) + key * 2)
                pair = [exp_negative(let(self._scores[at + odd] - top, "float32")) for odd, top in enumerate(tops)]
                word = let(T.call_pure_extern("uint32", f"llmc_rounded_{dtype}", *pair), "uint32")
                for total, part in zip(totals, ("low", "high"), strict=True):
                    total.set(total.get() + T.call_pure_extern("float32", f"llmc_{part}_{dtype}", word))
                words[key] = T.call_pure_extern("uint32", "llmc_transposed", word)
            place = let((tile * WARPS + lane.warp) * WARP + lane.number)
            call("llmc_store16", self._weights.address(let(place * 4)), words.address(0))
            for row, total in zip(columns, totals, strict=True):
                for lanes in _LANES_OF_COLUMN:
                    total.set(total.get() + _of_lane(total, lanes))
                with when(lane.row == 0):
                    self._totals[lane.warp * rows.rows + row] = total.get()

    def piece(self, number: Expr) -> Expr:
        """One of this warp's pieces of the values; it may be past the last one."""
        return let(self._lane.warp + number * WARPS)

    def element(self, part: Expr, half: Expr) -> Expr:
        """The element of a lane's sums."""
        size = self._of.piece
        piece, tile = self.piece(T.truncdiv(part, size)), T.truncmod(part, size)
        return let((piece * (8 * size) + self._lane.row * size + tile) * 2 + half)

    def _load(self, part: Expr) -> list[list[list[Array]]]:
        """A lane's values of 32 keys: by step, by piece, and by key."""
        of, lane, values, found = self._of, self._lane, self._a.values, []
        for step in range(_STEPS):
            first = self._row(values, let(self._start + part * _OF_WARP + step * STEP))
            of_step = []
            for number in range(of.pieces_per_warp):
                piece = let(T.min(self.piece(T.int32(number)), of.pieces - 1))
                element = let(piece * (STEP * of.piece) + lane.row * (2 * of.piece))
                keys = [let(lane.pair * 2 + other) for other in (0, 1, _HALF, _HALF + 1)]
                of_step.append(
                    [self._words(values.name, let(first + key * values.width + element), of.piece) for key in keys]
                )
            found.append(of_step)
        return found

    def _add(self, part: Expr, read: list[list[list[Array]]]) -> None:
        """Adds the values of 32 keys to the sums."""
        operands = [
            [_operand(keys, word) for keys in of_step for word in range(self._of.piece)] for of_step in read
        ]  # by step, by part
        firsts = [let(self._start + part * _OF_WARP + step * STEP) for step in range(_STEPS)]
        with self._rows.each() as tile:
            weights = Array(4, "uint32")
            place = let((tile * WARPS + part) * WARP + self._lane.number)
            call("llmc_load16", weights.address(0), self._weights.address(let(place * 4)))
            for step, (first, of_step) in enumerate(zip(firsts, operands, strict=True)):
                self._add_step(tile, first, of_step, (weights[2 * step], weights[2 * step + 1]))

    def _add_step(self, tile: Expr, first: Expr, operands: list[Array], weights: tuple[Expr, Expr]) -> None:
        """Adds the values of 16 keys. A key that only some rows see may hold what is no number, times 0: tokens take
        turns then."""
        run, (begin, end) = self._run, self._rows.tokens_of(tile)
        last = let(first + (STEP - 1))
        with T.If(T.And(first >= run.first(end), last <= run.last(begin))):
            with T.Then():
                for part, words in enumerate(operands):
                    self._multiply(self.sums.address(let((tile * self.parts + part) * 4)), words, weights)
            with T.Else():
                if self._rows.shared:
                    with T.serial(begin, end + 1) as token:
                        self._add_seen(tile, token, first, operands, weights)
                else:
                    self._add_seen(tile, begin, first, operands, weights)

    def _multiply(self, sums: Expr, words: Array, weights: tuple[Expr, Expr]) -> None:
        call(f"llmc_mma_{self._of.dtype}", sums, *(words[i] for i in range(4)), *weights)

    def _add_seen(
        self, tile: Expr, token: Expr, first: Expr, operands: list[Array], weights: tuple[Expr, Expr]
    ) -> None:
        """Adds values of the keys that a token sees to its rows."""
        run, rows = self._run, self._rows
        with when(run.sees(token, first, let(first + (STEP - 1)))):
            masks = []
            for half in range(2):
                keys = [let(first + self._lane.pair * 2 + (half * _HALF + odd)) for odd in range(2)]
                low, high = (
                    T.Select(run.sees(token, key, key), T.uint32(bits), T.uint32(0))
                    for key, bits in zip(keys, (0xFFFF, 0xFFFF0000), strict=True)
                )
                masks.append(let(T.bitwise_or(low, high), "uint32"))
            own = [T.Cast("int32", rows.token(rows.column(tile, T.int32(odd))) == token) for odd in range(2)]
            own = [let(one) for one in own]
            for part, words in enumerate(operands):
                seen, at = Array(4, "uint32"), let((tile * self.parts + part) * 4)
                for i in range(4):
                    seen[i] = T.bitwise_and(words[i], masks[i // 2])
                if not rows.shared:
                    self._multiply(self.sums.address(at), seen, weights)
                    continue
                found = Array(4)
                for i in range(4):
                    found[i] = self.sums[at + i]
                self._multiply(found.address(0), seen, weights)
                for i in range(4):
                    self.sums[at + i] = T.Select(own[i % 2] == 1, found[i], self.sums[at + i])


def _of_lane(cell: Cell, lanes: int) -> Expr:
    return let(T.call_pure_extern("float32", "llmc_of_lane", cell.get(), T.int32(lanes)), "float32")


def _operand(keys: list[Array], word: int) -> Array:
    """Values of four keys as an operand whose rows are elements."""
    words = Array(4, "uint32")
    for pair in range(2):
        a, b = (keys[2 * pair + odd][word] for odd in range(2))
        for i, part in enumerate(("lows", "highs")):
            words[2 * pair + i] = T.call_pure_extern("uint32", f"llmc_{part}", a, b)
    return words
