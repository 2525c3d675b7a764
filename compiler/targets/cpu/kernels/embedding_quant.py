"""embedding_quant: rows of the table as float32, from the quantized weight of a tied lm_head: 8 bits, a scale a row."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import format_of_kernel

_WORD, _LINE = 4, 8  # numbers of a word; K is padded to whole lines
_MIDDLE = 128


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("ids", "weight", "scale", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, vocab, columns = int(p["dim"]), int(p["vocab"]), int(p["panel_columns"])
    if format_of_kernel(p) != Integers(8):
        raise KernelSpecError(f"embedding_quant: a table must have 8 bits and one scale a row, not {p}")
    words = b.ceil_div(dim, _LINE) * 2
    kernel = b.Kernel(
        spec.symbol(),
        [("ids", "int32"), ("weight", "uint8"), ("scale", "float32"), ("out", "float32")],
        vector.helpers(target.mcpu),
    )
    with kernel as k:
        ids, weight, scale, out = k["ids"], k["weight"], k["scale"], k["out"]
        with k.share(k.scalar(int(p.get("rows", 0)))) as row:
            token = b.let(T.max(T.min(ids[row], vocab - 1), 0))  # a bad id reads some row, never past the table
            base = b.let((T.truncdiv(token, columns) * (words * columns) + T.truncmod(token, columns)) * _WORD)
            step = scale[token]
            with T.serial(b.ceil_div(dim, _WORD)) as word:
                for place in range(_WORD):
                    element = b.let(word * _WORD + place)
                    with b.when(element < dim):
                        number = T.Cast("int32", weight[base + word * (columns * _WORD) + place])
                        b.store(out, T.Cast("float32", number - _MIDDLE) * step, row * dim + element)
    return kernel.function()
