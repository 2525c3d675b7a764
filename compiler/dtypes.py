"""The dtypes of compiled models: names, codes and sizes in one table. Imports neither torch nor tvm."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.graphs_format import DTYPE_BYTES
from llmc.graphs_format import DTYPES as NAMES


@dataclass(frozen=True)
class Dtype:
    """name: in FORMAT.md and kernel specs. long_name: in numpy, torch and TVM. code: in graphs.bin."""

    name: str
    long_name: str
    code: int
    item_bytes: int

    @property
    def per_word(self) -> int:
        """Elements in a 4-byte word of a packed tensor."""
        return 4 // self.item_bytes

    @property
    def safetensors(self) -> str:
        """The name in a safetensors header."""
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
"""Possible dtypes of activations and of unquantized weights."""
HALVES = tuple(name for name, dtype in FLOATS.items() if dtype.per_word == 2)
"""16-bit floats: widened to float32 in registers, rounded to nearest even when stored."""
FLOATS_BY_LONG_NAME = {dtype.long_name: dtype for dtype in FLOATS.values()}
