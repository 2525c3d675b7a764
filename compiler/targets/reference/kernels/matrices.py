"""Quantized matrices by kind of format: a new format brings its own class, or adds one to `matrix.py`."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.compiler.kernel_spec import KernelSpecError, Param
from llmc.compiler.targets.reference.kernels.matrix import (
    Affine,
    Codes,
    Floats8,
    IntegerMatrix,
    Integers,
    Matrix,
    Steps,
)
from llmc.quantize import WeightFormat
from llmc.quantize.formats.registry import format_of_kernel

KIND = "reference"
MATRICES: dict[str, type[Matrix]] = {
    "integers": Integers,
    "steps": Steps,
    "fp8": Floats8,
    "codes": Codes,
    "affine": Affine,
}


def matrix_of(p: Mapping[str, Param], width: int) -> Matrix:
    """The matrix that a kernel with these parameters reads. Raises KernelSpecError."""
    format = format_of_kernel(p)
    kind = _kind_of(format)
    if kind is None:
        raise KernelSpecError(f"no matrix of the reference target has weights of {format.record()}")
    return kind(format, width)


def multiplies(act_dtype: str, format: WeightFormat) -> bool:
    """Whether a matrix in `format` is multiplied by activations of `act_dtype`, or "i8"."""
    kind = _kind_of(format)
    return kind is not None and (act_dtype != "i8" or issubclass(kind, IntegerMatrix))


def _kind_of(format: WeightFormat) -> type[Matrix] | None:
    brought = format.templates.get(KIND)
    return MATRICES.get(format.kind) or (brought(format) if brought else None)
