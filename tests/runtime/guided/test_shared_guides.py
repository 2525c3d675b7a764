"""Continuations of one request share guides and masks while their texts are the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.guided.shared_guides import SharedGuides


class Path:
    """A guide whose mask names its text, and that counts what it does."""

    made = copied = computed = 0
    alive: set[int]

    def __init__(self, taken: tuple[int, ...] = ()) -> None:
        self.taken = taken
        self.masked: list[tuple[int, ...]] = []
        Path.alive.add(id(self))

    def __del__(self) -> None:
        Path.alive.discard(id(self))

    @property
    def finished(self) -> bool:
        return len(self.taken) == 4

    def mask(self) -> np.ndarray:
        Path.computed += 1
        self.masked.append(self.taken)
        return np.array([expected(self.taken)], np.uint32)

    def accept(self, token_id: int) -> None:
        # Every text on the way had its mask computed here, or where this one was copied from.
        assert self.masked[-1] == self.taken
        self.taken = (*self.taken, token_id)

    def forced(self) -> list[int]:
        return [9, 8] if self.taken[-1:] == (7,) else []

    def copy(self) -> Path:
        Path.copied += 1
        other = Path(self.taken)
        other.masked = self.masked[:]
        return other


@pytest.fixture(autouse=True)
def counted() -> None:
    Path.alive = set()
    Path.copied = Path.computed = 0


def expected(taken: tuple[int, ...]) -> int:
    """Tokens 0 to 9 are allowed but for 6."""
    return hash(taken) << 10 & 0xFFFFFC00 | 0b1110111111


def test_equal_texts_share_one_guide_and_one_mask() -> None:
    guides = SharedGuides(Path, 64)
    assert guides.num_states == 0, "nothing is made before it is needed"
    for length in range(3):
        for index in range(64):
            assert guides.mask(index)[0] == expected((5,) * length)
        for index in range(64):
            guides.accept(index, 5)
    assert Path.computed == 3
    assert guides.num_states == 1
    assert len(Path.alive) == 1


def test_one_continuation_copies_nothing() -> None:
    guides = SharedGuides(Path, 1)
    for length in range(4):
        assert not guides.finished(0)
        assert guides.mask(0)[0] == expected((7,) * length)
        guides.accept(0, 7)
    assert guides.finished(0)
    assert (Path.copied, Path.computed) == (0, 4)
    guides.drop(0)
    assert not Path.alive


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 9), width=st.integers(1, 3))
def test_any_order_of_continuations(seed: int, n: int, width: int) -> None:
    """Whoever is ahead or behind, ends early or never comes: masks are right, and guides stay few."""
    rng = random.Random(seed)
    Path.alive = set()
    guides = SharedGuides(Path, n)
    texts: dict[int, tuple[int, ...]] = dict.fromkeys(range(n), ())
    for _ in range(12 * n):
        if not texts:
            break
        index = rng.choice(list(texts)[: rng.randint(1, n)])
        assert guides.mask(index)[0] == expected(texts[index])
        if rng.random() < 0.1:
            guides.drop(index)
            del texts[index]
            continue
        token = rng.randrange(width)
        guides.accept(index, token)
        texts[index] = (*texts[index], token)
        guesses = [rng.randrange(width) for _ in range(rng.randrange(3))]
        if rng.random() < 0.3 and len(texts[index]) < 4:
            ahead = guides.ahead(index, guesses, 2)
            assert ahead.guesses == guesses[: 3 - len(texts[index])]
            ways = [texts[index] + tuple(guesses[:length]) for length in range(len(ahead.guesses) + 1)]
            assert [int(mask[0]) for mask in ahead.masks] == [expected(way) for way in ways]
        # Of each text that somebody is at, two more that lie ahead.
        assert len(Path.alive) <= 3 * n + 2 * 3 * n
    for index in list(texts):
        guides.drop(index)
    assert not Path.alive


def test_what_lies_ahead_is_computed_once() -> None:
    guides = SharedGuides(Path, 1)
    ahead = guides.ahead(0, [1, 2, 6, 3], 4)
    assert ahead.guesses == [1, 2], "6 is not allowed"
    assert Path.computed == len(ahead.masks) == 3
    for token in (1, 2):
        guides.accept(0, token)
        guides.mask(0)
    assert (Path.computed, len(Path.alive)) == (3, 1)
    guides = SharedGuides(Path, 1)
    guides.mask(0)
    guides.accept(0, 7)
    # What is forced comes before what is guessed, and goes as far as the text does.
    assert guides.ahead(0, [1, 2], 8).guesses == [9, 8]
    assert guides.ahead(0, [9, 1], 1).guesses == [9]
    guides.accept(0, 3)
    assert len(Path.alive) == 1, "what lay on another way is gone"


def test_stragglers_find_the_masks_of_those_ahead() -> None:
    guides = SharedGuides(Path, 8)
    for index in range(8):
        for _ in range(3):
            guides.mask(index)
            guides.accept(index, 1)
        guides.mask(index)
    assert Path.computed == 4
    assert guides.num_states == 1
