"""The guides of one request's continuations: those with the same text so far share one guide, and its mask."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]


class Guide(Protocol):
    """Which tokens one continuation may take next: a function of the tokens so far; used by one thread at a time."""

    @property
    def finished(self) -> bool:
        """The text is complete: no token but eos may follow."""

    def mask(self) -> Mask:
        """Words over the vocabulary, bit t % 32 of word t // 32 set when token t is allowed."""

    def accept(self, token_id: int) -> None:
        """Moves past a token that was taken."""

    def forced(self) -> list[int]:
        """The tokens that come next where there is no choice of text; may be empty."""

    def copy(self) -> Guide:
        """A guide of the same text so far, which goes on by itself."""


@dataclass(frozen=True)
class Ahead:
    """masks: [guesses + 1], of the next token and behind each guess. guesses: allowed tokens, one behind another."""

    masks: list[Mask]
    guesses: list[int]


class _State:
    """A text so far. members: continuations that are here. next: where some of them went on, by token."""

    __slots__ = ("__weakref__", "guide", "mask", "members", "next", "parent")

    def __init__(self, guide: Guide, members: int, parent: _State | None = None) -> None:
        self.guide = guide
        self.mask: Mask | None = None
        self.members = members
        self.next: dict[int, _State] = {}
        # Alive as long as somebody is there or may still come there, who may then come here.
        self.parent = None if parent is None else weakref.ref(parent)

    @property
    def awaited(self) -> bool:
        """Another continuation may still come here."""
        return self.parent is not None and self.parent() is not None


class SharedGuides:
    """The guides of n continuations, made when they are first needed; used by one thread at a time.

    Each guide computes the mask of every text on its way, shared or not, so that limits on its work do not depend on
    what others do. Errors are those of the guides.
    """

    def __init__(self, make: Callable[[], Guide], n: int) -> None:
        self._make = make
        self._n = n
        self._at: dict[int, _State] | None = None
        self._states: weakref.WeakSet[_State] = weakref.WeakSet()

    @property
    def num_states(self) -> int:
        """Guides that exist."""
        return len(self._states)

    def finished(self, output_index: int) -> bool:
        """The text is complete: no token but eos may follow."""
        return self._state(output_index).guide.finished

    def mask(self, output_index: int) -> Mask:
        """The tokens that may come next, as Guide.mask has them; not to be written to."""
        state = self._state(output_index)
        if state.mask is None:
            state.mask = state.guide.mask()
        return state.mask

    def ahead(self, output_index: int, guesses: Sequence[int], most: int) -> Ahead:
        """Looks ahead along what the guides force and, where they do not, along `guesses` of the next tokens, as long
        as these are allowed and end no text: at most `most` tokens.

        Each text on the way gets a guide of its own, which serves when a continuation comes there.
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
        """Where a token leads, with its mask; None where it is not allowed or ends the text."""
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
        """Moves a continuation past a token that it took."""
        state = self._state(output_index)
        after = state.next.get(token_id)
        if after is None:
            after = self._advance(state, token_id)
        state.members -= 1
        after.members += 1
        assert self._at is not None
        self._at[output_index] = after

    def drop(self, output_index: int) -> None:
        """Forgets a continuation that ended."""
        if self._at is not None and (state := self._at.pop(output_index, None)) is not None:
            state.members -= 1

    def _state(self, output_index: int) -> _State:
        if self._at is None:
            first = _State(self._make(), self._n)
            self._states.add(first)
            self._at = dict.fromkeys(range(self._n), first)
        return self._at[output_index]

    def _advance(self, state: _State, token_id: int) -> _State:
        # Stragglers are waited for, but not with ever more guides: they can make their own.
        shared = state.members > 1 or (state.awaited and len(self._states) < 2 * self._n)
        after = _State(state.guide.copy() if shared else state.guide, 0, state if shared else None)
        after.guide.accept(token_id)
        self._states.add(after)
        if shared:
            state.next[token_id] = after
        elif state.parent is not None and (parent := state.parent()) is not None:
            parent.next = {token: other for token, other in parent.next.items() if other is not state}
        return after
