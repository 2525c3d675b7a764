"""Linear layers that run on tensor cores. Imports no tvm.

A layer uses one kernel for every number of rows, so that its sums have one order.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.compiler.dtypes import HALVES
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.padding import stored_bits
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.base import WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import format_of_kernel

ITEMS = 128
"""Work items per group: four warps. Two such groups fit a processor, with all registers that items can have."""
WARP = 32
WARPS = ITEMS // WARP
MATRIX_ROWS, MATRIX_COLUMNS = 16, 8
"""Rows of the weight, and of x, per product."""
STEP_BYTES = 64
"""Bytes of a row of x multiplied between two waits; four lanes read 16 bytes each."""
ADAPTER_STEP = STEP_BYTES // 2
"""Elements of K per step of an adapter, whose numbers have two bytes."""
_MOST_EXACT = 1 << 16
"""Products of bytes that fit a 32-bit sum."""
INTEGERS, E4M3, E2M1, IQ4_NL = "integers", "e4m3", "e2m1", "iq4_nl"
"""Numbers of quantized weights: floats are those of OCP, and codes those of llama.cpp's table."""
SPAN = 128
"""Elements of K whose short scale groups are added up before they join a total."""
_SHORT = (STEP_BYTES // 4, STEP_BYTES // 2)  # elements of a product, and of a step
_NORMED = frozenset({"normed_linear", "normed_linear_quant"})
_LINEARS = frozenset({"linear", "linear_quant", "expert_linear", "expert_linear_quant"}) | _NORMED


@dataclass(frozen=True)
class TensorLayer:
    """The operands of a layer.

    dtype: of x: bf16, f16 or i8. bits: width of a weight number. asymmetric: whether groups have zero points. length:
    elements per scale, or of a span of short groups; 0 without scales. experts: number of weights, one after another; 0
    for a layer with one. rows, parts: of each weight, and those of a gated layer, which are two. top_k: experts of a
    row of x, or 1. numbers: what those of a quantized weight are. short: elements of a short group, which has a product
    or a step; 0 without them. offsets: whether short groups have offsets, times which the sum of x is subtracted.
    normed: whether x is one row of float32, which the layer norms itself.
    """

    width: int
    dtype: str
    bits: int
    asymmetric: bool = False
    length: int = 0
    experts: int = 0
    rows: int = 0
    parts: int = 1
    top_k: int = 1
    numbers: str = INTEGERS
    short: int = 0
    offsets: bool = False
    normed: bool = False

    @property
    def step(self) -> int:
        """Elements of K per step."""
        return STEP_BYTES if self.dtype == "i8" else STEP_BYTES // 2

    @property
    def steps(self) -> int:
        return self.width // self.step

    @property
    def columns(self) -> int:
        """Columns of the result, of one weight."""
        return self.rows // self.parts

    @property
    def group_steps(self) -> int:
        """Steps of a scale group, or of a row without groups."""
        return self.length // self.step if self.grouped else self.steps

    @property
    def grouped(self) -> bool:
        """Whether sums are scaled before a row ends, so that each has a chain and a total."""
        return self.short > 0 or 0 < self.length < self.width

    @property
    def halved(self) -> bool:
        """Whether each of the two products of a step has a scale group of its own, and so half of the step."""
        return 0 < self.short < self.step

    @property
    def step_groups(self) -> int:
        """Short groups of a step."""
        return self.step // self.short

    @property
    def weight_step_bytes(self) -> int:
        return self.step * self.bits // 8

    @property
    def row_bytes(self) -> int:
        """Of the normed row in shared memory: numbers, and behind those of int8 a scale and a sum per scale group."""
        beside = 4 * (1 + -(-self.steps // self.group_steps)) if self.dtype == "i8" else 0
        return self.steps * STEP_BYTES + beside if self.normed else 0


def tensor_layer(spec: KernelSpec) -> TensorLayer | None:
    """The layer on tensor cores; None if it needs plain multiply-adds."""
    found = _judged(spec) if spec.op in _LINEARS else ""
    return found if isinstance(found, TensorLayer) else None


def refusal(spec: KernelSpec) -> str | None:
    """Why a linear layer needs plain multiply-adds; None if it does not, and for any other kernel."""
    found = _judged(spec) if spec.op in _LINEARS else None
    return found if isinstance(found, str) else None


def _judged(spec: KernelSpec) -> TensorLayer | str:
    """A linear layer on tensor cores, or why it has none: all of one reason have one sentence."""
    p = spec.as_dict()
    width, dtype = int(p["k"]), str(p["act_dtype"])
    experts, top_k = int(p.get("experts", 0)), int(p.get("top_k", 1))
    rows, parts, normed = int(p["n"]), 2 if p["gated"] else 1, spec.op in _NORMED
    if not spec.op.endswith("_quant"):
        layer = TensorLayer(width, dtype, 16, experts=experts, rows=rows, parts=parts, top_k=top_k, normed=normed)
        if dtype not in HALVES:
            return f"activations are {dtype}, and tensor cores multiply bf16, f16 and int8"
        if p["weight_dtype"] != dtype:
            return f"the weight is {p['weight_dtype']} and activations are {dtype}, which tensor cores do not mix"
    else:
        format = format_of_kernel(p)
        numbers = _numbers_of(format)
        if dtype not in (*HALVES, "i8"):
            return f"activations are {dtype}, and tensor cores multiply bf16, f16 and int8"
        if numbers is None:
            return f"tensor cores have no kernel for weights of format {_name(format)}"
        if dtype == "i8" and not isinstance(format, Integers):
            return f"activations are int8, and weights of format {_name(format)} are no integers"
        bits, asymmetric = stored_bits(format.bits), isinstance(format, Integers) and format.asymmetric
        short, offsets = format.group_size if _is_short(format) else 0, isinstance(format, Affine) and format.offsets
        if short and short not in _SHORT:
            return f"scale groups of {short} numbers of format {_name(format)} are neither of 16 nor of 32"
        length = width if format.scales(width) == 1 else format.group_size
        length = SPAN if short else length
        layer = TensorLayer(
            width, dtype, bits, asymmetric, length, experts, rows, parts, top_k, numbers, short, offsets, normed
        )
        if length < width and length % layer.step:
            return f"scale groups of {length} numbers are no multiple of the {layer.step} that are multiplied at a time"
        if dtype == "i8" and length > _MOST_EXACT:
            return f"{length} products of int8 behind one scale may be too large for a 32-bit sum"
    if width % layer.step:
        return f"{width} columns are no multiple of the {layer.step} that are multiplied at a time"
    return layer


def _name(format: WeightFormat) -> str:
    table = getattr(format, "table", "")
    return f"{format.kind} ({table})" if table else format.kind


def _numbers_of(format: WeightFormat) -> str | None:
    """What numbers of a format are; None of one whose numbers halves do not have."""
    if isinstance(format, Integers):
        return INTEGERS
    if isinstance(format, Fp8):
        return E4M3
    if not isinstance(format, Affine | Codes):
        return None
    if not format.table:
        return INTEGERS
    return format.table if format.table in (E2M1, IQ4_NL) else None


def _is_short(format: WeightFormat) -> bool:
    """Whether sums have spans of short groups: with steps or offsets, in groups of a product, or of GGUF's codes."""
    return isinstance(format, Affine) or (
        isinstance(format, Codes)
        and format.scale_kind != E8M0
        and (format.table == IQ4_NL or format.group_size == _SHORT[0])
    )


_ADAPTER_ROWS = 4  # tokens for whose tile a launch has groups


def shrinks_on_tensor_cores(spec: KernelSpec) -> bool:
    """Whether this is an adapter's first product, of a kind that tensor cores compute."""
    p = spec.as_dict()
    of_halves = p.get("act_dtype") in HALVES and "heads" not in p  # heads have float32 rows
    return spec.op == "adapter_shrink" and of_halves and int(p["k"]) % ADAPTER_STEP == 0


def shrink_tiles(spec: KernelSpec) -> tuple[int, int]:
    """(groups, rows of x that they are for)."""
    p = spec.as_dict()
    parts = len(str(p["parts"]).split())
    blocks = parts * -(-int(p["width"]) // (parts * MATRIX_ROWS))
    # Each expert of a row has a tile.
    return (blocks * int(p["top_k"]), 1) if "experts" in p else (blocks, _ADAPTER_ROWS)
