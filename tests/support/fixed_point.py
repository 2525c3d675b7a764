"""bf16 activations as the kernels of a CPU without products of bf16 multiply them, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.kernels.linear.problem import LINE
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec, problem_of
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize import WeightFormat


def fixed_point(x: NDArray[Any], size: int) -> NDArray[np.float64]:
    """Finite rows [R, K] in groups of `size` numbers: multiples of 2⁻¹⁴ of the power of two below the largest."""
    wide = x.astype(np.float64)
    found = np.zeros_like(wide)
    for first in range(0, wide.shape[1], size):
        group = wide[:, first : first + size]
        exponent = np.frexp(np.maximum(np.abs(group).max(1, keepdims=True), 2.0**-112))[1] - 1
        found[:, first : first + size] = np.ldexp(np.rint(np.ldexp(group, 14 - exponent)), exponent - 14)
    return found


def multiplied(x: NDArray[Any], act: str, format: WeightFormat, target: Target) -> NDArray[np.float64]:
    """What a linear layer of float activations multiplies by the values of its weight."""
    p = problem_of(linear_quant_spec(target.panel_columns, x.shape[1], 1, act, format), target)
    return fixed_point(x, p.group_lines * LINE) if p.fixed else x.astype(np.float64)
