"""Readers of packed weights by the name of a format (`Problem.format`).

A new format is a file here and a line below.
"""

from llmc.compiler.targets.cpu.kernels.linear.readers.base import Reader
from llmc.compiler.targets.cpu.kernels.linear.readers.floats import Bfloat16, Float32
from llmc.compiler.targets.cpu.kernels.linear.readers.nibbles import FourBits
from llmc.compiler.targets.cpu.kernels.linear.readers.numbers import EightBits
from llmc.compiler.targets.cpu.kernels.linear.readers.steps import Stepped

READERS: dict[str, type[Reader]] = {
    "f32": Float32,
    "bf16": Bfloat16,
    "q8": EightBits,
    "q4": FourBits,
    "steps": Stepped,
}
