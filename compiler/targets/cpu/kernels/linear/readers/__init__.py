"""Readers of packed weights: of floats by their dtype, of quantized ones by the kind of their format.

For a new format, add its reader to a file here and a line below.
"""

from collections.abc import Callable
from typing import Any

from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.readers import affine, codes
from llmc.compiler.targets.cpu.kernels.linear.readers.base import Reader
from llmc.compiler.targets.cpu.kernels.linear.readers.fives import FiveBits
from llmc.compiler.targets.cpu.kernels.linear.readers.floats import Bfloat16, Float32, Halves
from llmc.compiler.targets.cpu.kernels.linear.readers.fp8 import E4m3
from llmc.compiler.targets.cpu.kernels.linear.readers.nibbles import FourBits
from llmc.compiler.targets.cpu.kernels.linear.readers.numbers import EightBits
from llmc.compiler.targets.cpu.kernels.linear.readers.sixes import SixBits
from llmc.compiler.targets.cpu.kernels.linear.readers.steps import Stepped
from llmc.quantize import WeightFormat

KIND = "cpu"
FLOATS: dict[str, type[Reader]] = {"f32": Float32, "bf16": Bfloat16, "f16": Halves}
_INTEGERS: dict[int, type[Reader]] = {8: EightBits, 6: SixBits, 5: FiveBits, 4: FourBits}
FORMATS: dict[str, Callable[[Any], type[Reader] | None]] = {
    "integers": lambda format: _INTEGERS.get(format.bits),
    "steps": lambda format: Stepped,
    "fp8": lambda format: E4m3,
    "codes": codes.reader,
    "affine": affine.reader,
}
"""Readers by kind of format, called with the format."""


def reader_of(p: Problem) -> type[Reader] | None:
    """The reader of a problem's weight; None if it has none."""
    return FLOATS.get(p.kind) if p.format is None else quantized_reader(p.format)


def quantized_reader(format: WeightFormat) -> type[Reader] | None:
    """The reader of a format; None if it has none."""
    found = FORMATS.get(format.kind) or format.templates.get(KIND)
    return None if found is None else found(format)
