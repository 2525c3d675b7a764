"""Quantized matrices by kind of format: a new format brings its own class, or adds one to `matrix.py`."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.compiler.kernel_spec import KernelSpecError, Param
from llmc.compiler.targets.reference.kernels.matrix import Affine, Codes, Floats8, Integers, Matrix, Steps
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
    brought = format.templates.get(KIND)
    kind = MATRICES.get(format.kind) or (brought(format) if brought else None)
    if kind is None:
        raise KernelSpecError(f"no matrix of the reference target has weights of {format.record()}")
    found: Matrix = kind(format, width)
    return found
