"""Parts of every tokenizer.json: added tokens, which are matched before splitting, and tokens around a text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llmc.models.tokenizers.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary


def added_tokens(vocabulary: Vocabulary, normalized: Collection[int] = ()) -> list[dict[str, Any]]:
    """Control tokens, which decoding omits, and tokens added by a model's authors.

    normalized: ids of those matched in the normalized instead of the original text.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    found = []
    for token, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and text:
            late, special = token in normalized and kind == USER_DEFINED, kind != USER_DEFINED
            found.append({"id": token, "content": text, **flags, "normalized": late, "special": special})
    return found


def around(vocabulary: Vocabulary, *, bos: bool, eos: bool, between: int | None = None) -> dict[str, Any] | None:
    """The post-processor that adds the prefix and bos before a text, and eos after it.

    between: number of additional eos between the texts of a pair; None if the second text is treated like the first.
    """
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
