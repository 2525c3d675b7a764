"""Which linear layers the tensor cores of a GPU multiply, and in which tiles. Imports no tvm.

All kernels of a layer are one, so that a layer's sums have one order for every number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.compiler.dtypes import HALVES
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.padding import stored_bits
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import format_of_kernel

ITEMS = 256
"""Work items of a group: eight warps."""
WARP = 32
WEIGHT_ROWS, X_ROWS = 128, 64
"""A tile of a group: rows of the weight, which are columns of the result, and rows of x."""
FEW_ROWS = 8
"""Up to so many rows of x a warp reads what it multiplies by itself: nothing is read twice, so nothing is shared."""
STEP_BYTES = 64
"""Of a row of x, multiplied between two waits; four lanes have 16 bytes each."""
_MOST_EXACT = 1 << 16
"""Products of bytes that a sum of 32 bits holds."""


@dataclass(frozen=True)
class TensorLayer:
    """What is multiplied. dtype: of x, bf16, f16 or i8; bits: that a number of the weight takes; asymmetric: whether
    groups have zero points; length: elements that one scale is for, 0: there is none."""

    width: int
    dtype: str
    bits: int
    asymmetric: bool = False
    length: int = 0

    @property
    def step(self) -> int:
        """Elements of K of a step."""
        return STEP_BYTES if self.dtype == "i8" else STEP_BYTES // 2

    @property
    def steps(self) -> int:
        return self.width // self.step


def tensor_layer(spec: KernelSpec) -> TensorLayer | None:
    """None: a layer that plain multiply-adds compute."""
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
    """For each tile of rows of x: more than there are tiles of a weight, so that few rows have many groups, too."""
    return -(-weight_rows // WARP)
