"""What a quantized linear kernel is of: its shape, its weight's groups, its row tiles."""

from __future__ import annotations

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.quant_weight import LINE, QuantWeight
from llmc.compiler.targets.cpu.kernels.sums import GATED
from llmc.compiler.targets.cpu.target import Target

TURN = 4
"""Lines of one turn of a loop over lines; those of a group are a multiple."""
STEP_LINES = 8
"""Lines of one step of AMX's tile registers."""
_MAX_K = 1 << 17  # 127 · 128 · K stays below 2³¹


class QuantLayer:
    """The spec of a `linear_quant` kernel and what follows from it.

    integer: activations are int8; a word of x has `lanes` of them. parts: of the weight, gate's and up's, each `panels`
    of `columns`. lines: of K, in `groups` of `group_lines` whose sums are merged; of a weight with steps there is one,
    whatever the groups of its numbers (`number_groups`). exact: a result is one sum of integers, scaled. Raises
    KernelSpecError for what has no layout.
    """

    def __init__(self, spec: KernelSpec, target: Target) -> None:
        p = spec.as_dict()
        self.kdim, self.n, self.tile, self.bits = int(p["k"]), int(p["n"]), int(p["row_tile"]), int(p["bits"])
        self.act, self.gated = str(p["act_dtype"]), str(p["gated"])
        self.bias, self.residual, self.asymmetric = bool(p["bias"]), bool(p["residual"]), bool(p["asymmetric"])
        group_size = int(p["group_size"])
        if self.bits not in (4, 8) or group_size == 0 or (group_size > 0 and group_size % (TURN * LINE)):
            raise KernelSpecError(f"linear_quant: {self.bits} bits in groups of {group_size} have no layout")
        self.steps = bool(p["steps"])
        if self.steps and (self.bits != 4 or self.act != "i8" or self.asymmetric):
            raise KernelSpecError(f"linear_quant: steps are of 4-bit numbers and int8 activations, not {p}")
        if self.gated not in GATED or (self.gated and (self.residual or self.n % 2)):
            raise KernelSpecError(f"linear_quant: no layer of {self.n} columns is gated as {self.gated!r}")
        self.integer = self.act == "i8"
        if self.integer and self.kdim > _MAX_K:
            raise KernelSpecError(f"linear_quant: sums of {self.kdim} products of int8 may overflow; at most {_MAX_K}")
        self.parts = 2 if self.gated else 1
        self.width = self.n // self.parts
        self.lanes = 4 if self.integer else b.lanes_of(self.act)
        self.columns = target.panel_columns
        self.panels, self.vectors = b.ceil_div(self.width, self.columns), self.columns // b.WIDTH
        self.lines = b.ceil_div(self.kdim, LINE)
        self.number_groups = 1 if group_size < 0 else b.ceil_div(self.kdim, group_size)
        self.number_group_lines = self.lines if self.number_groups == 1 else group_size // LINE
        self.groups = 1 if self.steps else self.number_groups
        self.group_lines = self.lines if self.groups == 1 else self.number_group_lines
        # Elements past the last whole line: float activations end there.
        self.tail = 0 if self.integer else self.kdim % LINE
        self.whole_lines = self.kdim // LINE if self.tail else self.lines
        self.x_words = 2 * self.lines if self.integer else b.ceil_div(self.kdim, self.lanes)
        self.exact = self.integer and self.groups == 1
        self.int8_dot = target.int8_dot
        self.tile_words = self.tile * (self.x_words + (1 + self.groups if self.integer else 0))

    def weight(self) -> QuantWeight:
        """How its weight is read."""
        return QuantWeight(
            self.bits,
            self.columns,
            self.lines,
            self.number_groups,
            self.number_group_lines,
            integer=self.integer,
            asymmetric=self.asymmetric,
            steps=self.steps,
        )

    def panel(self, part: b.Expr, unit: b.Expr) -> b.Expr:
        """Which panel of the weight is panel `unit` of a part."""
        return unit if self.parts == 1 else part * self.panels + unit
