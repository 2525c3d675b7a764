"""rope_rows and row_numbers: a rotary table with a row for each token, whose positions have several axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, I32, NUM_TOKENS, Argument, GraphParams, KernelCall, OpDef, Template
from llmc.graphs_format import ROPE_AXES

_TABLE, _NUMBERS = ("cos_sin", "positions", "out"), ("positions", "out")
_KINDS = {"cos_sin": "f32", "positions": "i32", "out": "f32"}
_AXIS_BITS, _AXES_OF_WORD = 2, 15
"""Axes of 15 frequencies fit an int32 without its sign."""


def _rope_rows(site: Site, graph: GraphParams) -> list[KernelCall]:
    spec = KernelSpec.of("other", "rope_rows", dim=site.attributes["widths"]["cos_sin"], axes=site.attributes["axes"])
    return [KernelCall(spec, _TABLE)]


def _row_numbers(site: Site, graph: GraphParams) -> list[KernelCall]:
    return [KernelCall(KernelSpec.of("other", "row_numbers"), _NUMBERS)]


def _axes(spec: KernelSpec) -> tuple[int, list[int]]:
    """(elements of a row, the axis of each frequency)."""
    p = spec.as_dict()
    return int(p["dim"]), [int(digit) for digit in str(p["axes"])]


def _axis_of(axes: list[int], frequency: Any) -> Any:
    """The axis of a frequency that is known at run time: two bits of a constant."""
    from tvm.script.ir_builder import tirx as T

    words = [axes[first : first + _AXES_OF_WORD] for first in range(0, len(axes), _AXES_OF_WORD)]
    packed = [sum(axis << _AXIS_BITS * place for place, axis in enumerate(word)) for word in words]
    word: Any = T.int32(packed[-1])
    for number in reversed(range(len(packed) - 1)):
        word = T.Select(frequency < (number + 1) * _AXES_OF_WORD, T.int32(packed[number]), word)
    shift = T.truncmod(frequency, _AXES_OF_WORD) * _AXIS_BITS
    return T.bitwise_and(T.shift_right(word, shift), (1 << _AXIS_BITS) - 1)


def _rope_rows_reference(spec: KernelSpec) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.reference.kernels.frame import Frame, let

    dim, axes = _axes(spec)
    with Frame(spec.symbol(), _KINDS) as k, k.share_elements(k.scalar(NUM_TOKENS), dim) as (row, i):
        axis = let(_axis_of(axes, let(T.truncmod(i, dim // 2))))
        at = let(k.raw("positions", row * ROPE_AXES + axis))
        k.store("out", k.raw("cos_sin", at * dim + i), row * dim + i)
    return k.function()


def _runs(axes: list[int]) -> Iterator[tuple[int, int, int]]:
    """(axis, first frequency, how many) of neighbours that follow one axis."""
    first = 0
    for axis, found in groupby(axes):
        count = len(list(found))
        yield axis, first, count
        first += count


def _rope_rows_cpu(spec: KernelSpec, target: Any) -> Any:
    from llmc.compiler.targets.cpu.kernels import builder as b

    dim, axes = _axes(spec)
    buffers = [("cos_sin", "float32"), ("positions", "int32"), ("out", "float32")]
    kernel = b.Kernel.of(spec.symbol(), buffers, target)
    with kernel as k, k.share(k.scalar(NUM_TOKENS)) as row:
        rows = [b.let(k["positions"][row * ROPE_AXES + axis] * dim) for axis in range(ROPE_AXES)]
        to = b.let(row * dim)
        for half in range(2):
            for axis, first, count in _runs(axes):
                for at in range(half * dim // 2 + first, half * dim // 2 + first + count, b.WIDTH):
                    size = min(b.WIDTH, half * dim // 2 + first + count - at)
                    values = b.load_vector(k["cos_sin"], rows[axis] + at, size)
                    b.store_vector(k["out"], values, to + at, size)
    return kernel.function()


def _row_numbers_reference(spec: KernelSpec) -> Any:
    from llmc.compiler.targets.reference.kernels.frame import Frame

    with (
        Frame(spec.symbol(), dict.fromkeys(_NUMBERS, "i32")) as k,
        k.share_elements(k.scalar(NUM_TOKENS), 1) as (row, _),
    ):
        k.put_raw("out", row, row)
    return k.function()


def _row_numbers_cpu(spec: KernelSpec, target: Any) -> Any:
    from llmc.compiler.targets.cpu.kernels import builder as b

    kernel = b.Kernel.of(spec.symbol(), [(name, "int32") for name in _NUMBERS], target)
    with kernel as k, k.share(k.scalar(NUM_TOKENS)) as row:
        b.store(k["out"], row, row)
    return kernel.function()


_ROWS_TEMPLATES: Mapping[str, Template] = {"reference": _rope_rows_reference, "cpu": _rope_rows_cpu}
_NUMBERS_TEMPLATES: Mapping[str, Template] = {"reference": _row_numbers_reference, "cpu": _row_numbers_cpu}

ROPE_ROWS = OpDef(
    "rope_rows",
    {"cos_sin": Argument(2, F32), "positions": Argument(2, I32)},
    lambda call: ((call.shapes["positions"][0], call.shapes["cos_sin"][1]), F32[0]),
    _rope_rows,
    templates=_ROWS_TEMPLATES,
)
ROW_NUMBERS = OpDef(
    "row_numbers",
    {"positions": Argument(1, I32)},
    lambda call: ((call.shapes["positions"][0],), I32[0]),
    _row_numbers,
    templates=_NUMBERS_TEMPLATES,
)
