"""Adjusts scores before the softmax as some models require: first a cap, then a bias by the key's position."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpecError, Param
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import alibi, elementary

LOG2E = math.log2(math.e)
"""Weights are powers of two with exponent LOG2E · score."""


class Shaping:
    """The score adjustments of a model. query_factor: multiplies queries beforehand."""

    def __init__(self, params: Mapping[str, Param]) -> None:
        self._scale = float(params["scale"])
        self._cap, self._bias = float(params.get("score_cap", 0.0)), str(params.get("bias", ""))
        if self._bias not in ("", "distance", "rounded"):
            raise KernelSpecError(f"paged_attention: bias {self._bias!r} is neither distance nor rounded")
        self.query_factor = self._scale / self._cap if self._cap else self._scale * LOG2E

    def helpers(self) -> str:
        return (elementary.tanh() if self._cap else "") + (alibi.helpers() if self._bias else "")

    def allocate(self, rows: int) -> None:
        """Allocates stack memory."""
        if self._bias:
            self._slopes = b.Vectors(rows)

    def prepare_row(self, k: b.Kernel, row: b.Expr, head: b.Expr) -> None:
        """Keeps the slope of a row, which depends on its head `head`."""
        if self._bias:
            slope = b.splat(k["slopes"][head])
            rounded = self._bias == "rounded"
            self._slopes[row] = b.call("to_bf16", slope) if rounded else b.call("mul", slope, b.splat(LOG2E))

    def shaped(
        self, products: b.Vectors, rows: int, vectors: int, row0: b.Expr, key: b.Expr, positions: b.Expr
    ) -> b.Vectors:
        """Scores from products of scaled queries and keys.

        Rows row0 onwards, at `positions`; `vectors` vectors of keys each, from `key` on.
        """
        if not self._cap and not self._bias:
            return products
        # In memory, for a loop: unrolled code for all vectors would be long.
        scores = b.Vectors(rows * vectors)
        for i in range(rows * vectors):
            scores[i] = products[i]
        with T.serial(rows * vectors) as i:
            if self._cap:
                scores[i] = b.call("mul", b.call("tanh", scores[i]), b.splat(self._cap * LOG2E))
            if self._bias:
                row, first = b.let(row0 + T.truncdiv(i, vectors)), b.let(key + T.truncmod(i, vectors) * b.WIDTH)
                if self._bias == "distance":
                    scores[i] = b.call("biased", scores[i], self._slopes[row], first, positions[row])
                else:
                    gain = b.splat(self._scale * LOG2E)
                    scores[i] = b.call("biased_rounded", scores[i], self._slopes[row], first, gain)
        return scores
