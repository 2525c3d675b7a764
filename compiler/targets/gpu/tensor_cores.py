"""Linear layers that run on tensor cores, and their tiles. Imports no tvm.

A layer uses one kernel for every number of rows, so that its sums have one order.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.compiler.dtypes import HALVES
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.padding import stored_bits
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import format_of_kernel

ITEMS = 256
"""Work items per group: eight warps."""
WARP = 32
WEIGHT_ROWS, X_ROWS = 128, 64
"""A group's tile: weight rows (columns of the result) and rows of x."""
FEW_ROWS = 8
"""Up to this many rows of x, each warp reads its own operands: nothing is read twice, so nothing is shared."""
STEP_BYTES = 64
"""Bytes of a row of x multiplied between two waits; four lanes read 16 bytes each."""
_MOST_EXACT = 1 << 16
"""Products of bytes that fit a 32-bit sum."""


@dataclass(frozen=True)
class TensorLayer:
    """The operands of a layer.

    dtype: of x: bf16, f16 or i8. bits: width of a weight number. asymmetric: whether groups have zero points. length:
    elements per scale; 0 without scales.
    """

    width: int
    dtype: str
    bits: int
    asymmetric: bool = False
    length: int = 0

    @property
    def step(self) -> int:
        """Elements of K per step."""
        return STEP_BYTES if self.dtype == "i8" else STEP_BYTES // 2

    @property
    def steps(self) -> int:
        return self.width // self.step


def tensor_layer(spec: KernelSpec) -> TensorLayer | None:
    """The layer on tensor cores; None if it needs plain multiply-adds."""
    p = spec.as_dict()
    if spec.op not in ("linear", "linear_quant"):
        return None
    width, dtype = int(p["k"]), str(p["act_dtype"])
    if spec.op == "linear":
        layer = TensorLayer(width, dtype, 16)
        if dtype not in HALVES or p["weight_dtype"] != dtype:
            return None
    else:
        format = format_of_kernel(p)
        if not isinstance(format, Integers) or dtype not in (*HALVES, "i8"):
            return None
        length = width if format.scales(width) == 1 else format.group_size
        layer = TensorLayer(width, dtype, stored_bits(format.bits), format.asymmetric, length)
        if length % layer.step or (dtype == "i8" and length > _MOST_EXACT):
            return None
    return None if width % layer.step else layer


def launch_groups(weight_rows: int) -> int:
    """Groups per tile of x rows: more than there are weight tiles, so that few rows also occupy many groups."""
    return -(-weight_rows // WARP)
