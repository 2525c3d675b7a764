"""SentencePiece tokenizers: BPE, whose scores give the merge order, and unigram, whose scores add up."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.tokenizers.added import added_tokens
from llmc.models.tokenizers.charsmap import normalizer_steps
from llmc.models.tokenizers.vocabulary import BYTE, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

SPACE = "▁"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Real pieces have dozens of characters, and their merges number twice the vocabulary.
_MAX_PIECE, _MOST_WRITTEN = 1024, 64
# Below every score: for tokens that never occur in text.
_NEVER = 1000.0
# Score of an author-defined token, which SentencePiece prefers to every piece; found by comparing results.
_OWN = 0.5


@dataclass(frozen=True)
class Normalization:
    """Text normalization. charsmap: a compiled replacement table, such as NFKC. adds_space: at the beginning.
    removes_spaces: at both ends, and all but one of several. own: ids of tokens matched in normalized text; other added
    tokens are matched before."""

    charsmap: bytes = b""
    adds_space: bool = True
    removes_spaces: bool = False
    own: frozenset[int] = frozenset()


def bpe(vocabulary: Vocabulary, scores: Sequence[float], by: Normalization) -> dict[str, Any]:
    """tokenizer.json without the tokens around a text."""
    ids, merges = vocabulary.ids(), _merges(vocabulary, vocabulary.ids(), scores)
    own = [t for t in sorted(by.own) if vocabulary.kinds[t] == USER_DEFINED]
    steps = _normalizer(vocabulary, own, by)
    cut = None
    if own and by.adds_space:
        # Tokens matched in normalized text are normalized themselves, and would all get a leading space.
        of_text = sorted((vocabulary.texts[token] for token in own), key=lambda text: (-len(text), text))
        cut = {"type": "Split", "pattern": {"Regex": "|".join(map(re.escape, of_text))}, "behavior": "Isolated",
               "invert": False}  # fmt: skip
        vocabulary, own = _as_pieces(vocabulary, own), []
    return {
        "added_tokens": added_tokens(vocabulary, normalized=own),
        "normalizer": steps,
        "pre_tokenizer": cut,
        "decoder": _decoder(by),
        # A matched token is used unchanged.
        "model": _pairs(vocabulary, ids, merges, ignore_merges=cut is not None),
    }


def merged(vocabulary: Vocabulary, merges: list[list[str]]) -> dict[str, Any]:
    """tokenizer.json of Gemma 4, without the tokens around a text: BPE over characters, with the pairs in merge order.

    Spaces become SentencePiece's letter for them, and none is added. Texts are cut around line breaks alone.
    """
    by = Normalization(adds_space=False)
    return {
        "added_tokens": added_tokens(vocabulary),
        "normalizer": _normalizer(vocabulary, (), by),
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\n+"}, "behavior": "Isolated", "invert": False},
        "decoder": _decoder(by),
        "model": _pairs(vocabulary, vocabulary.ids(), merges, ignore_merges=False),
    }


def _pairs(
    vocabulary: Vocabulary, ids: dict[str, int], merges: list[list[str]], *, ignore_merges: bool
) -> dict[str, Any]:
    """The model of a tokenizer.json of BPE. ignore_merges: a piece of text that is a token is used unchanged."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": _unknown(vocabulary),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": _has_bytes(vocabulary),
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def unigram(vocabulary: Vocabulary, scores: Sequence[float], by: Normalization) -> dict[str, Any]:
    """tokenizer.json without the tokens around a text."""
    kinds = vocabulary.kinds
    normal = [score for score, kind in zip(scores, kinds, strict=True) if kind == NORMAL]
    unknown = _unknown(vocabulary)
    if not normal or unknown is None:
        raise ModelError(f"{vocabulary.origin} has no pieces, or no unknown token; download it again")
    never = min(normal) - _NEVER

    def score(token: int) -> float:
        if token in by.own and kinds[token] == USER_DEFINED:
            return _OWN
        return scores[token] if kinds[token] in (NORMAL, UNKNOWN) else never

    own = [token for token in sorted(by.own) if kinds[token] == USER_DEFINED]
    return {
        "added_tokens": added_tokens(_as_pieces(vocabulary, own)),
        "normalizer": _normalizer(vocabulary, own, by),
        "pre_tokenizer": None,
        "decoder": _decoder(by),
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.texts.index(unknown),
            "vocab": [[text, score(token)] for token, text in enumerate(vocabulary.texts)],
            "byte_fallback": _has_bytes(vocabulary),
        },
    }


def _as_pieces(vocabulary: Vocabulary, own: Sequence[int]) -> Vocabulary:
    """Treats these tokens as ordinary pieces instead of added tokens."""
    found = frozenset(own)
    kinds = tuple(NORMAL if token in found else kind for token, kind in enumerate(vocabulary.kinds))
    return replace(vocabulary, kinds=kinds)


def _normalizer(vocabulary: Vocabulary, own: Sequence[int], by: Normalization) -> dict[str, Any]:
    """own: tokens that SentencePiece does not normalize. Raises ModelError if that cannot be expressed."""
    steps: list[dict[str, Any]] = []

    def change(pattern: dict[str, str], content: str) -> None:
        steps.append({"type": "Replace", "pattern": pattern, "content": content})

    if by.charsmap:
        made, replaced = normalizer_steps(by.charsmap, vocabulary.origin)
        for text in (vocabulary.texts[token] for token in own):
            if unicodedata.normalize("NFKC", text) != text or any(one in text for one in replaced):
                raise ModelError(
                    f"{vocabulary.origin}: its own token {brief(text)} is one that its normalization changes, which no "
                    "tokenizer.json can say; compile with --no-tokenizer an artifact that takes token ids alone"
                )
        steps += made
    if by.removes_spaces:
        change({"Regex": rf"\A +|[ {SPACE}]+\z"}, "")
        change({"Regex": " {2,}"}, " ")
    if by.adds_space:
        steps.append({"type": "Prepend", "prepend": SPACE})
    change({"String": " "}, SPACE)
    return {"type": "Sequence", "normalizers": steps}


def _decoder(by: Normalization) -> dict[str, Any]:
    # A text with spaces preserved gets no leading one.
    count = _MAX_PIECE if by.removes_spaces and not by.own else int(by.adds_space)
    strip = [{"type": "Strip", "content": " ", "start": count, "stop": 0}] if count else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}


def _unknown(vocabulary: Vocabulary) -> str | None:
    texts, kinds = vocabulary.texts, vocabulary.kinds
    found = next((text for text, kind in zip(texts, kinds, strict=True) if kind == UNKNOWN), None)
    return texts[vocabulary.unknown] if found is None and vocabulary.unknown is not None else found


def _has_bytes(vocabulary: Vocabulary) -> bool:
    """Whether every byte is a token. Raises ModelError for an invalid byte token."""
    found = [text for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True) if kind == BYTE]
    odd = next((text for text in found if _BYTE.fullmatch(text) is None), None)
    if odd is not None:
        raise ModelError(f"{vocabulary.origin}: token {brief(odd)} has the type of a byte, and is none like <0x0A>")
    return len(set(found)) == 256


def _merges(vocabulary: Vocabulary, ids: dict[str, int], scores: Sequence[float]) -> list[list[str]]:
    """All ways to form a piece from two, best score first; ties in order of pieces."""
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
