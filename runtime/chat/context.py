"""Conversations that outgrow the model's context: the oldest messages are dropped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from llmc.runtime.chat.session import ChatError, Session

# Tokens reserved for an answer of unset length: this share of the context, at most this many.
_ROOM_SHARE, _MOST_ROOM = 4, 1024


@dataclass(frozen=True)
class Fit:
    """room: most tokens of the answer. note: message for the user; empty for none."""

    room: int
    note: str = ""


def fit(session: Session, count: Callable[[int], int], limit: int) -> Fit:
    """Advances `session.first` until prompt and answer fit.

    count: maps a value of `first` to the prompt's tokens. limit: tokens of the context. If prompt and answer no longer
    fit, the oldest messages are dropped until half the context is free: a prompt with a new start misses the prefix
    cache, which should be rare. A raw text is cut only when full. Raises ChatError if not even the last question fits.
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
