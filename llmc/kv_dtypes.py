"""What numbers of the KV cache may be: names, codes and bytes, for compiler and runtime alike."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.graphs_format import DTYPE_BYTES, DTYPES


@dataclass(frozen=True)
class KvDtype:
    """name: as users write it, in manifests and in kernel specs; code: in graphs.bin."""

    name: str
    code: int

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.code]

    @property
    def per_word(self) -> int:
        """Elements of a word of 4 bytes."""
        return 4 // self.item_bytes


def _dtype(name: str, code: str) -> KvDtype:
    return KvDtype(name, DTYPES.index(code))


KV_DTYPES = {dtype.name: dtype for dtype in (_dtype("f32", "f32"), _dtype("bf16", "bf16"), _dtype("f16", "f16"))}
BY_CODE = {dtype.code: dtype for dtype in KV_DTYPES.values()}


def kv_block_bytes(dtype: str, num_kv_heads: int, block_size: int, key_width: int, value_width: int) -> tuple[int, int]:
    """Bytes of the keys, and of the values, of one KV block of one layer; widths: elements of a key and of a value."""
    rows = num_kv_heads * block_size * KV_DTYPES[dtype].item_bytes
    return rows * key_width, rows * value_width
