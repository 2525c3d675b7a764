"""LoRA adapter matrices, in Python and for the C ABI."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmc.runtime.binding import abi
from llmc.runtime.binding.artifact import AdapterLinear


@dataclasses.dataclass(frozen=True)
class AdapterMatrix:
    """A LoRA adapter's change of a part of a linear layer: scale · b a. Layer and part are numbered as in
    Artifact.adapter_linears.

    a: float32 [rank, columns]; b: float32 [rows, rank].
    """

    linear: int
    part: int
    scale: float
    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]


class NativeMatrices:
    """An array of llmc_adapter_matrix, valid while this object lives."""

    def __init__(self, matrices: Sequence[AdapterMatrix], linears: Sequence[AdapterLinear]) -> None:
        """Raises IndexError or ValueError for matrices that do not fit the artifact's layers."""
        native, kept = (abi.AdapterMatrix * len(matrices))(), []
        for to, matrix in zip(native, matrices, strict=True):
            a, b = (np.ascontiguousarray(part, dtype=np.float32) for part in (matrix.a, matrix.b))
            linear = linears[matrix.linear]
            sizes = (len(a), linear.columns), (linear.rows[matrix.part], len(a))
            if (a.shape, b.shape) != sizes:
                raise ValueError(f"a has shape {a.shape} and b {b.shape}; pass {sizes[0]} and {sizes[1]}")
            kept += [a, b]
            to.struct_size = ctypes.sizeof(abi.AdapterMatrix)
            to.linear, to.part, to.rank, to.scale = matrix.linear, matrix.part, len(a), matrix.scale
            to.a, to.b = a.ctypes.data_as(abi.F32P), b.ctypes.data_as(abi.F32P)
        self.array, self._kept = native, kept
