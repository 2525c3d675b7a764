"""The dtypes of compiled models: the one table of their names, codes and sizes. Imports neither torch nor tvm."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.graphs_format import DTYPE_BYTES
from llmc.graphs_format import DTYPES as NAMES


@dataclass(frozen=True)
class Dtype:
    """name: in FORMAT.md and in kernel specs. long_name: of numpy, torch and TVM. code: in graphs.bin."""

    name: str
    long_name: str
    code: int
    item_bytes: int

    @property
    def per_word(self) -> int:
        """Elements of one 4-byte word of a packed tensor."""
        return 4 // self.item_bytes

    @property
    def safetensors(self) -> str:
        """The name in the header of a safetensors file."""
        return self.name.upper()


def _dtype(name: str, long_name: str) -> Dtype:
    code = NAMES.index(name)
    return Dtype(name, long_name, code, DTYPE_BYTES[code])


F32 = _dtype("f32", "float32")
BF16 = _dtype("bf16", "bfloat16")
F16 = _dtype("f16", "float16")
U8 = _dtype("u8", "uint8")
I32 = _dtype("i32", "int32")

DTYPES = {dtype.name: dtype for dtype in (F32, BF16, F16, U8, I32)}
BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}
FLOATS = {dtype.name: dtype for dtype in (F32, BF16, F16)}
"""What activations and weights that are not quantized may be."""
HALVES = tuple(name for name, dtype in FLOATS.items() if dtype.per_word == 2)
"""Floats of 16 bits: widened to float32 in registers, rounded to the nearest, ties to even, where they are stored."""
FLOATS_BY_LONG_NAME = {dtype.long_name: dtype for dtype in FLOATS.values()}
