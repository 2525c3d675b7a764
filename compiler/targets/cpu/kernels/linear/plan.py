"""Plan of a kernel: reader, micro-kernel and loops chosen for a problem, and sizes of blocks and chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from llmc.compiler.kernel_spec import KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.micro import MICRO_KERNELS, TILE_KERNELS
from llmc.compiler.targets.cpu.kernels.linear.micro.amx import ROWS, TileRegisters
from llmc.compiler.targets.cpu.kernels.linear.micro.base import F32, MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import TURN, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers import reader_of
from llmc.compiler.targets.cpu.kernels.linear.readers.base import Reader
from llmc.compiler.targets.cpu.kernels.linear.readers.numbers import Numbers
from llmc.compiler.targets.cpu.kernels.linear.schedule import Schedule

FEW_TILES = 4
"""Number of row tiles up to which unpacking a block does not pay."""
_REGISTERS = {16: 32, 8: 8}  # number of vector registers, by lanes of a register
_WIDE_ROWS = 256  # 16-bit rows converted to float32: their block of K and the sums of a group of panels stay in L2
_WIDE_PANELS = 8  # panels in such a group
_MAX_ROWS = 1024  # most rows in a chunk: their sums are on the stack


class Loops(Enum):
    """Orders of loops. stream.py implements SIDE_BY_SIDE and STREAMED_BLOCKS, blocked.py the others."""

    SIDE_BY_SIDE = auto()
    STREAMED_BLOCKS = auto()
    PANELS_OF_FEW = auto()
    PANELS = auto()
    GROUPS_OF_PANELS = auto()


@dataclass(frozen=True)
class Plan:
    """reader, micro, registers: chosen for the problem. registers: tile registers; None: vectors compute all rows.

    few, many: walk along K for few and for many row tiles. chunk_tiles: row tiles per chunk. chunk_unit: row tiles of a
    chunk computed at a time. copied_tiles: row tiles whose activations a micro-kernel copies whole; 0: none.
    side_by_side: panels that one row tile reads at once. streams, ahead_bytes: see `Schedule`. group: panels whose sums
    wait in cache while K is walked; 1: one panel at a time. widens: 16-bit activations of many rows become float32 once
    per group of panels. fewer_rows: numbers of rows, ascending; of a last row tile with no more valid rows than one of
    these, only so many are computed. loops: (most row tiles, order of loops), ascending; None: any number.
    """

    reader: Reader
    micro: MicroKernel
    registers: type[TileRegisters] | None
    few: Walk
    many: Walk
    chunk_tiles: int
    loops: tuple[tuple[int | None, Loops], ...]
    chunk_unit: int = 1
    copied_tiles: int = 0
    side_by_side: int = 1
    streams: int = 1
    ahead_bytes: int = 0
    group: int = 1
    widens: bool = False
    fewer_rows: tuple[int, ...] = ()

    @property
    def chunked(self) -> bool:
        """Whether any loops pass over chunks of rows."""
        return self.loops[-1][1] in (Loops.PANELS, Loops.GROUPS_OF_PANELS)


def default_schedule(p: Problem) -> Schedule | None:
    """The schedule that suits most machines of a target; None if tile registers leave no choice."""
    registers = _registers(p)
    if p.quantized:
        return _quantized_schedule(p, registers)
    return None if registers else _float_schedule(p)


def plan(p: Problem, schedule: Schedule | None, *, uneven: bool = False) -> Plan:
    """The plan of a problem under a schedule; None: the default schedule. uneven: many rows seldom fill whole tiles."""
    registers = _registers(p)
    if p.quantized:
        return _quantized(p, registers, schedule or _quantized_schedule(p, registers), uneven=uneven)
    if registers is not None:
        return _float_registers(p, registers)
    return _float(p, schedule or _float_schedule(p), uneven=uneven)


def _registers(p: Problem) -> type[TileRegisters] | None:
    return next((kind for kind in TILE_KERNELS if kind.suits(p)), None)


def operands(p: Problem) -> tuple[Reader, MicroKernel]:
    """The reader of the problem's weight and the micro-kernel for its rows in vectors."""
    reader = reader_of(p)
    if reader is None:
        raise KernelSpecError(f"{p.spec.op}: no reader knows weights of {p.format.record() if p.format else p.kind}")
    for micro in MICRO_KERNELS:
        if micro.suits(p) and micro.operand in reader.units_of:
            return reader(p, micro.operand), micro(p)
    raise KernelSpecError(f"{p.spec.op}: weights of {p.kind} are not multiplied by activations of {p.act}")


def _has_parts(p: Problem) -> bool:
    """Whether row tiles are those of many rows, in registers wide enough for parts of them to be faster."""
    return p.tile == p.target.row_tile and p.target.lanes == b.WIDTH


