"""Where in the text of an answer its tokens begin: `text_offset` of /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from llmc.runtime.text.detokenizer import Decode, Detokenizer

from .token_text import TokenTexts

_REPLACEMENT = "\ufffd"
_CONTINUES = range(0x80, 0xC0)  # bytes of UTF-8 that begin no character


class TextOffsets:
    """Offsets of tokens that follow each other, in characters. A part of a character has the character's offset.

    decode: to text, as the answer has it. skips_special: whether it leaves out special tokens. context: tokens before
    the first one, whose text ends at `start`. given: the text, where it is not made of the tokens: special tokens that
    the tokenizer added are not in it.
    """

    def __init__(
        self,
        texts: TokenTexts,
        decode: Decode,
        *,
        skips_special: bool,
        context: Sequence[int] = (),
        start: int = 0,
        given: str | None = None,
    ) -> None:
        self._texts, self._given = texts, given
        self._skips_special = skips_special or given is not None
        self._detokenizer = Detokenizer(decode, context)
        self._num_told = self._certain = start
        self._begin_character()

    def tell(self, text: str) -> None:
        """Takes a piece of the text that the client gets."""
        self._num_told += len(text)

    def of(self, token_ids: Sequence[int], *, last: bool = False) -> list[int]:
        """Offsets of the next tokens. last: nothing follows the text that was told, so none lies behind it, not even
        those of a stop string."""
        offsets = [self._push(token_id) for token_id in token_ids]
        return [min(offset, self._num_told) for offset in offsets] if last else offsets

    def _push(self, token_id: int) -> int:
        special = token_id in self._texts.special
        data = b"" if special and self._skips_special else self._texts.bytes_of(token_id)
        is_torn = self._is_open() and bool(data) and data[0] not in _CONTINUES
        offset = self._certain + self._num_chars + is_torn
        if special and self._given is not None:
            name = self._texts.label(token_id)
            self._certain += len(name) if self._given.startswith(name, offset) else 0
            return offset
        piece = self._detokenizer.push(token_id)
        decoded = self._decoder.decode(data)
        self._num_chars += len(decoded)
        self._certain += len(piece)
        # Otherwise its characters are certain, or no part of the text, such as a space before the first word.
        if piece or not (self._is_open() or decoded.endswith(_REPLACEMENT)):
            self._begin_character()
        return offset

    def _is_open(self) -> bool:
        """Whether a character is incomplete."""
        return bool(self._decoder.getstate()[0])

    def _begin_character(self) -> None:
        """Forgets bytes whose text is certain."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
