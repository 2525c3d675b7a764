"""SentencePiece's replacement table as normalizer steps of tokenizer.json: NFKC, plus the differences.

The library's own reader of such tables works on whole graphemes and skips long ones, unlike SentencePiece.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.models.errors import ModelError

_MAX_ENTRIES, _MAX_KEY, _MOST_OTHERS = 1 << 20, 64, 1000
_BETWEEN = "\U0010ffff"
_KEPT = range(0x10FF00, 0x10FFFE)
"""Private characters that stand in for characters that NFKC must not change."""


def normalizer_steps(charsmap: bytes, origin: str) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """(normalizer steps, texts replaced in addition to NFKC).

    Raises ModelError for a table that is damaged or too far from NFKC. origin: the tokenizer's name in errors.
    """
    from tokenizers.normalizers import NFKC

    try:
        table = {key.decode(): value.decode() for key, value in _entries(charsmap).items()}
    except (ValueError, IndexError) as error:
        raise ModelError(f"{origin}: its table of replacements is damaged ({error}); download it again") from None

    def nfkc(texts: list[str]) -> list[str]:
        # All at once: nothing composes with a private character.
        return NFKC().normalize_str(_BETWEEN.join(texts)).split(_BETWEEN)

    others = {
        key: value for (key, value), by_nfkc in zip(table.items(), nfkc([*table]), strict=True) if by_nfkc != value
    }
    singles = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000 and chr(code) != _BETWEEN]
    kept = [text for text, by_nfkc in zip(singles, nfkc(singles), strict=True) if by_nfkc != text and text not in table]
    made = sorted(set(others.values()))
    is_stable = nfkc(made) == made and not any(key in value for key in others for value in made)
    if len(others) > _MOST_OTHERS or len(kept) > len(_KEPT) or not is_stable:
        raise ModelError(
            f"{origin}: its table of replacements differs from NFKC in {len(others) + len(kept)} places, more than a "
            "tokenizer.json can hold; compile with --no-tokenizer an artifact that takes token ids alone"
        )
    by_value: dict[str, list[str]] = defaultdict(list)
    for key, value in others.items():
        by_value[value].append(key)
    away = [_replace({"String": text}, chr(code)) for text, code in zip(kept, _KEPT, strict=False)]
    back = [_replace({"String": chr(code)}, text) for text, code in zip(kept, _KEPT, strict=False)]
    replaced = [_replace({"Regex": _any_of(by_value[value])}, value) for value in sorted(by_value)]
    return [*away, *replaced, {"type": "NFKC"}, *back], frozenset(others)


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _any_of(texts: list[str]) -> str:
    """A regular expression that matches the texts, longest first."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return "|".join("".join(f"\\x{{{ord(letter):X}}}" for letter in text) for text in ordered)


def _entries(charsmap: bytes) -> dict[bytes, bytes]:
    """The replacements: a double-array trie of keys, whose leaves are offsets into a list of values."""
    size = int.from_bytes(charsmap[:4], "little")
    if size % 4 or not 4 <= size <= len(charsmap) - 4:
        raise ValueError(f"a trie of {size} bytes in a table of {len(charsmap)}")
    units, values = np.frombuffer(charsmap, "<u4", size // 4, 4), charsmap[4 + size :]
    nodes, keys = _children(units, np.array([_offsets(units[:1])[0]]), np.array([0])), [b""]
    found: dict[bytes, bytes] = {}
    while len(nodes[0]):
        parents, letters, places, leaves = nodes
        keys = [keys[parent] + bytes([letter]) for parent, letter in zip(parents, letters, strict=True)]
        for i in np.nonzero(leaves)[0]:
            begin = int(units[places[i]]) & 0x7FFFFFFF
            found[keys[i]] = values[begin : values.index(b"\0", begin)]
        if len(keys[0]) > _MAX_KEY or len(keys) + len(found) > _MAX_ENTRIES:
            raise ValueError("it has no end")
        nodes = _children(units, places, np.arange(len(keys)))
    return found


_Ints = NDArray[np.int64]


def _offsets(units: NDArray[np.uint32]) -> _Ints:
    return ((units >> 10) << ((units & 512) >> 6)).astype(np.int64)


def _children(units: NDArray[np.uint32], places: _Ints, parents: _Ints) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """(parent, byte, position, whether a key ends) of every child of these nodes."""
    parts = []
    for letter in range(1, 256):
        at = places ^ letter
        inside = np.nonzero(at < len(units))[0]
        unit = units[at[inside]]
        is_child = (unit & np.uint32(0x800000FF)) == letter
        which, unit = inside[is_child], unit[is_child]
        ends = (unit >> 8 & 1).astype(np.int64)
        parts.append((parents[which], np.full(len(which), letter), at[which] ^ _offsets(unit), ends))
    parent, byte, place, end = (np.concatenate(column) for column in zip(*parts, strict=True))
    if len(place) and int(place.max()) >= len(units):
        raise ValueError("a node lies outside")
    return parent, byte, place, end
