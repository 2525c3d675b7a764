"""Assembles a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmc.models.tokenizers.added import around
from llmc.models.tokenizers.vocabulary import Vocabulary


def whole(parts: Mapping[str, Any], vocabulary: Vocabulary, *, bos: bool, eos: bool, between: int | None = None) -> str:
    """parts: from `byte_level`, `bpe`, `unigram` or `word_piece`. bos, eos: whether texts begin and end with these
    tokens. between: as in `around`."""
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        **parts,
        "post_processor": around(vocabulary, bos=bos, eos=eos, between=between),
    }
    return json.dumps(document, ensure_ascii=False)
