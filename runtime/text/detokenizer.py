"""Converts token ids to text, one token at a time: whole characters only, and stop strings across token boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
_PROMPT_TAIL = 6
_MAX_TAIL = 24
_MAX_PENDING = 16


class Detokenizer:
    """Incremental decoding. The joined pieces are the text of the tokens after the prompt.

    A decoder may look at neighbours: it drops the leading space of the first token, and bytes merge into a character.
    So each piece is decoded together with the piece before it, and the first one with the end of the prompt.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        length = min(_PROMPT_TAIL, len(prompt_token_ids))
        tail = list(prompt_token_ids[len(prompt_token_ids) - length :])
        # The window must not start inside a character: byte decoders would then corrupt the following text.
        while decode(tail).startswith(_REPLACEMENT) and length < min(_MAX_TAIL, len(prompt_token_ids)):
            length += 1
            tail = list(prompt_token_ids[len(prompt_token_ids) - length :])
        self._window = tail
        self._num_context = len(tail)
        self._emitted = len(decode(tail))

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_context
        if text.endswith(_REPLACEMENT) and num_pending < _MAX_PENDING:
            return ""
        piece = text[self._emitted :]
        if piece:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._emitted = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """The remaining text, without an incomplete character at its end."""
        if len(self._window) == self._num_context:
            return ""
        piece = self._decode(self._window)[self._emitted :].rstrip(_REPLACEMENT)
        self._num_context = len(self._window)
        return piece

    def after_end(self, token_id: int) -> str:
        """Text of `token_id` when it follows the text that `finish` ended."""
        return self._decode([*self._window, token_id])[len(self._decode(self._window)) :]


class StopStrings:
    """Finds the first of several strings in a stream of text, holding back a possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, *, allow_stop: bool = True) -> tuple[str, str | None]:
        """(text that can be shown, matched stop string or None). After a match nothing more may be pushed.

        With allow_stop False a complete match passes as text.
        """
        self._held += text
        hits = [(self._held.find(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if hits and allow_stop:
            position, _, stop = min(hits)
            shown, self._held = self._held[:position], ""
            return shown, stop
        # The text of a suppressed match must not match again.
        start = max((self._held.rfind(stop) + len(stop) for _, _, stop in hits), default=0)
        keep = max((self._overlap(stop, start) for stop in self._stops), default=0)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown, None

    def finish(self) -> str:
        """The text that was held back."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str, start: int) -> int:
        """Length of the longest proper prefix of `stop` that ends the held text after `start`."""
        longest = min(len(stop) - 1, len(self._held) - start)
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class OutputText:
    """Text of one continuation: detokenizer and stop strings together."""

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int], stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(decode, prompt_token_ids)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.stop_reason: str | None = None

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text it adds; sets `stop_reason` when a stop string matches."""
        if self.stop_reason is not None:
            return ""
        self._num_tokens += 1
        return self._take(self._detokenizer.push(token_id))

    def finish(self, shown_end: int | None = None) -> str:
        """Returns the text that was held back; call it once, at the end. shown_end: an end token whose text is shown.

        No stop string is searched in the text of that token.
        """
        if self.stop_reason is not None:
            return ""
        piece = self._take(self._detokenizer.finish())
        if self.stop_reason is None:
            piece += self._stops.finish()
            if shown_end is not None:
                piece += self._detokenizer.after_end(shown_end)
        return piece

    def _take(self, piece: str) -> str:
        shown, self.stop_reason = self._stops.push(piece, allow_stop=self._num_tokens >= self._min_tokens)
        return shown
