"""SentencePiece's tokenizer.model, a protobuf message: its pieces and normalization."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmc.models.errors import ModelError
from llmc.models.tokenizers.sentence_piece import Normalization
from llmc.models.tokenizers.vocabulary import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, Vocabulary

_UNIGRAM, _BPE = 1, 2
_KINDS = {_UNIGRAM: "unigram", _BPE: "BPE", 3: "words", 4: "characters"}
_MAX_PIECES = 1 << 22


@dataclass(frozen=True)
class SentencePieceModel:
    """vocabulary, scores: by token id. is_bpe: BPE if true, else unigram."""

    vocabulary: Vocabulary
    scores: tuple[float, ...]
    normalization: Normalization
    is_bpe: bool


class _Broken(ValueError):
    """Data that is not a valid message."""


def read_spm(data: bytes, origin: str) -> SentencePieceModel:
    """Raises ModelError for invalid data, or unsupported settings. origin: its name in errors."""
    try:
        return _read(data, origin)
    except (_Broken, UnicodeDecodeError) as error:
        raise ModelError(f"{origin} is not a SentencePiece model ({error}); download it again") from None


def _read(data: bytes, origin: str) -> SentencePieceModel:
    texts: list[str] = []
    kinds: list[int] = []
    scores: list[float] = []
    specs: dict[int, dict[int, Any]] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = _message(value)
            texts.append(_bytes(piece, 1).decode())
            scores.append(piece.get(2, 0.0))
            kinds.append(piece.get(3, NORMAL))
        elif number in (2, 3, 5):
            specs[number] = _message(value)
    trainer, normalizer = specs.get(2, {}), specs.get(3, {})
    if not texts or len(texts) > _MAX_PIECES:
        raise _Broken(f"it has {len(texts)} pieces")
    odd = next((kind for kind in kinds if kind not in range(NORMAL, BYTE + 1)), None)
    if odd is not None or not all(isinstance(score, float) for score in scores):
        raise _Broken(f"a piece is of type {odd}" if odd is not None else "a score is not a number")
    kind = trainer.get(3, _UNIGRAM)
    for is_so, what in (
        (kind not in (_UNIGRAM, _BPE), f"made of {_KINDS.get(kind, kind)}"),
        (trainer.get(24, 0), "with spaces at the ends of words"),
        (not normalizer.get(5, 1), "without a letter for spaces"),
        (_bytes(specs.get(5, {}), 2), "with a table for decoding"),
    ):
        if is_so:
            raise ModelError(
                f"{origin} is a SentencePiece model {what}, which is not supported; compile with --no-tokenizer an "
                "artifact that takes token ids alone"
            )

    if trainer.get(35, 0):
        # With bytes to fall back on, SentencePiece never makes the piece of a null character.
        kinds = [UNUSED if text == "\0" else one for text, one in zip(texts, kinds, strict=True)]

    def control(field: int, usual: int) -> int | None:
        """The id that the trainer assigned to a control token."""
        token = trainer.get(field, usual)
        return token if token < len(kinds) and kinds[token] == CONTROL else None

    bos, eos, padding = control(41, 1), control(42, 2), control(43, 1 << 64)
    vocabulary = Vocabulary(
        tuple(texts), tuple(kinds), origin, bos, eos, padding=padding, ends=() if eos is None else (eos,)
    )
    by = Normalization(
        charsmap=_bytes(normalizer, 2),
        adds_space=bool(normalizer.get(3, 1)),
        removes_spaces=bool(normalizer.get(4, 1)),
        own=frozenset(token for token, one in enumerate(kinds) if one == USER_DEFINED),
    )
    return SentencePieceModel(vocabulary, tuple(scores), by, kind == _BPE)


def _message(value: Any) -> dict[int, Any]:
    """The last value of each field."""
    if not isinstance(value, bytes):
        raise _Broken("a message is a number")
    return dict(_fields(value))


def _bytes(message: dict[int, Any], field: int) -> bytes:
    value = message.get(field, b"")
    if not isinstance(value, bytes):
        raise _Broken(f"field {field} is a number")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field in a protobuf message: integer, bytes or float."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(data):
                raise _Broken("it ends within a number")
            value |= (data[at] & 127) << shift
            at += 1
            if data[at - 1] < 128:
                return value
        raise _Broken("a number has more than 10 bytes")

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: -1, 5: 4}.get(wire)
        if size is None:
            raise _Broken(f"a field is of type {wire}")
        size = varint() if size < 0 else size
        value = data[at : at + size]
        at += size
        if at > len(data):
            raise _Broken("it is cut off")
        yield key >> 3, struct.unpack("<f", value)[0] if wire == 5 else value
