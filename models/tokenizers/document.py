"""The whole of a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmc.models.tokenizers.added import around
from llmc.models.tokenizers.vocabulary import Vocabulary


def whole(parts: Mapping[str, Any], vocabulary: Vocabulary, *, bos: bool, eos: bool) -> str:
    """parts: of `byte_level`, `bpe` or `unigram`. bos, eos: whether texts begin and end with these tokens."""
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        **parts,
        "post_processor": around(vocabulary, bos=bos, eos=eos),
    }
    return json.dumps(document, ensure_ascii=False)
