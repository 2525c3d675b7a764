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
        return np.array([hash(self.taken) & 0xFFFF], np.uint32)

    def accept(self, token_id: int) -> None:
        # Every text on the way had its mask computed here, or where this one was copied from.
        assert self.masked[-1] == self.taken
        self.taken = (*self.taken, token_id)

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
    return hash(taken) & 0xFFFF


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
        assert len(Path.alive) <= 3 * n
    for index in list(texts):
        guides.drop(index)
    assert not Path.alive


def test_stragglers_find_the_masks_of_those_ahead() -> None:
    guides = SharedGuides(Path, 8)
    for index in range(8):
        for _ in range(3):
            guides.mask(index)
            guides.accept(index, 1)
        guides.mask(index)
    assert Path.computed == 4
    assert guides.num_states == 1
