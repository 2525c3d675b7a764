"""What becomes of a score before the softmax where a model asks for it: a cap."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import Param
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import elementary

LOG2E = math.log2(math.e)
"""Scores are powers of two's: those of e times this."""


class Shaping:
    """query_factor: what queries are multiplied by beforehand."""

    def __init__(self, params: Mapping[str, Param]) -> None:
        scale = float(params["scale"])
        self._cap = float(params.get("score_cap", 0.0))
        self.query_factor = scale / self._cap if self._cap else scale * LOG2E

    def helpers(self) -> str:
        return elementary.tanh() if self._cap else ""

    def shaped(self, scores: b.Vectors, rows: int, vectors: int) -> b.Vectors:
        """Of products of scaled queries and keys, `vectors` of each of the rows, the scores."""
        if not self._cap:
            return scores
        # In memory, for a loop: unrolled, the code of all vectors is long.
        made = b.Vectors(rows * vectors)
        for i in range(rows * vectors):
            made[i] = scores[i]
        with T.serial(rows * vectors) as i:
            made[i] = b.call("mul", b.call("tanh", made[i]), b.splat(self._cap * LOG2E))
        return made
