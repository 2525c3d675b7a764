"""The "llama" tokenizers: SentencePiece's BPE, whose scores say which pieces are merged first."""

from __future__ import annotations

import math
import re
from typing import Any

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.tokenizer.added import added_tokens
from llmc.models.sources.gguf.tokenizer.vocabulary import BYTE, NORMAL, UNKNOWN, Vocabulary

_SCORES = "tokenizer.ggml.scores"
_SPACE = "▁"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Real pieces have some dozens of characters, and their merges twice those of the vocabulary.
_MAX_PIECE, _MOST_WRITTEN = 1024, 64


def sentence_piece(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json without what surrounds a text."""
    adds_space = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    scores = _scores(metadata, len(vocabulary.texts))
    kinds = vocabulary.kinds
    bytes_of = [text for text, kind in zip(vocabulary.texts, kinds, strict=True) if kind == BYTE]
    odd = next((text for text in bytes_of if _BYTE.fullmatch(text) is None), None)
    if odd is not None:
        raise ModelError(f"{metadata.origin}: token {brief(odd)} has the type of a byte, and is none like <0x0A>")
    ids = vocabulary.ids()
    unknown = next((t for t, kind in zip(vocabulary.texts, kinds, strict=True) if kind == UNKNOWN), None)
    if unknown is None and vocabulary.unknown is not None:
        unknown = vocabulary.texts[vocabulary.unknown]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "added_tokens": added_tokens(vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": len(set(bytes_of)) == 256,
            "ignore_merges": False,
            "vocab": ids,
            "merges": _merges(vocabulary, ids, scores),
        },
    }


def _scores(metadata: Metadata, count: int) -> list[float]:
    array = metadata.array(_SCORES)
    if array is None:
        raise metadata.missing(_SCORES)
    scores = array.numbers()
    if len(scores) != count:
        raise metadata.wrong(_SCORES, f"a list of {count} scores")
    odd = next((token for token, score in enumerate(scores) if not math.isfinite(score)), None)
    if odd is not None:
        raise ModelError(f"{metadata.origin}: element {odd} of {_SCORES} is {scores[odd]}, which is no finite number")
    return scores


def _merges(vocabulary: Vocabulary, ids: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Every way to make a piece of two, best score first; of one score the piece that comes first, as do its ways."""
    texts, found, written = vocabulary.texts, list[tuple[float, int, int, int]](), 0
    most = _MOST_WRITTEN * sum(map(len, texts)) + (1 << 20)
    for text, token in ids.items():
        if vocabulary.kinds[token] != NORMAL:
            continue
        if len(text) > _MAX_PIECE:
            raise ModelError(
                f"{vocabulary.origin}: token {token} has {len(text)} characters, more than {_MAX_PIECE} of a piece"
            )
        for at in range(1, len(text)):
            left, right = ids.get(text[:at]), ids.get(text[at:])
            if left is not None and right is not None:
                found.append((-scores[token], token, left, right))
                written += len(text)
        if written > most:
            raise ModelError(
                f"{vocabulary.origin}: its {len(texts)} tokens are made of one another in more than {len(found)} ways, "
                "which no real vocabulary is"
            )
    return [[texts[left], texts[right]] for *_, left, right in sorted(found)]
