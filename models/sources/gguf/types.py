"""Tensor types of GGUF by code: those that are read, and those that are merely known."""

from __future__ import annotations

from dataclasses import dataclass

QK_K = 256
"""Elements in a block of the K types."""


@dataclass(frozen=True)
class StoredType:
    """elements: per block. nbytes: per block. scales: byte offsets of f16 scales in a block. power: offset of a power
    of two in a byte, with bias 127; 255 is NaN; None if there is none."""

    name: str
    elements: int
    nbytes: int
    scales: tuple[int, ...] = ()
    power: int | None = None

    def row_bytes(self, columns: int) -> int:
        return columns // self.elements * self.nbytes


READ: dict[int, StoredType] = {
    0: StoredType("F32", 1, 4),
    1: StoredType("F16", 1, 2),
    30: StoredType("BF16", 1, 2),
    2: StoredType("Q4_0", 32, 18, (0,)),
    3: StoredType("Q4_1", 32, 20, (0, 2)),
    6: StoredType("Q5_0", 32, 22, (0,)),
    7: StoredType("Q5_1", 32, 24, (0, 2)),
    8: StoredType("Q8_0", 32, 34, (0,)),
    10: StoredType("Q2_K", QK_K, 84, (80, 82)),
    11: StoredType("Q3_K", QK_K, 110, (108,)),
    12: StoredType("Q4_K", QK_K, 144, (0, 2)),
    13: StoredType("Q5_K", QK_K, 176, (0, 2)),
    14: StoredType("Q6_K", QK_K, 210, (208,)),
    20: StoredType("IQ4_NL", 32, 18, (0,)),
    23: StoredType("IQ4_XS", QK_K, 136, (0,)),
    39: StoredType("MXFP4", 32, 17, power=0),
}
"""Readable types, by code."""

_KNOWN = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


def type_name(code: int) -> str:
    """llama.cpp's name for a type; its number if unknown."""
    return READ[code].name if code in READ else _KNOWN.get(code, str(code))