def _fewer_rows(p: Problem) -> tuple[int, ...]:
    """See `Plan`. Below half a tile there are too few chains of operations to be faster."""
    return tuple(range(p.tile // 2, p.tile, 2))


# ---- floats ---------------------------------------------------------------------------------------------------------

_ROW_CHUNK = 128  # rows that share one pass over the panels
_K_BLOCK, _WIDE_K_BLOCK = 128, 64  # words of K in one pass: with 48 columns 24 KiB, half of L1
_GROUP = 4  # panels whose partial sums stay in cache while K is walked
_FLOAT_STREAMS = 4  # panels that one row reads at once: a core reads faster from several places, but not from many
_FLOAT_AHEAD = 6144  # bytes, over all streams, from what a row tile reads to what it prefetches
# Most activations copied to the stack for tile registers: they stay in L2 while panels pass.
_COPIED_ROWS, COPIED_BYTES = 512, 512 << 10
_BLOCK_STEPS = 8  # steps of K in one pass: with 48 columns 24 KiB of weights, half of L1


def _expands(p: Problem, micro: MicroKernel) -> bool:
    """Whether 16-bit rows are converted to float32 once for all panels."""
    return p.lanes == 2 and micro.operand == F32 and p.tile > 1


def _word_bytes(p: Problem, *, widens: bool) -> int:
    """Bytes of one word of K over all columns, in the form that many row tiles read."""
    return (8 if widens else 4) * p.columns


def _float_schedule(p: Problem) -> Schedule:
    reader, micro = operands(p)
    widens = _expands(p, micro)
    words, rows = (_WIDE_K_BLOCK, _WIDE_ROWS) if widens else (_K_BLOCK, _ROW_CHUNK)
    streams = _side_by_side(p, _FLOAT_STREAMS, reader)
    return Schedule(streams, _FLOAT_AHEAD // streams, words * _word_bytes(p, widens=widens), rows)


def _float(p: Problem, schedule: Schedule, *, uneven: bool) -> Plan:
    reader, micro = operands(p)
    widens = _expands(p, micro)
    lines = min(p.lines, max(1, schedule.block_bytes // _word_bytes(p, widens=widens)))
    uneven = uneven and _has_parts(p)
    few = Walk(lines, b.ceil_div(p.lines, lines))
    if widens:
        loops: tuple[tuple[int | None, Loops], ...] = ((None, Loops.GROUPS_OF_PANELS),)
    elif p.tile < p.target.row_tile:  # there is one tile
        loops = ((None, Loops.SIDE_BY_SIDE),)
    else:
        loops = ((1, Loops.SIDE_BY_SIDE), (None, Loops.GROUPS_OF_PANELS))
    return Plan(
        reader, micro, None,
        few=few,
        many=Walk(few.lines, few.count, unpacked=widens),
        chunk_tiles=max(1, schedule.chunk_rows // p.tile),
        loops=loops,
        side_by_side=_side_by_side(p, schedule.streams, reader),
        ahead_bytes=schedule.ahead_bytes,
        # One panel of gate and of up is faster than two, by 2 to 5 % for 32 to 130 rows of an expert.
        group=1 if uneven and p.parts > 1 and not widens else (_WIDE_PANELS if widens else _GROUP) // p.parts,
        widens=widens,
        fewer_rows=_fewer_rows(p) if uneven else (),
    )  # fmt: skip


def _float_registers(p: Problem, registers: type[TileRegisters]) -> Plan:
    rows = min(_COPIED_ROWS, COPIED_BYTES // (p.x_words * 4)) // ROWS * ROWS
    # Graphs with a smaller row tile have no more rows than that.
    chunk_tiles = max(ROWS // 2, rows if p.tile == p.target.row_tile else 0) // p.tile
    lines = _BLOCK_STEPS * p.step_lines
    walk = Walk(lines, b.ceil_div(p.lines, lines))
    loops = ((None, Loops.PANELS),)
    return Plan(*operands(p), registers, walk, walk, chunk_tiles, loops, chunk_unit=min(ROWS // p.tile, chunk_tiles))


# ---- quantized weights ----------------------------------------------------------------------------------------------

_AHEAD_BYTES = 3072  # from a line of a stream to what is prefetched with it
_PAIRED_AHEAD_BYTES = 8192  # the same for numbers that become bf16, which are read in one stream
_ROW_CHUNK_BYTES = 768 << 10  # activations that stay in L2 while panels pass
_ROWS_OF_STREAMS = 2  # with more rows, exact sums leave registers for only one panel at a time
_COPIED_FEW_BYTES = 256 << 10  # activations copied to the stack, whole, for few row tiles
_PACKED_BYTES = 128 << 10  # a panel's packed block, in L2
_UNPACKED_BYTES = 24 << 10  # a panel's unpacked block, in L1


def _quantized_schedule(p: Problem, registers: type[TileRegisters] | None) -> Schedule:
    """The default. Its block_bytes are those of the block that many row tiles read, packed or unpacked."""
    reader = operands(p)[0]
    assert isinstance(reader, Numbers)
    block = _PACKED_BYTES if p.exact or reader.as_it_lies else _UNPACKED_BYTES
    fit = (COPIED_BYTES if registers or p.fixed else _ROW_CHUNK_BYTES) // (p.x_words * 4)
    rows = _WIDE_ROWS if p.lanes == 2 and not p.fixed else min(_MAX_ROWS, fit)
    least = 1 if registers or p.fixed else (FEW_TILES + 1) * p.tile
    return Schedule(reader.streams, _PAIRED_AHEAD_BYTES if p.paired else _AHEAD_BYTES, block, max(least, rows))


def _quantized(p: Problem, registers: type[TileRegisters] | None, schedule: Schedule, *, uneven: bool) -> Plan:
    reader, micro = operands(p)

    def walk(*, unpacked: bool) -> Walk:
        """Blocks of whole groups."""
        line_bytes = p.columns * 4 * reader.units if unpacked else reader.line_bytes
        # A schedule has no size of packed blocks that only few row tiles read.
        block_bytes = schedule.block_bytes if unpacked or reader.as_it_lies else _PACKED_BYTES
        unit = p.step_lines if registers else 1
        of_group = p.number_group_lines if p.number_groups > 1 else p.group_lines if p.fixed else 1
        unit = math.lcm(unit, of_group, TURN if p.paired else 1)
        return Walk.of_lines(p.lines, block_bytes // (line_bytes * unit), unit, unpacked=unpacked)

    many = walk(unpacked=not reader.as_it_lies)
    few = many if registers else walk(unpacked=reader.unpacked_for_few)
    fit, turn = schedule.chunk_rows // p.tile, ROWS // p.tile
    if registers:
        chunk_tiles = max(turn // 2, fit // turn * turn)
    elif p.fixed:  # rows are copied to the stack of a host thread, which is small
        chunk_tiles = max(1, min(fit, 2 * COPIED_BYTES // (p.tile_words * 4)))
    else:
        chunk_tiles = max(FEW_TILES + 1, fit)
    widens = p.lanes == 2 and not p.fixed and p.tile == p.target.row_tile
    one = Loops.STREAMED_BLOCKS if p.exact and p.tile > _ROWS_OF_STREAMS else Loops.SIDE_BY_SIDE
    most_few, copied = FEW_TILES, chunk_tiles if p.fixed else 0
    if (widened := _expands(p, micro)) or p.paired:
        most_few = copied = min(FEW_TILES, _COPIED_FEW_BYTES // (p.tile_words * (8 if widened else 4)))
    copied = max(copied, 1) if p.copied else copied  # rows that are only widened may be left as they are
    loops: list[tuple[int | None, Loops]] = [(None, one)]
    if p.tile == p.target.row_tile:  # the largest tile is for many rows; a kernel of a smaller one gets a single tile
        loops = [(1, one)]
        if few != many and most_few > 1:
            loops.append((most_few, Loops.PANELS_OF_FEW))
        loops.append((None, Loops.GROUPS_OF_PANELS if widens else Loops.PANELS))
    return Plan(
        reader, micro, registers,
        few=few,
        many=many,
        chunk_tiles=chunk_tiles,
        loops=tuple(loops),
        chunk_unit=min(turn, chunk_tiles) if registers else 1,
        copied_tiles=copied if p.tile == p.target.row_tile else min(copied, 1),
        side_by_side=_side_by_side(p, schedule.streams, reader),
        streams=schedule.streams,
        ahead_bytes=schedule.ahead_bytes,
        group=_WIDE_PANELS // p.parts if widens else 1,
        widens=widens,
        fewer_rows=_fewer_rows(p) if uneven and not registers and _has_parts(p) else (),
    )  # fmt: skip


def _side_by_side(p: Problem, streams: int, reader: Reader) -> int:
    """Number of panels that one row tile reads at once.

    One row: `streams`, if the registers hold their sums. More rows: whatever number the registers hold the sums of.
    A group of integers has its own sums beside those of all groups, so either may take a third of the registers.
    Narrow registers hold neither; there more panels are faster, although sums spill.
    Numbers that become bf16 are read in one stream.
    """
    if p.paired:
        return 1
    registers = _REGISTERS[p.target.lanes]
    if p.tile == 1:
        both = p.integer and p.number_groups > 1 and p.target.lanes == b.WIDTH
        most = registers // 3 if both else registers * 3 // 4
        streams = min(streams, most // p.vectors)
    else:
        weights = 1 if reader.as_it_lies or not p.quantized else 2  # registers of a weight: as packed, and as numbers
        streams = (registers - 2) // (p.tile + weights) // p.vectors
    return max(1, min(streams, p.panels))
