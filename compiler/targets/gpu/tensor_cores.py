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

ITEMS = 128
"""Work items per group: four warps. Two such groups fit a processor, with all registers that items can have."""
WARP = 32
WARPS = ITEMS // WARP
MATRIX_ROWS, MATRIX_COLUMNS = 16, 8
"""Rows of the weight, and of x, per product."""
FEW_ROWS = MATRIX_COLUMNS
"""Up to this many rows of x, each warp reads its own operands: nothing is read twice, so nothing is shared."""
STEP_BYTES = 64
"""Bytes of a row of x multiplied between two waits; four lanes read 16 bytes each."""
ADAPTER_STEP = STEP_BYTES // 2
"""Elements of K per step of an adapter, whose numbers have two bytes."""
SHARED_BYTES = 48 << 10
"""Shared memory that a kernel may have without asking the driver for more."""
_MOST_EXACT = 1 << 16
"""Products of bytes that fit a 32-bit sum."""
_MOST_STAGES = 8
_INDEX_BYTES = 8  # of shared memory for each expert
_WIDE = 8192  # weight rows from which tiles of a few rows of x still occupy all processors with 64 weight rows each
_EXPERT_ROWS = 16  # tokens for whose rows of experts a launch has groups
_LINEARS = frozenset({"linear", "linear_quant", "expert_linear", "expert_linear_quant"})


@dataclass(frozen=True)
class TensorLayer:
    """The operands of a layer.

    dtype: of x: bf16, f16 or i8. bits: width of a weight number. asymmetric: whether groups have zero points. length:
    elements per scale; 0 without scales. experts: number of weights, one after another; 0 for a layer with one.
    rows, parts: of each weight, and those of a gated layer, which are two.
    """

    width: int
    dtype: str
    bits: int
    asymmetric: bool = False
    length: int = 0
    experts: int = 0
    rows: int = 0
    parts: int = 1

    @property
    def step(self) -> int:
        """Elements of K per step."""
        return STEP_BYTES if self.dtype == "i8" else STEP_BYTES // 2

    @property
    def steps(self) -> int:
        return self.width // self.step

    @property
    def grouped(self) -> bool:
        """Whether sums are scaled before a row ends, so that each has a chain and a total."""
        return 0 < self.length < self.width

    @property
    def weight_step_bytes(self) -> int:
        return self.step * self.bits // 8


@dataclass(frozen=True)
class Form:
    """How a group computes tiles of x rows that share a weight, if these are more than `above` and up to `most`.

    fragments, tiles: of 16 weight rows and of 8 rows of x, for each warp. across, below: warps along both.
    """

    above: int
    most: int
    fragments: int
    tiles: int
    across: int
    below: int

    @property
    def weight_rows(self) -> int:
        """Weight rows of a group."""
        return self.across * self.fragments * MATRIX_ROWS

    @property
    def x_rows(self) -> int:
        """Rows of x of a group."""
        return self.below * self.tiles * MATRIX_COLUMNS

    def stages(self, layer: TensorLayer) -> int:
        """Steps that shared memory holds at a time."""
        return max(3, min(_MOST_STAGES, (SHARED_BYTES - _INDEX_BYTES * layer.experts) // self._step_bytes(layer)))

    def shared_bytes(self, layer: TensorLayer) -> int:
        return self.stages(layer) * self._step_bytes(layer)

    def _step_bytes(self, layer: TensorLayer) -> int:
        return self.weight_rows * layer.weight_step_bytes + self.x_rows * STEP_BYTES


_MOST = (1 << 31) - 1
_SOME_ROWS = 64


def forms(layer: TensorLayer) -> tuple[Form, ...]:
    """The forms for more than a few rows, which every number of rows has one of.

    A warp with 64 weight rows and 64 rows of x reads little of shared memory per product. With scale groups it has half
    of that, since each sum takes two registers.
    """
    tall = Form(FEW_ROWS, _MOST, 2, 8, across=4, below=1)
    if layer.experts:
        return (tall,)
    some = Form(FEW_ROWS, _SOME_ROWS, max(layer.parts, 2 if layer.rows >= _WIDE else 1), 4, across=2, below=2)
    many = tall if layer.grouped else Form(FEW_ROWS, _MOST, 4, 8, across=2, below=2)
    return some, Form(_SOME_ROWS, _MOST, many.fragments, many.tiles, many.across, many.below)


def tensor_layer(spec: KernelSpec) -> TensorLayer | None:
    """The layer on tensor cores; None if it needs plain multiply-adds."""
    p = spec.as_dict()
    if spec.op not in _LINEARS:
        return None
    width, dtype = int(p["k"]), str(p["act_dtype"])
    experts, rows, parts = int(p.get("experts", 0)), int(p["n"]), 2 if p["gated"] else 1
    if not spec.op.endswith("_quant"):
        layer = TensorLayer(width, dtype, 16, experts=experts, rows=rows, parts=parts)
        if dtype not in HALVES or p["weight_dtype"] != dtype:
            return None
    else:
        format = format_of_kernel(p)
        if not isinstance(format, Integers) or dtype not in (*HALVES, "i8"):
            return None
        length = width if format.scales(width) == 1 else format.group_size
        bits = stored_bits(format.bits)
        layer = TensorLayer(width, dtype, bits, format.asymmetric, length, experts, rows, parts)
        if length % layer.step or (dtype == "i8" and length > _MOST_EXACT):
            return None
    return None if width % layer.step else layer


def launch_tiles(layer: TensorLayer, top_k: int) -> tuple[int, int]:
    """(groups, rows of x that they are for). top_k: experts of a row.

    More groups than a large tile needs, so that few rows occupy many groups; large graphs have few that are idle.
    """
    if layer.experts:
        return top_k * -(-layer.rows // (WARPS * MATRIX_ROWS)), _EXPERT_ROWS
    return -(-layer.rows // (2 * MATRIX_ROWS)), 4 * forms(layer)[-1].x_rows


_ADAPTER_ROWS = 4  # tokens for whose tile a launch has groups


def shrinks_on_tensor_cores(spec: KernelSpec) -> bool:
    """Whether this is an adapter's first product, of a kind that tensor cores compute."""
    p = spec.as_dict()
    return spec.op == "adapter_shrink" and p["act_dtype"] in HALVES and int(p["k"]) % ADAPTER_STEP == 0


def shrink_tiles(spec: KernelSpec) -> tuple[int, int]:
    """(groups, rows of x that they are for)."""
    p = spec.as_dict()
    parts = len(str(p["parts"]).split())
    return parts * -(-int(p["width"]) // (parts * MATRIX_ROWS)), _ADAPTER_ROWS
