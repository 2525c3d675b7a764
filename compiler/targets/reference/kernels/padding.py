"""What rows are padded to a multiple of, in elements. Imports no tvm."""

VALUES = 16
"""Rows of V in the KV cache."""
NUMBERS = 8
"""Quantized numbers of a row."""


def number_bytes(width: int, bits: int) -> int:
    """Bytes of a row of numbers: two of 4 bits a byte, the even one in its low half."""
    return -(-width // NUMBERS) * NUMBERS * bits // 8
