"""Bytes of single tokens, for logprobs; a token may hold a part of a character."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from llmc.manifest import read_listed

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Read from the tokenizer.json of `path`; without one every token is empty."""

    def __init__(self, path: Path) -> None:
        content = read_listed(path, "tokenizer.json")
        data = {} if content is None else json.loads(content.decode())
        vocabulary = data.get("model", {}).get("vocab", {})
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
        self._pieces: dict[int, str] = {token_id: piece for piece, token_id in pairs}
        self._added = {item["id"]: str(item["content"]) for item in data.get("added_tokens") or ()}
        self.special = frozenset(item["id"] for item in data.get("added_tokens") or () if item.get("special"))
        """Ids that decoding may leave out."""
        kinds = set(_decoder_kinds(data.get("decoder") or {}))
        self._byte_level = "ByteLevel" in kinds or "ByteLevel" in set(_decoder_kinds(data.get("pre_tokenizer") or {}))
        self._byte_fallback = "ByteFallback" in kinds

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, special tokens by their name; empty for an id that the tokenizer does not know."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._pieces.get(token_id, "")
        if self._byte_level:
            table = _byte_table()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
        if self._byte_fallback and (match := _BYTE_FALLBACK.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode("utf-8", "replace")

    def label(self, token_id: int) -> str:
        """The token as text. If it is a part of a character: `bytes:\xe2\x80`, as OpenAI writes it."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _decoder_kinds(node: dict[str, object]) -> list[str]:
    """Types of a decoder or pre-tokenizer, and of the members of a sequence."""
    children = [node.get("decoders"), node.get("pretokenizers")]
    nested = [kind for child in children if isinstance(child, list) for item in child for kind in _decoder_kinds(item)]
    return [str(node.get("type")), *nested]


@functools.cache
def _byte_table() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
