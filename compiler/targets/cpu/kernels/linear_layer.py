"""What a linear kernel of floats is of: its shape, its weight's parts, its row tiles."""

from __future__ import annotations

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.sums import GATED, GatedOutput
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    p = spec.as_dict()
    return ("x", "w", *(["bias"] if p["bias"] else []), *(["residual"] if p["residual"] else []), "y")


class LinearLayer:
    """The spec of a `linear` kernel and what follows from it.

    parts: of the weight, gate's and up's, each `panels` of `columns`, which cover `width` columns of y. words: of K,
    each `lanes` elements. rows: the scalar that counts valid rows. Raises KernelSpecError for what has no layout.
    """

    def __init__(self, spec: KernelSpec, target: Target) -> None:
        p = spec.as_dict()
        self.kdim, self.n, self.tile = int(p["k"]), int(p["n"]), int(p["row_tile"])
        self.act, self.bias, self.residual = str(p["act_dtype"]), bool(p["bias"]), bool(p["residual"])
        if p["weight_dtype"] != self.act:
            raise KernelSpecError(f"linear: weight_dtype {p['weight_dtype']!r} must equal act_dtype {self.act!r}")
        if p["gated"] not in GATED or (p["gated"] and (self.residual or self.n % 2)):
            raise KernelSpecError(f"linear: no layer of {self.n} columns is gated as {p['gated']!r}")
        self.spec, self.target, self.rows = spec, target, int(p["rows"])
        self.parts = 2 if p["gated"] else 1
        self.width = self.n // self.parts
        self.lanes = b.lanes_of(self.act)
        self.words = b.ceil_div(self.kdim, self.lanes)
        self.columns = target.panel_columns
        self.panels, self.vectors = b.ceil_div(self.width, self.columns), self.columns // b.WIDTH
        self.gate = GatedOutput(str(p["gated"]), self.width, self.tile, self.columns) if p["gated"] else None

    def buffer_dtypes(self) -> list[tuple[str, str]]:
        """Names and TIR dtypes of the kernel's buffers."""
        kinds = dict.fromkeys(("x", "w"), b.word_dtype(self.act)) | ({"y": self.gate.dtype()} if self.gate else {})
        return [(name, kinds.get(name, "float32")) for name in buffers(self.spec)]
