"""Number formats of the KV cache: names, codes and bytes, for compiler and runtime."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.graphs_format import DTYPE_BYTES, DTYPES

SCALE_BYTES = 4
"""Bytes of the float32 scale per token and KV head, one for keys and one for values."""
LATENT_SCALES = 2
"""Scales of a latent key: of the latent vector, then of the rotated part, whose range is another."""


@dataclass(frozen=True)
class KvDtype:
    """name: as in manifests, kernel specs and flags. code: in graphs.bin. largest: largest number of a format with
    scales; None: it has no scales."""

    name: str
    code: int
    largest: float | None = None

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.code]

    @property
    def per_word(self) -> int:
        """Elements per word of 4 bytes."""
        return 4 // self.item_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale for one token and KV head."""
        return 0 if self.largest is None else SCALE_BYTES


def _dtype(name: str, code: str, largest: float | None = None) -> KvDtype:
    return KvDtype(name, DTYPES.index(code), largest)


KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        _dtype("f32", "f32"),
        _dtype("bf16", "bf16"),
        _dtype("f16", "f16"),
        _dtype("int8", "i8", 127.0),
        _dtype("fp8_e4m3", "fp8_e4m3", 448.0),
        _dtype("fp8_e5m2", "fp8_e5m2", 57344.0),
    )
}
BY_CODE = {dtype.code: dtype for dtype in KV_DTYPES.values()}


def kv_block_bytes(
    dtype: str, num_kv_heads: int, block_size: int, key_width: int, value_width: int, key_scales: int = 1
) -> tuple[int, int]:
    """(bytes of the keys, bytes of the values) in one KV block of one layer. Widths: elements of a key and of a value.
    key_scales: per token and head, in a format with scales."""
    kv, rows = KV_DTYPES[dtype], num_kv_heads * block_size
    keys = key_width * kv.item_bytes + key_scales * kv.scale_bytes
    return rows * keys, rows * (value_width * kv.item_bytes + kv.scale_bytes)
