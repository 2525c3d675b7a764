"""BERT's tokenizer: words cut into the longest pieces from the left, those behind the first marked."""

from __future__ import annotations

from typing import Any

from llmc.models.errors import ModelError
from llmc.models.tokenizers.added import added_tokens
from llmc.models.tokenizers.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

_INNER = "##"
_MOST_CHARACTERS = 100  # of a word: a longer one is the unknown token


def word_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json without what surrounds a text; pieces inside of words begin with ##. Letters become small, and
    lose their accents, where no piece has a capital. Raises ModelError."""
    unknown = vocabulary.unknown
    if unknown is None:
        unknown = next((token for token, text in enumerate(vocabulary.texts) if text == "[UNK]"), None)
    if unknown is None:
        raise ModelError(f"{vocabulary.origin} has no unknown token; take a file that a converter wrote whole")
    plain = (
        text
        for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True)
        if kind not in (CONTROL, UNKNOWN, USER_DEFINED) and not is_whole(text)
    )
    lower = all(text == text.lower() for text in plain)
    return {
        "added_tokens": added_tokens(vocabulary),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _INNER, "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": vocabulary.texts[unknown], "continuing_subword_prefix": _INNER,
            "max_input_chars_per_word": _MOST_CHARACTERS, "vocab": vocabulary.ids(),
        },
    }  # fmt: skip


def is_whole(text: str) -> bool:
    """Whether a token is one in brackets, which is no piece of words."""
    return text.startswith("[") and text.endswith("]")
