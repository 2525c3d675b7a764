"""One row tile of `linear_quant`, of exact sums: panels in groups, a short block of K of each in turn.

So a core reads memory at as many places as a group has panels, and goes a long way at each, though the registers hold
the sums of one panel: those of the others wait in L1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.quant_layer import QuantLayer
from llmc.compiler.targets.cpu.kernels.quant_place import Fetch, Walk
from llmc.compiler.targets.cpu.kernels.quant_tile import TileWriter
from llmc.compiler.targets.cpu.kernels.quant_weight import QuantWeight
from llmc.compiler.targets.cpu.kernels.sums import GatedOutput, Sums

_BLOCK_BYTES = {8: 1536, 4: 3072}
"""Of a panel, about, by bits of a number: those of int8 are in L1 when they are read, with the sums."""
_GROUPS_AHEAD = 3


class StreamedBlocks:
    """Emits the loops of a kernel `k`. streams: places that are read at once."""

    def __init__(
        self, layer: QuantLayer, weight: QuantWeight, k: b.Kernel, num_rows: b.Expr, gate: GatedOutput | None,
        streams: int,
    ) -> None:  # fmt: skip
        self.layer, self.weight, self.k, self.num_rows, self.gate = layer, weight, k, num_rows, gate
        unit = layer.number_group_lines if layer.number_groups > 1 else 1
        units = b.ceil_div(layer.lines, unit)
        most = max(1, _BLOCK_BYTES[weight.bits] // (weight.line_bytes * unit))
        lines = b.ceil_div(units, b.ceil_div(units, most)) * unit
        self.walk = Walk(lines, b.ceil_div(layer.lines, lines), unpacked=False)
        self.most = max(1, min(streams // layer.parts, layer.panels))
        self.sums = Sums(self.most * layer.parts, 1, layer.tile, layer.columns)
        self.tiles = TileWriter(layer, weight, k, num_rows, self.sums, None)
        self.cursor = _Cursor(weight)
        self.line_fetches = weight.line_vectors // self.cursor.at_once
        self.block_fetches = self.walk.lines * self.line_fetches

    def run(self, tiles: b.Expr) -> None:
        """This task's share of the panels, in groups of nearly equal size."""
        panel0, panel1 = self.k.share_bounds(self.layer.panels)
        count = b.let(panel1 - panel0)
        groups = b.let(T.truncdiv(count + (self.most - 1), self.most))

        def span(group: b.Expr) -> tuple[b.Expr, b.Expr]:
            """First panel of a group, and how many there are."""
            first = b.let(panel0 + T.truncdiv(group * count, groups))
            return first, b.let(panel0 + T.truncdiv((group + 1) * count, groups) - first)

        with b.when(count > 0), T.serial(self.layer.parts) as part:
            first, size = span(T.int32(0))
            self.cursor.begin(self.layer.panel(part, first), size, T.int32(0))
            with T.serial(size * self.block_fetches):
                self.cursor.fetch()
        with T.serial(tiles) as t, T.serial(groups) as g:
            group = b.let(g)
            first, size = span(group)
            with T.serial(self.walk.count) as block, T.serial(self.layer.parts) as part:
                kb = b.let(block)
                last = b.let(T.Cast("int32", kb == self.walk.count - 1))
                following, its_size = span(b.let(T.min(group + last, groups - 1)))
                line = b.let((kb + 1) * (1 - last) * self.walk.lines)
                self.cursor.begin(self.layer.panel(part, following), its_size, line)
                with T.serial(size) as i:
                    place = b.let(part * self.most + i)
                    panel = b.let(self.layer.panel(part, first + i))
                    fetch = Fetch(
                        self.fetch, fetch_steps(self.weight, [panel], self.most) if self.layer.steps else None
                    )
                    self.tiles.row_tile(t, 0, [first + i], part, [place], self.walk, kb, fetch)
            if self.gate:
                # Memory would rest meanwhile: the next group's first block is here, the second one, if any, is not.
                meanwhile = self.fetch_block if self.walk.count > 1 else None
                following, its_size = span(b.let(T.min(group + 1, groups - 1)))
                self.cursor.begin(self.layer.panel(0, following), its_size, T.int32(self.walk.lines))
                with T.serial(size) as i:
                    unit, places = b.let(first + i), (i, self.most + i)
                    self.gate.write(
                        self.k["y"], self.sums, places, unit, b.let(t), T.int32(0), self.num_rows, meanwhile
                    )

    def fetch(self, _line: b.Expr, v: int) -> None:
        """As many vectors as are read of a line meanwhile."""
        if v < self.line_fetches:
            self.cursor.fetch()

    def fetch_block(self) -> None:
        """A share of a panel's block, rounded up, while a vector of its columns is written."""
        with T.serial(b.ceil_div(self.block_fetches, self.weight.vectors)):
            self.cursor.fetch()


def fetch_steps(weight: QuantWeight, panels: Sequence[b.Expr], stride: int) -> Callable[[b.Expr], None]:
    """Fetches, with the steps of a group of `panels`, those a few groups later, and of panels `stride` further."""

    def fetch(group: b.Expr) -> None:
        for panel in panels:
            weight.fetch_steps(panel, group + _GROUPS_AHEAD)
            weight.fetch_steps(panel + stride, group)

    return fetch


class _Cursor:
    """Goes through lines of some neighbouring panels, a line of each in turn; of int4, a vector of each."""

    def __init__(self, weight: QuantWeight) -> None:
        self.at_once, self._level = (weight.line_vectors, 1) if weight.bits == 8 else (1, 2)
        self._weight = weight
        self._stride = weight.panel_words * weight.columns
        self._at, self._turn, self._panels, self._back = (
            T.alloc_buffer((1,), "int32", scope="local") for _ in range(4)
        )

    def begin(self, panel: b.Expr, panels: b.Expr, line: b.Expr) -> None:
        """From a line of `panels` panels on, `panel` the first."""
        b.store(self._at, self._weight.position(panel, line), 0)
        b.store(self._turn, T.int32(0), 0)
        b.store(self._panels, panels, 0)
        b.store(self._back, self.at_once * b.WIDTH - (panels - 1) * self._stride, 0)

    def fetch(self) -> None:
        """Brings the next `at_once` vectors into the cache."""
        for i in range(self.at_once):
            self._weight.fetch(self._at[0] + i * b.WIDTH, self._level)
        b.store(self._turn, self._turn[0] + 1, 0)
        past = b.let(T.Cast("int32", self._turn[0] == self._panels[0]))
        b.store(self._at, self._at[0] + (self._stride + past * (self._back[0] - self._stride)), 0)
        b.store(self._turn, self._turn[0] * (1 - past), 0)
