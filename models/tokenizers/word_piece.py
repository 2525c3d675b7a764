"""BERT's tokenizer: splits words into the longest pieces from the left; pieces after the first are marked."""

from __future__ import annotations

from typing import Any

from llmc.models.errors import ModelError
from llmc.models.tokenizers.added import added_tokens
from llmc.models.tokenizers.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

_INNER = "##"
_MOST_CHARACTERS = 100  # longer words become the unknown token


def word_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json without the tokens around a text; pieces inside words begin with ##. Text is lower-cased and loses
    accents if no piece has a capital. Raises ModelError."""
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
    """Whether a token is in brackets, and thus not a piece of words."""
    return text.startswith("[") and text.endswith("]")
