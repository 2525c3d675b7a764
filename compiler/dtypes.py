"""The dtypes of compiled models: the one table of their names, codes and sizes. Imports neither torch nor tvm."""

from __future__ import annotations

from dataclasses import dataclass


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


F32 = Dtype("f32", "float32", 0, 4)
BF16 = Dtype("bf16", "bfloat16", 1, 2)
U8 = Dtype("u8", "uint8", 4, 1)
I32 = Dtype("i32", "int32", 5, 4)

DTYPES = {dtype.name: dtype for dtype in (F32, BF16, U8, I32)}
BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}
FLOATS = {dtype.name: dtype for dtype in (F32, BF16)}
"""What activations, the KV cache and weights that are not quantized may be."""
FLOATS_BY_LONG_NAME = {dtype.long_name: dtype for dtype in FLOATS.values()}
