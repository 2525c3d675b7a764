"""What a shared library wants of others: its table of dynamic symbols (System V ABI, ELF-64, little endian)."""

from __future__ import annotations

import struct

_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_DYNSYM = 11
_UNDEFINED = 0
_GLOBAL = 1


def undefined_symbols(library: bytes) -> set[str]:
    """The names that something else must define; not weak ones, which may be missing."""
    (sections_at,) = struct.unpack_from("<Q", library, 40)
    entry_size, count = struct.unpack_from("<HH", library, 58)
    sections = [_SECTION.unpack_from(library, sections_at + i * entry_size) for i in range(count)]
    found = set()
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind == _DYNSYM:
            names = sections[link][4]
            for name, info, _, section, _, _ in _SYMBOL.iter_unpack(library[offset : offset + size]):
                if name and section == _UNDEFINED and info >> 4 == _GLOBAL:
                    start = names + name
                    found.add(library[start : library.index(b"\0", start)].decode())
    return found
