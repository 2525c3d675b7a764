"""embedding_quant: rows of the table as float32, from a weight in any format, as linear layers read it.

A reader yields operands of 16 columns, which are 16 rows of the table; one lane is kept, the token's row. So a linear
layer and the embedding share one copy of a tied weight, and a format needs only its reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.embedding import part_buffers, rows_of_tokens
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.kernels.linear.micro.base import F32, U8X4
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers import reader_of
from llmc.compiler.targets.cpu.kernels.linear.readers.base import OfGroup, Reader
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec, problem_of
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize.formats.registry import format_of_kernel

_BYTE = 255


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    p = spec.as_dict()
    planes = format_of_kernel(p).planes(int(p["dim"]))
    return ("ids", "weight", *(plane.name for plane in planes), *part_buffers(spec), "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, vocab, format = int(p["dim"]), int(p["vocab"]), format_of_kernel(p)
    weight = problem_of(linear_quant_spec(vocab, dim, 1, "f32", format), target)
    kind = reader_of(weight)
    if kind is None:
        raise KernelSpecError(f"embedding_quant: no reader has weights of {format.record()}")
    # A format multiplied only as integers has no float operands.
    reader = kind(weight, F32 if F32 in kind.units_of else U8X4)
    of_weight = {name: dtype for name, dtype in weight.buffer_dtypes() if name in ("w", *weight.planes)}
    operands = [("ids", "int32"), *of_weight.items(), *((name, "float32") for name in (*part_buffers(spec), "out"))]
    kernel = b.Kernel(spec.symbol(), operands, vector.helpers(target.mcpu) + kind.helpers(target))
    with kernel as k:
        reader.bind(k)
        rows = _Rows(weight, reader, b.Vectors(LINE))
        with rows_of_tokens(k, spec) as (row, token):
            rows.write(token, k["out"], b.let(row * dim))
    return kernel.function()


class _Rows:
    """Writes single rows of a weight. held: values of a line of 16 columns."""

    def __init__(self, p: Problem, reader: Reader, held: b.Vectors) -> None:
        self._p, self._reader, self._held = p, reader, held

    def write(self, token: b.Expr, out: b.Expr, base: b.Expr) -> None:
        p, reader = self._p, self._reader
        panel, column = b.let(T.truncdiv(token, p.columns)), b.let(T.truncmod(token, p.columns))
        v, lane = b.let(T.truncdiv(column, b.WIDTH)), b.let(T.truncmod(column, b.WIDTH))
        with T.serial(p.number_groups) as number:
            group = b.let(number)
            of_group = reader.group_of([panel], group)
            zeros = reader.zeros_of_sums([panel], group)
            scales = reader.scales([panel], group if p.groups > 1 else T.int32(0))
            assert scales is not None
            first = b.let(group * p.number_group_lines)
            with T.serial(first, b.let(T.min(first + p.number_group_lines, p.lines))) as at:
                line = b.let(at)
                words = [b.kept(reader.word(panel, line, v, i), "int32") for i in range(reader.line_words)]
                for place, value in enumerate(self._values(words, of_group, zeros, v)):
                    self._held[place] = b.call("mul", value, scales[v])
                for place in range(LINE):
                    element, value = b.let(line * LINE + place), self._held.lane(lane + place * b.WIDTH)
                    with b.when(element < p.kdim):
                        b.store(out, value if reader.factor is None else value * reader.factor, base + element)

    def _values(
        self, words: Sequence[b.Expr], of_group: OfGroup | None, zeros: b.Vectors | None, v: b.Expr
    ) -> list[b.Expr]:
        """The elements of a line as floats, before scaling."""
        reader, units = self._reader, self._reader.units
        operands = [reader.operand_of(words[reader.word_of(u)], u, of_group, v) for u in range(units)]
        if reader.operand == F32:
            return operands
        sums = self._p.format.sums if self._p.format else None
        assert sums is not None
        middle = T.broadcast(T.int32(-sums.factor), b.WIDTH) if zeros is None else zeros[v]
        return [T.Cast(f"float32x{b.WIDTH}", _byte(operands[i // 4], i % 4) - middle) for i in range(LINE)]


def _byte(word: b.Expr, place: int) -> b.Expr:
    """Unsigned byte `place` of each lane, as int32."""
    moved = T.shift_right(word, T.broadcast(T.int32(8 * place), b.WIDTH))
    return T.bitwise_and(moved, T.broadcast(T.int32(_BYTE), b.WIDTH))
