"""Imports and exports of a shared library, from its dynamic symbols (System V ABI, ELF-64, little endian)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_DYNSYM = 11
_UNDEFINED = 0
_GLOBAL = 1


def undefined_symbols(library: bytes) -> set[str]:
    """Names that another library must define. Weak symbols are left out: they may be missing."""
    return {name for name, binding, section in _symbols(library) if section == _UNDEFINED and binding == _GLOBAL}


def defined_symbols(library: bytes) -> set[str]:
    """Names that the library defines for others."""
    return {name for name, _, section in _symbols(library) if section != _UNDEFINED}


def _symbols(library: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, binding and section of each symbol."""
    (sections_at,) = struct.unpack_from("<Q", library, 40)
    entry_size, count = struct.unpack_from("<HH", library, 58)
    sections = [_SECTION.unpack_from(library, sections_at + i * entry_size) for i in range(count)]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind == _DYNSYM:
            names = sections[link][4]
            for name, info, _, section, _, _ in _SYMBOL.iter_unpack(library[offset : offset + size]):
                if name:
                    start = names + name
                    yield library[start : library.index(b"\0", start)].decode(), info >> 4, section
