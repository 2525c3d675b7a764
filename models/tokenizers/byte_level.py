"""Byte-level BPE: merges bytes of pieces that regular expressions split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmc.models.tokenizers.added import added_tokens
from llmc.models.tokenizers.pre_tokenizers import PreTokenizer
from llmc.models.tokenizers.vocabulary import Vocabulary

_PLAIN = frozenset((*range(33, 127), *range(161, 173), *range(174, 256)))
_OTHERS = iter(range(256, 512))
BYTE_LETTERS = tuple(chr(byte if byte in _PLAIN else next(_OTHERS)) for byte in range(256))
"""The letter for each byte in a vocabulary, as in GPT-2."""


def byte_level(vocabulary: Vocabulary, pre: PreTokenizer, merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    """tokenizer.json without the tokens around a text. merges: pairs in merge order."""
    cuts = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in pre.expressions
    ]
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "added_tokens": added_tokens(vocabulary),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, bytes_level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary.ids(),
            "merges": list(map(list, merges)),
        },
    }
