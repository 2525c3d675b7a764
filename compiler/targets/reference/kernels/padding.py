"""What rows are padded to a multiple of, in elements. Imports no tvm."""

VALUES = 16
"""Rows of V in the KV cache."""
NUMBERS = 8
"""Quantized numbers of a row."""


def stored_bits(bits: int) -> int:
    """What a number of so many bits takes in a row: 4 or 8."""
    return 4 if bits == 4 else 8


def number_bytes(width: int, bits: int) -> int:
    """Bytes of a row of numbers: two of 4 bits a byte, the even one in its low half; of others one."""
    return -(-width // NUMBERS) * NUMBERS * stored_bits(bits) // 8
