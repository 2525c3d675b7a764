"""What every tokenizer.json has, of whatever model: tokens that are found before a text is cut, and those around it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llmc.models.tokenizers.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary


def added_tokens(vocabulary: Vocabulary, normalized: Collection[int] = ()) -> list[dict[str, Any]]:
    """Control tokens, which decoding leaves out, and those that a model's authors added.

    normalized: those of the latter that are found in the normalized text, not in the text as it is.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    found = []
    for token, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and text:
            late, special = token in normalized and kind == USER_DEFINED, kind != USER_DEFINED
            found.append({"id": token, "content": text, **flags, "normalized": late, "special": special})
    return found


def around(vocabulary: Vocabulary, *, bos: bool, eos: bool, between: int | None = None) -> dict[str, Any] | None:
    """The post-processor that puts the prefix and bos before a text and eos behind it. between: so many more of eos
    stand between the texts of a pair; None: the second one is as the first."""
    before = [*vocabulary.prefix, *([vocabulary.bos] if bos and vocabulary.bos is not None else [])]
    behind = [vocabulary.eos] if eos and vocabulary.eos is not None else []
    if not before and not behind:
        return None

    def place(tokens: list[int], type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": vocabulary.texts[token], "type_id": type_id}} for token in tokens]

    def text(name: str, type_id: int) -> list[dict[str, Any]]:
        sequence = {"Sequence": {"id": name, "type_id": type_id}}
        first = before if name == "A" or between is None else behind * between
        return [*place(first, type_id), sequence, *place(behind, type_id)]

    special = {
        vocabulary.texts[token]: {
            "id": vocabulary.texts[token], "ids": [token], "tokens": [vocabulary.texts[token]],
        }
        for token in (*before, *behind)
    }  # fmt: skip
    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": special,
    }
