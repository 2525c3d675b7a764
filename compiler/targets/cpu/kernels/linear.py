"""linear: y = x · wᵀ (+ bias) (+ residual). One chain of fma (or bf16 dot) per output element, k ascending; with AMX as
`linear_amx` says.

Tiles of `row_tile` rows × one panel of columns stay in registers. K is walked in blocks: partial sums are stored and
picked up again, which keeps the chain, so a block of the panel stays in cache for all row tiles.
A gated layer has a weight of two parts, gate and up, and y = silu(x · gateᵀ) · (x · upᵀ).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import linear_amx, vector_ir
from llmc.compiler.targets.cpu.kernels.chunks import Chunks
from llmc.compiler.targets.cpu.kernels.linear_layer import LinearLayer, buffers
from llmc.compiler.targets.cpu.kernels.schedule import Schedule
from llmc.compiler.targets.cpu.kernels.sums import Sums
from llmc.compiler.targets.cpu.kernels.widening import widen_words
from llmc.compiler.targets.cpu.target import Target

__all__ = ["buffers", "build", "default_schedule"]
_ROW_CHUNK = 128  # rows that share one pass over the panels
_K_BLOCK = 128  # words of K in one pass: with 48 columns 24 KiB, half of L1
_PANEL_GROUP = 4  # panels whose partial sums stay in cache while K is walked
# bf16 widened on the stack: rows × words × 8 bytes (128 KiB), a share of L2; words × columns × 8 bytes, half of L1.
_WIDE_ROWS, _WIDE_BLOCK, _WIDE_GROUP = 256, 64, 8
_FEW_TILES = 4  # row tiles that do not pay for widening a panel
_STREAMS = 8  # panels of one row at once: a core reads memory faster from several places
_AHEAD_BYTES = 1536  # between what one row reads of a stream and what is fetched meanwhile: over the page's end in time


def build(spec: KernelSpec, target: Target, schedule: Schedule | None = None) -> tirx.PrimFunc:
    if linear_amx.takes(spec, target):
        return linear_amx.TileLinear(spec, target).function()
    return _Linear(spec, target, schedule or _schedule(spec, target)).function()


def default_schedule(spec: KernelSpec, target: Target) -> Schedule | None:
    """What suits most machines of a target; None where tile registers leave nothing to choose."""
    return None if linear_amx.takes(spec, target) else _schedule(spec, target)


def _schedule(spec: KernelSpec, target: Target) -> Schedule:
    if _expands(spec, target):
        return Schedule(_STREAMS, _AHEAD_BYTES, _WIDE_BLOCK * 8 * target.panel_columns, _WIDE_ROWS)
    return Schedule(_STREAMS, _AHEAD_BYTES, _K_BLOCK * 4 * target.panel_columns, _ROW_CHUNK)


def _expands(spec: KernelSpec, target: Target) -> bool:
    """Whether bf16 rows become f32 once for all panels."""
    p = spec.as_dict()
    return b.lanes_of(str(p["act_dtype"])) == 2 and not target.bf16_dot and int(p["row_tile"]) > 1


@dataclass(frozen=True)
class _Panel:
    """Panel `unit` of a part of the weight; place: of its sums between passes."""

    unit: b.Expr
    part: b.Expr
    place: b.Expr


class _Linear(LinearLayer):
    def __init__(self, spec: KernelSpec, target: Target, schedule: Schedule) -> None:
        super().__init__(spec, target)
        self.schedule = schedule
        self.dot = self.lanes == 2 and target.bf16_dot
        self.expand = _expands(spec, target)
        block = max(1, schedule.block_bytes // ((8 if self.expand else 4) * self.columns))
        self.block = self.words if self.tile == 1 else min(self.words, block)
        self.blocks = b.ceil_div(self.words, self.block)
        self.panel_group = (_WIDE_GROUP if self.expand else _PANEL_GROUP) // self.parts
        self.chunk_tiles = max(1, schedule.chunk_rows // self.tile)

    def function(self) -> tirx.PrimFunc:
        puts = self.gate.puts() if self.gate else ()
        helpers = vector_ir.helpers(self.target.mcpu, bf16_dot=self.dot, puts=puts)
        kernel = b.Kernel(self.spec.symbol(), self.buffer_dtypes(), helpers)
        with kernel as k:
            self.k, self.x, self.w, self.y = k, k["x"], k["w"], k["y"]
            self.num_rows = k.scalar(self.rows)
            if self.tile == 1:
                self.one_row_a_tile()
            else:
                self.tiles_of_rows()
        return kernel.function()

    # ---- loops ----------------------------------------------------------------------------------------------------

    def one_row_a_tile(self) -> None:
        """Panels side by side, as many streams of weights; in groups of nearly equal size, as few streams are slow."""
        panel0, panel1 = self.k.share_bounds(self.panels)
        count = b.let(panel1 - panel0)
        most = min(self.schedule.streams, self.panels)
        groups = b.let(T.truncdiv(count + (most - 1), most))
        if self.gate:
            self.sums = Sums(2 * most, 1, 1, self.columns)
        with T.serial(self.num_rows) as t, T.serial(groups) as group:
            first = b.let(panel0 + T.truncdiv(group * count, groups))
            size = b.let(panel0 + T.truncdiv((group + 1) * count, groups) - first)
            with T.serial(self.parts) as part:
                for some in range(1, most + 1):
                    with b.when(size == some):
                        panels = [_Panel(b.let(first + i), part, part * most + i) for i in range(some)]
                        self.tile_body(t, 0, panels, 0, self.words, self.fetch_streams(panels))
            if self.gate:
                with T.serial(size) as i:
                    self.gate.write(self.y, self.sums, (i, most + i), first + i, t, 0, self.num_rows)

    def tiles_of_rows(self) -> None:
        """Chunks of row tiles × groups of panels × blocks of K × panels × row tiles."""
        tile, panels, block = self.tile, self.panels, self.block
        tiles = b.let(T.truncdiv(self.num_rows + (tile - 1), tile))
        if self.expand:
            self.wide_x: b.Expr = T.alloc_buffer((self.chunk_tiles * block * 2 * tile,), "float32", scope="local")
            self.wide_w = b.Scratch(block * 2 * self.columns, "float32")
        if self.gate or self.blocks > 1:
            self.sums = Sums(self.parts * self.panel_group, self.chunk_tiles, tile, self.columns)
        chunks = Chunks(self.k, tiles, panels, self.chunk_tiles)
        unit0, unit1 = chunks.bounds()
        chunk0, chunk1 = b.let(T.truncdiv(unit0, panels)), b.let(T.truncdiv(unit1 + (panels - 1), panels))
        with T.serial(chunk0, chunk1) as chunk:
            panel0 = b.let(T.max(unit0 - chunk * panels, 0))
            panel1 = b.let(T.min(unit1 - chunk * panels, panels))
            tile0, here = chunks.span(chunk)
            with T.serial(T.truncdiv(panel1 - panel0 + (self.panel_group - 1), self.panel_group)) as group:
                first = b.let(panel0 + group * self.panel_group)
                count = b.let(T.min(self.panel_group, panel1 - first))
                with T.serial(self.blocks) as kb:
                    length = b.let(T.min(self.words - kb * block, block))
                    if self.expand:
                        with T.serial(here) as t:
                            self.widen_rows(t, b.let(((tile0 + t) * self.words + kb * block) * tile), length)
                    with T.serial(count * self.parts) as turn:
                        self.one_panel(tile0, here, first, count, turn, kb, length)
                if self.gate:
                    with T.serial(count) as i, T.serial(here) as t:
                        places = i, self.panel_group + i
                        self.gate.write(self.y, self.sums, places, first + i, tile0 + t, t, self.num_rows)

    def one_panel(
        self, tile0: b.Expr, tiles: b.Expr, first: b.Expr, count: b.Expr, turn: b.Expr, kb: b.Expr, length: b.Expr
    ) -> None:
        """Row tiles [tile0, + tiles) times block kb of a panel of the group [first, + count) in one part of the weight;
        turn: which, the panels of the first part first."""
        panel = self.turned(first, count, turn)
        last = T.Cast("int32", turn + 1 == count * self.parts)
        following = self.index(self.turned(first, count, b.let((turn + 1) * (1 - last))))
        ahead = b.let(following * self.words + (kb + last) * self.block)
        with T.If(tiles <= _FEW_TILES):
            with T.Then():
                self.tile_body(tile0, 0, [panel], kb, length, self.fetch_all(ahead, length))
                with T.serial(1, tiles) as t:
                    self.tile_body(tile0 + t, t, [panel], kb, length)
            with T.Else():
                if self.expand:
                    self.widen_panel(b.let(self.index(panel) * self.words + kb * self.block), length)
                lines = b.let(T.truncdiv(length * self.vectors + (tiles - 1), tiles))
                with T.serial(tiles) as t:
                    fetch = self.fetch_share(ahead, t * lines)
                    self.tile_body(tile0 + t, t, [panel], kb, length, fetch, widened=self.expand)

    def turned(self, first: b.Expr, count: b.Expr, turn: b.Expr) -> _Panel:
        """The panel of a turn of the group [first, + count)."""
        if self.parts == 1:
            return _Panel(b.let(first + turn), 0, turn)
        part = b.let(T.truncdiv(turn, count))
        place = b.let(turn - part * count)
        return _Panel(b.let(first + place), part, b.let(part * self.panel_group + place))

    def index(self, panel: _Panel) -> b.Expr:
        """Which panel of the weight it is."""
        return panel.unit if self.parts == 1 else panel.part * self.panels + panel.unit

    # ---- the panel block that comes next ----------------------------------------------------------------------------

    def fetch_all(self, ahead: b.Expr, length: b.Expr) -> Callable[[b.Expr], None]:
        """One row tile fetches all of it, from several places at once. ahead: its first word."""

        def fetch(q: b.Expr) -> None:
            for v in range(self.vectors):
                line = v * length + q
                b.do("prefetch", b.at(self.w, ahead * self.columns + line * b.WIDTH))

        return fetch

    def fetch_streams(self, panels: Sequence[_Panel]) -> Callable[[b.Expr], None]:
        """Every stream fetches what it reads a little later."""
        ahead = self.schedule.ahead_bytes // 4
        indices = [b.let(self.index(panel)) for panel in panels]

        def fetch(q: b.Expr) -> None:
            for index in indices:
                for v in range(self.vectors):
                    at = (index * self.words + q) * self.columns + (v * b.WIDTH + ahead)
                    b.do("prefetch", b.at(self.w, at))

        return fetch

    def fetch_share(self, ahead: b.Expr, first_line: b.Expr) -> Callable[[b.Expr], None]:
        """Every row tile fetches its share of lines (and, harmlessly, the start of the next one's)."""

        def fetch(q: b.Expr) -> None:
            b.do("prefetch", b.at(self.w, ahead * self.columns + (first_line + q) * b.WIDTH))

        return fetch

    # ---- bf16 to f32 ------------------------------------------------------------------------------------------------

    def widen_rows(self, t: b.Expr, start: b.Expr, length: b.Expr) -> None:
        """Row tile t of the chunk, words [start, start + length): first all low halves, then all high ones."""
        tile, block = self.tile, self.block
        low, high = t * 2 * block * tile, (t * 2 + 1) * block * tile
        widen_words(self.x, start, length * tile, self.wide_x, low, high)

    def widen_panel(self, start: b.Expr, length: b.Expr) -> None:
        """Words [start, start + length) of a panel: the low halves of a word, then its high ones."""
        with T.serial(length) as q:
            for v in range(self.vectors):
                words_read = self.w[T.ramp((start + q) * self.columns + v * b.WIDTH, 1, b.WIDTH)]
                for half, part in enumerate(("bf16_low", "bf16_high")):
                    at = (q * 2 + half) * self.columns + v * b.WIDTH
                    self.wide_w.store(b.call(part, words_read), at)

    # ---- the register tile -------------------------------------------------------------------------------------------

    def tile_body(
        self,
        t: b.Expr,
        t_local: b.Expr,
        panels: Sequence[_Panel],
        kb: b.Expr,
        length: b.Expr,
        fetch: Callable[[b.Expr], None] | None = None,
        *,
        widened: bool = False,
    ) -> None:
        """Row tile t (t_local within the chunk) times `panels`, words [kb · block, + length) of K.

        Finished sums of a layer without gate go to y, all others to their places.
        """
        tile, columns, block = self.tile, self.columns, self.block
        vectors = len(panels) * self.vectors
        acc = b.Vectors(tile * vectors)
        of_vector = [(panel, v) for panel in panels for v in range(self.vectors)]
        span = [b.let(panel.unit * columns) + v * b.WIDTH for panel, v in of_vector]
        count = [b.WIDTH if self.width % columns == 0 else self.width - s for s in span]
        indices = [b.let(self.index(panel)) for panel in panels]

        def each_row(body: Callable[[int], None]) -> None:
            for r in range(tile):
                if tile == 1:
                    body(r)
                else:
                    with b.when(t * tile + r < self.num_rows):
                        body(r)

        for i in range(tile * vectors):
            acc[i] = b.splat(0.0)
        if self.blocks > 1:
            with b.when(kb > 0):
                for r in range(tile):
                    for i, (panel, v) in enumerate(of_vector):
                        acc[r * vectors + i] = self.sums.load(panel.place, t_local, r, v)
        with T.serial(length) as q:
            if fetch is not None:
                fetch(q)
            self.step(acc, indices, t * self.words * tile, t_local, kb * block, q, widened=widened)

        def add_bias() -> None:
            for i, (panel, _) in enumerate(of_vector):
                shift = b.Vectors(1)
                shift[0] = b.load_vector(self.k["bias"], panel.part * self.width + span[i], count[i])
                for r in range(tile):
                    acc[r * vectors + i] = b.call("add", acc[r * vectors + i], shift[0])

        def hold() -> None:
            for r in range(tile):
                for i, (panel, v) in enumerate(of_vector):
                    self.sums.store(acc[r * vectors + i], panel.place, t_local, r, v)

        def write(r: int) -> None:
            for i in range(vectors):
                at, value = (t * tile + r) * self.n + span[i], acc[r * vectors + i]
                if self.residual:
                    value = b.call("add", value, b.load_vector(self.k["residual"], at, count[i]))
                b.store_vector(self.y, value, at, count[i])

        def finish() -> None:
            if self.bias:
                add_bias()
            if self.gate:
                hold()
            else:
                each_row(write)

        if self.blocks == 1:
            finish()
            return
        with T.If(kb == self.blocks - 1):
            with T.Then():
                finish()
            with T.Else():
                hold()

    def step(
        self,
        acc: b.Vectors,
        indices: Sequence[b.Expr],
        row0: b.Expr,
        t_local: b.Expr,
        word0: b.Expr,
        q: b.Expr,
        *,
        widened: bool,
    ) -> None:
        """One word of K: word q of the block that starts at word0. row0: where the row tile starts in x."""
        tile, vectors = self.tile, len(indices) * self.vectors
        word = q + word0
        at = [
            (panel * self.words + word) * self.columns + v * b.WIDTH for panel in indices for v in range(self.vectors)
        ]
        xi = [row0 + word * tile + r for r in range(tile)]
        if self.lanes == 1 or self.dot:
            wv = [self.w[T.ramp(i, 1, b.WIDTH)] for i in at]
            for r in range(tile):
                value = b.splat(self.x[xi[r]])
                for v in range(vectors):
                    i = r * vectors + v
                    if self.dot:
                        acc[i] = b.call("dot_bf16", acc[i], value, wv[v])
                    else:
                        acc[i] = b.call("fma", value, wv[v], acc[i])
            return
        for half, part in enumerate(("bf16_low", "bf16_high")):
            parts = b.Vectors(vectors)
            for v in range(vectors):
                if widened:
                    parts[v] = self.wide_w.vector((q * 2 + half) * self.columns + v * b.WIDTH)
                else:
                    parts[v] = b.call(part, self.w[T.ramp(at[v], 1, b.WIDTH)])
            for r in range(tile):
                if self.expand:
                    value = b.splat(self.wide_x[((t_local * 2 + half) * self.block + q) * tile + r])
                else:
                    value = b.call(part, b.splat(self.x[xi[r]]))
                for v in range(vectors):
                    i = r * vectors + v
                    acc[i] = b.call("fma", value, parts[v], acc[i])
