"""The guides of a request's continuations: continuations with equal text share one guide and its mask."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]


class Guide(Protocol):
    """Computes the tokens that a continuation may take next, from its tokens so far; not thread-safe."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete: only eos may follow."""

    def mask(self) -> Mask:
        """Words over the vocabulary; bit t % 32 of word t // 32 is set if token t is allowed."""

    def accept(self, token_id: int) -> None:
        """Accepts a token that was taken."""

    def forced(self) -> list[int]:
        """Next tokens wherever only one text is possible; may be empty."""

    def copy(self) -> Guide:
        """An independent guide with the same text so far."""


@dataclass(frozen=True)
class Ahead:
    """masks: [guesses + 1], for the next token and after each guess. guesses: a chain of allowed tokens."""

    masks: list[Mask]
    guesses: list[int]


class _State:
    """A text so far. members: continuations at this text. next: successor states, by token."""

    __slots__ = ("__weakref__", "guide", "mask", "members", "next", "parent")

    def __init__(self, guide: Guide, members: int, parent: _State | None = None) -> None:
        self.guide = guide
        self.mask: Mask | None = None
        self.members = members
        self.next: dict[int, _State] = {}
        # Kept while a continuation is here, or at a predecessor.
        self.parent = None if parent is None else weakref.ref(parent)

    @property
    def awaited(self) -> bool:
        """Whether another continuation may still arrive here."""
        return self.parent is not None and self.parent() is not None


class SharedGuides:
    """The guides of n continuations, created on demand; not thread-safe.

    Each guide computes the mask of every text on its path, shared or not, so that its work limits do not depend on
    others. Errors are those of the guides.
    """

    def __init__(self, make: Callable[[], Guide], n: int) -> None:
        self._make = make
        self._n = n
        self._at: dict[int, _State] | None = None
        self._states: weakref.WeakSet[_State] = weakref.WeakSet()

    @property
    def num_states(self) -> int:
        """The number of live guides."""
        return len(self._states)

    def finished(self, output_index: int) -> bool:
        """Whether the text is complete: only eos may follow."""
        return self._state(output_index).guide.finished

    def mask(self, output_index: int) -> Mask:
        """The allowed next tokens, as from Guide.mask; read-only."""
        state = self._state(output_index)
        if state.mask is None:
            state.mask = state.guide.mask()
        return state.mask

    def ahead(self, output_index: int, guesses: Sequence[int], most: int) -> Ahead:
        """Looks ahead by at most `most` tokens: along forced tokens, else along `guesses`, while these are allowed and
        do not end the text.

        Each text on the path gets its own guide, used when a continuation arrives there.
        """
        state = self._state(output_index)
        masks, taken, forced = [self.mask(output_index)], list[int](), list[int]()
        while len(taken) < most:
            forced = forced or state.guide.forced()
            following = list(guesses[: len(taken)]) == taken and len(guesses) > len(taken)
            if not forced and not following:
                break
            token = forced.pop(0) if forced else int(guesses[len(taken)])
            after = self._explore(state, token)
            if after is None or after.mask is None:
                break
            masks.append(after.mask)
            taken.append(token)
            state = after
        return Ahead(masks, taken)

    def _explore(self, state: _State, token_id: int) -> _State | None:
        """The state after a token, with its mask; None if the token is not allowed or ends the text."""
        assert state.mask is not None
        word, bit = divmod(token_id, 32)
        if word >= len(state.mask) or not int(state.mask[word]) >> bit & 1:
            return None
        after = state.next.get(token_id)
        if after is None:
            after = _State(state.guide.copy(), 0, state)
            after.guide.accept(token_id)
            state.next[token_id] = after
            self._states.add(after)
        if after.guide.finished:
            return None
        if after.mask is None:
            after.mask = after.guide.mask()
        return after

    def accept(self, output_index: int, token_id: int) -> None:
        """Advances a continuation by a token that it took."""
        state = self._state(output_index)
        after = state.next.get(token_id)
        if after is None:
            after = self._advance(state, token_id)
        state.members -= 1
        after.members += 1
        assert self._at is not None
        self._at[output_index] = after

    def drop(self, output_index: int) -> None:
        """Forgets a finished continuation."""
        if self._at is not None and (state := self._at.pop(output_index, None)) is not None:
            state.members -= 1

    def _state(self, output_index: int) -> _State:
        if self._at is None:
            first = _State(self._make(), self._n)
            self._states.add(first)
            self._at = dict.fromkeys(range(self._n), first)
        return self._at[output_index]

    def _advance(self, state: _State, token_id: int) -> _State:
        # Guides for stragglers are kept, within bounds: stragglers can rebuild their own.
        shared = state.members > 1 or (state.awaited and len(self._states) < 2 * self._n)
        after = _State(state.guide.copy() if shared else state.guide, 0, state if shared else None)
        after.guide.accept(token_id)
        self._states.add(after)
        if shared:
            state.next[token_id] = after
        elif state.parent is not None and (parent := state.parent()) is not None:
            parent.next = {token: other for token, other in parent.next.items() if other is not state}
        return after
