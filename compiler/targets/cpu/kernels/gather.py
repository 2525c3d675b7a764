"""gather_rows: copies the rows whose logits are needed, or `count` consecutive ones for each sample."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "index", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim = int(p["dim"])
    width = dim * int(p.get("count", 1))
    full, tail = width // b.WIDTH, width % b.WIDTH
    kernel = b.Kernel.of(spec.symbol(), [("x", "float32"), ("index", "int32"), ("out", "float32")], target)
    with kernel as k:
        x, index, out = k["x"], k["index"], k["out"]
        with k.share(k.scalar(int(p.get("rows", 2)))) as row:
            source = index[row] * dim
            with T.serial(full) as step:
                at = step * b.WIDTH
                b.store_vector(out, b.load_vector(x, source + at), row * width + at)
            if tail:
                at = full * b.WIDTH
                b.store_vector(out, b.load_vector(x, source + at, tail), row * width + at, tail)
    return kernel.function()
