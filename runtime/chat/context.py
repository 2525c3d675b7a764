"""A conversation that outgrows the model's context: its oldest messages are no longer sent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from llmc.runtime.chat.session import ChatError, Session

# Tokens kept free for an answer whose length nobody set: this share of the context, at most so many.
_ROOM_SHARE, _MOST_ROOM = 4, 1024


@dataclass(frozen=True)
class Fit:
    """What fits: room is how many tokens an answer may have, note what to tell the user, empty for nothing."""

    room: int
    note: str = ""


def fit(session: Session, count: Callable[[int], int], limit: int) -> Fit:
    """Moves `session.first` on until prompt and answer fit.

    count: tokens of the prompt when `first` is that. limit: tokens of the context. Once prompt and answer no longer
    fit, the oldest messages are left out until half the context is free. A prompt with a new start is computed anew,
    which should happen rarely. A raw text is cut only when it is full. Raises ChatError when not even the last question
    fits.
    """
    max_tokens = session.sampling.get("max_tokens")
    default = 1 if session.raw else min(limit // _ROOM_SHARE, _MOST_ROOM)
    wanted = default if max_tokens is None else max_tokens
    starts = session.later_starts()
    first, tokens = session.first, count(session.first)
    if tokens + wanted > limit and starts:
        most = min(limit // 2, limit - wanted)
        at = bisect_left(starts, True, key=lambda start: count(start) <= most)
        first = starts[min(at, len(starts) - 1)]
        tokens = count(first)
    if tokens >= limit:
        raise ChatError(f"the message makes a prompt of {tokens} tokens and the model takes {limit}: shorten it")
    if max_tokens is not None and tokens + max_tokens > limit:
        raise ChatError(
            f"max_tokens {max_tokens} and a prompt of {tokens} tokens exceed the model's {limit}: ask for at most "
            f"{limit - tokens}"
        )
    note = leave_out(session, first, f"the context of {limit} tokens is full")
    return Fit(limit - tokens, note)


def leave_out(session: Session, first: int, why: str) -> str:
    """Moves `session.first` to `first`; returns the note about it."""
    num, session.first = first - session.first, first
    return f"{why}: the oldest {num} {'characters' if session.raw else 'messages'} are no longer sent" if num else ""
