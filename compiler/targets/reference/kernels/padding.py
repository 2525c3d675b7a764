"""Multiples to which rows are padded, in elements. Imports no tvm."""

VALUES = 16
"""Rows of V in the KV cache."""
NUMBERS = 8
"""Rows of quantized numbers."""


def stored_bits(bits: int) -> int:
    """Stored width of a `bits`-bit number: 4 or 8."""
    return 4 if bits == 4 else 8


def number_bytes(width: int, bits: int) -> int:
    """Bytes in a row of numbers: two 4-bit numbers a byte, the even one in its low half; others one a byte."""
    return -(-width // NUMBERS) * NUMBERS * stored_bits(bits) // 8
