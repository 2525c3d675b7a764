"""Micro-kernels, in order of preference. A problem takes the first one that suits it and for whose operands its weight
has a reader. For a new instruction set, add a file here and a line below."""

from llmc.compiler.targets.cpu.kernels.linear.micro.amx import AmxBf16, AmxInt8, TileRegisters
from llmc.compiler.targets.cpu.kernels.linear.micro.base import MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.micro.dot_bf16 import DotBf16
from llmc.compiler.targets.cpu.kernels.linear.micro.dot_numbers import DotNumbers
from llmc.compiler.targets.cpu.kernels.linear.micro.dot_s16 import DotS16
from llmc.compiler.targets.cpu.kernels.linear.micro.dot_u8s8 import DotU8S8
from llmc.compiler.targets.cpu.kernels.linear.micro.fma import Fma

MICRO_KERNELS: tuple[type[MicroKernel], ...] = (DotU8S8, DotBf16, DotNumbers, DotS16, Fma)
TILE_KERNELS: tuple[type[TileRegisters], ...] = (AmxBf16, AmxInt8)
"""Micro-kernels in tile registers, for rows that they suit; vectors compute the others."""
