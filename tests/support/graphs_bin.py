"""Changed tables of artifacts."""

from __future__ import annotations

import random
import struct

from llmc import graphs_format
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.graphs_file import parse_graphs


def with_crc(data: bytearray) -> bytes:
    """The same with a checksum that fits."""
    struct.pack_into("<I", data, 28, graphs_format.tables_crc32(data))
    return bytes(data)


def poked(good: bytes, at: int, layout: str, value: int) -> bytes:
    """With another number at a place, in the layout of `struct`."""
    data = bytearray(good)
    struct.pack_into(f"<{layout}", data, at, value)
    return with_crc(data)


def check_random_changes(good: bytes) -> None:
    """They are read, or refused with FormatError."""
    rng, refused = random.Random(3), 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(24, len(data))] = rng.choice((0, 1, 127, 128, 255))
        try:
            tables = parse_graphs(with_crc(data))
        except FormatError:
            refused += 1
            continue
        assert tables.kv_block_bytes > 0
    assert 500 < refused < 2000
