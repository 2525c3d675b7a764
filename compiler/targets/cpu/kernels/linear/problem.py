"""The problem of a linear kernel, with floats or quantized weights: parts and lines of the weight, and row tiles."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError, Param
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir.activations import ACTIVATIONS
from llmc.compiler.targets.cpu.kernels.linear.activated import DTYPES, ActivatedOutput
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize.formats.base import WeightFormat

LINE = 8
"""Elements of K in a line of a quantized weight."""
STEP_WORDS = 16
"""Words of K in one step of tile registers."""
TURN = 4
"""Lines per turn of a loop over lines of a quantized weight. If integers are summed, the lines of a group are a
multiple of it."""
_FIXED = 32
"""Most elements of K that fixed-point numbers share an exponent for."""
_MAX_K = 1 << 17  # 127 · 128 · K stays below 2³¹
_DTYPES = {"f32": "float32", "f16": "uint16", "u8": "uint8"}


def operand_names(spec: KernelSpec, planes: Iterable[str]) -> tuple[str, ...]:
    """Operands of a kernel in order. planes: planes of the weight."""
    p = spec.as_dict()
    return ("x", "w", *planes, *(name for name in ("bias", "residual") if p[name]), "y")


class Problem:
    """The spec of a kernel for a target, and what follows from it.

    activated: dtype of the packed result of a layer with an activation, which `activation` writes; empty: none.

    parts: of the weight (gate and up of a gated layer). Each part has `panels` panels of `columns` columns, which cover
    `width` columns of y. format: of a quantized weight. planes: what is stored beside its numbers. kind: of the format,
    or the float type of the weight. A panel is `lines` lines of `line` elements of K.

    groups: groups whose sums are merged, each of `group_lines` lines; one if a row has a single scale, whatever the
    groups of its numbers (`number_groups`). With fixed-point activations each group has its own exponent. grouped:
    whether sums are merged. scale_groups: groups of stored scales. asymmetric: zero points are stored. shifted: zero
    points or offsets are stored, so that sums of activations are needed.

    integer: activations are int8. fixed: bf16 activations become fixed-point numbers (`fixed_rows`). paired: they are
    multiplied in pairs by numbers converted to bf16 (`paired_rows`). copied: fixed or paired. A word of x has `lanes`
    elements, a row x_words words of K, with x_line words for each line of the weight; a row tile has tile_words in all.
    step_lines: lines per step of tile registers. exact: a result is one sum of integers, scaled.

    rows: the scalar with the number of valid rows. Raises KernelSpecError for a spec without layout.
    """

    def __init__(
        self,
        spec: KernelSpec,
        target: Target,
        format: WeightFormat | None,
        *,
        in_pairs: bool = False,
        in_bf16: bool = False,
    ) -> None:
        """in_pairs, in_bf16: whether numbers of the weight can become pairs of s16, or of bf16."""
        p = spec.as_dict()
        self.spec, self.target, self.format, self.quantized = spec, target, format, format is not None
        self.kdim, self.n, self.tile, self.rows = int(p["k"]), int(p["n"]), int(p["row_tile"]), int(p["rows"])
        self.act, gated = str(p["act_dtype"]), str(p["gated"])
        self.activated = gated or str(p.get("activated", ""))
        self.bias, self.residual = bool(p["bias"]), bool(p["residual"])
        self.kind = format.kind if format else self.act
        self.planes = {plane.name: plane for plane in format.planes(self.kdim)} if format else {}
        self.asymmetric = "zero" in self.planes
        self.shifted = self.asymmetric or "offset" in self.planes
        group_size = format.group_size if format else -1
        self._check(p, group_size)
        self.integer = self.quantized and self.act == "i8"
        # An instruction for bf16, or wider registers, serve floats as well.
        self.fixed = in_pairs and self.quantized and self.act == "bf16" and target.lanes == b.WIDTH // 2
        self.paired = in_bf16 and self.quantized and self.act == "bf16" and target.bf16_dot
        self.copied = self.fixed or self.paired
        self.lanes = 4 if self.integer else b.lanes_of(self.act)
        self.parts = 2 if gated else 1
        self.width = self.n // self.parts
        self.columns = target.panel_columns
        self.panels, self.vectors = b.ceil_div(self.width, self.columns), self.columns // b.WIDTH
        self.line = LINE if self.quantized else self.lanes
        self.lines, self.x_line = b.ceil_div(self.kdim, self.line), self.line // self.lanes
        self.step_lines = STEP_WORDS // self.x_line
        self.number_groups = 1 if group_size < 0 else b.ceil_div(self.kdim, group_size)
        self.number_group_lines = self.lines if self.number_groups == 1 else group_size // LINE
        self.groups = self.scale_groups = format.scales(self.kdim) if format else 1
        self.group_lines = self.lines if self.groups == 1 else self.number_group_lines
        if self.fixed:
            self.group_lines = (_FIXED if group_size < 0 else math.gcd(_FIXED, group_size)) // LINE
            self.groups = b.ceil_div(self.lines, self.group_lines)
        self.grouped = self.fixed or self.groups > 1
        # Elements past the last whole line: float activations end before them.
        self.tail = 0 if self.integer or self.copied or not self.quantized else self.kdim % LINE
        self.whole_lines = self.kdim // LINE if self.tail else self.lines
        self.x_words = 2 * self.lines if self.integer else b.ceil_div(self.kdim, self.lanes)
        self.tile_words = self.tile * (self.x_words + (1 + self.groups if self.integer else 0))
        self.exact = self.integer and self.groups == 1
        limit, gain = float(p.get("gate_limit", 0.0)), float(p.get("gate_gain", 1.0))
        self.activation = None
        if self.activated:
            name, of_tile = str(p.get("activation", "silu")), (self.width, self.tile, self.columns)
            self.activation = ActivatedOutput(self.activated, name, *of_tile, limit=limit, gain=gain)

    def _check(self, p: dict[str, Param], group_size: int) -> None:
        op = self.spec.op
        if not self.quantized and p["weight_dtype"] != self.act:
            raise KernelSpecError(f"linear: weight_dtype {p['weight_dtype']!r} must equal act_dtype {self.act!r}")
        unit = TURN * LINE if self.format and self.format.sums else LINE
        if self.quantized and (group_size == 0 or (group_size > 0 and group_size % unit)):
            raise KernelSpecError(f"linear_quant: {self.kind} in groups of {group_size} have no layout")
        if self.activated not in DTYPES or (self.activated and self.residual) or (p["gated"] and self.n % 2):
            raise KernelSpecError(f"{op}: no layer of {self.n} columns is activated as {self.activated!r}")
        if (activation := p.get("activation", "silu")) not in ACTIVATIONS:
            raise KernelSpecError(f"{op}: the activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.quantized and self.act == "i8" and self.kdim > _MAX_K:
            raise KernelSpecError(f"linear_quant: sums of {self.kdim} products of int8 may overflow; at most {_MAX_K}")

    def buffer_dtypes(self) -> list[tuple[str, str]]:
        """Names and TIR dtypes of the kernel's buffers."""
        x = "int32" if self.integer else b.word_dtype(self.act)
        kinds = {"x": x, "w": "int32" if self.quantized else x}
        kinds |= {name: _DTYPES[plane.dtype] for name, plane in self.planes.items()}
        kinds |= {"y": self.activation.dtype()} if self.activation else {}
        return [(name, kinds.get(name, "float32")) for name in operand_names(self.spec, self.planes)]

    def scale_group(self, group: b.Expr) -> b.Expr:
        """The scale group that contains a group of sums."""
        if not self.fixed:
            return group
        return T.truncdiv(group, b.ceil_div(self.number_group_lines, self.group_lines))

    def panel(self, part: b.Expr, unit: b.Expr) -> b.Expr:
        """Number of the weight's panel that is panel `unit` of a part."""
        return unit if self.parts == 1 else part * self.panels + unit

    def name(self, value: b.Expr) -> b.Expr:
        """The reverse of `let`: names a position that is used more than once. For lines of quantized weights TVM
        computes it once by itself."""
        return value if self.quantized else b.let(value)

    def let(self, value: b.Expr) -> b.Expr:
        """`b.let` for positions that TVM's simplifier would otherwise spoil: those in lines of quantized weights, not
        the short ones of floats."""
        return b.let(value) if self.quantized else value
