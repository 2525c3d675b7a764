"""Mask work on several threads: in order within a request, by turns between requests, light ones first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from llmc.runtime.binding.events import Event
from llmc.runtime.guided.compiler import GuideError
from llmc.runtime.server.mask_workers import GuideWorkers, default_threads

_WAIT_S = 20.0


def event(kind: str, engine_id: int, output: int = 0, token: int = -1) -> Event:
    return Event(kind, engine_id, output, token, None, 1, 0, 0, 0, 0.0, (), 0, 0, 0, 0, 0, 0)


class Engine:
    """Notes the masks that are set."""

    speculate_tokens = 0

    def __init__(self) -> None:
        self.masks: list[tuple[int, int, int]] = []
        self.changed = threading.Condition()

    def set_token_mask(self, engine_id: int, output: int, words: np.ndarray) -> None:
        with self.changed:
            self.masks.append((engine_id, output, int(words[0])))
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[tuple[int, int, int]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.masks) >= count, _WAIT_S)
            return list(self.masks)


class Counting:
    """A guide whose mask is the number of tokens so far; before each mask it calls `pause`."""

    def __init__(self, pause: Callable[[], None] = lambda: None, taken: int = 0) -> None:
        self.pause = pause
        self.taken = taken

    finished = False

    def mask(self) -> np.ndarray:
        self.pause()
        return np.array([self.taken], np.uint32)

    def accept(self, token_id: int) -> None:
        if token_id < 0:
            raise GuideError("the grammar cannot go on")
        self.taken += 1

    def forced(self) -> list[int]:
        return []

    def copy(self) -> Counting:
        return Counting(self.pause, self.taken)


class Running:
    def __init__(self, num_threads: int) -> None:
        self.engine = Engine()
        self.errors: list[tuple[int, Exception]] = []
        self.finished: list[tuple[int, int]] = []
        self.workers = GuideWorkers(
            self.engine,  # type: ignore[arg-type]
            lambda engine_id, output, mask: self.finished.append((engine_id, output)),
            lambda engine_id, error: self.errors.append((engine_id, error)),
            num_threads,
        )


@pytest.fixture
def start() -> Iterator[Callable[[int], Running]]:
    opened: list[Running] = []

    def make(num_threads: int) -> Running:
        opened.append(Running(num_threads))
        return opened[-1]

    yield make
    for one in opened:
        one.workers.close()


def step(workers: GuideWorkers, engine_id: int, output: int = 0) -> None:
    workers.take(event("token", engine_id, output, 1))
    workers.take(event("needs_mask", engine_id, output))


def test_the_order_within_a_request_is_kept(start: Callable[[int], Running]) -> None:
    running = start(4)
    for engine_id in range(3):
        running.workers.open(engine_id, Counting, 2)
    for _ in range(50):
        for engine_id in range(3):
            for output in range(2):
                step(running.workers, engine_id, output)
    masks = running.engine.wait_for(300)
    for engine_id in range(3):
        for output in range(2):
            assert [count for *key, count in masks if key == [engine_id, output]] == list(range(1, 51))


def test_a_heavy_request_leaves_a_thread_to_others(start: Callable[[int], Running]) -> None:
    running = start(2)
    gate = threading.Event()
    running.workers.open(1, lambda: Counting(lambda: _held(gate)), 64)
    running.workers.open(2, Counting, 1)
    for output in range(64):
        running.workers.take(event("token", 1, output, output))  # texts that differ: each needs a mask of its own
        running.workers.take(event("needs_mask", 1, output))
    for _ in range(20):
        step(running.workers, 2)
    assert {engine_id for engine_id, *_ in running.engine.wait_for(20)} == {2}
    gate.set()
    assert len(running.engine.wait_for(84)) == 84


def test_who_spent_the_least_time_is_next(start: Callable[[int], Running]) -> None:
    """One thread: a request that comes later overtakes the masks that a heavy one still wants."""
    running = start(1)
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)

    def pause() -> None:
        entered.release()
        assert gate.acquire(timeout=_WAIT_S)

    running.workers.open(1, lambda: Counting(pause), 1)
    for _ in range(5):
        step(running.workers, 1)
    assert entered.acquire(timeout=_WAIT_S)
    running.workers.open(2, Counting, 1)
    step(running.workers, 2)
    gate.release()
    running.engine.wait_for(2)
    for _ in range(4):
        gate.release()
    order = [engine_id for engine_id, *_ in running.engine.wait_for(6)]
    assert order == [1, 2, 1, 1, 1, 1]


def test_an_error_ends_its_request_only(start: Callable[[int], Running]) -> None:
    running = start(1)
    for engine_id in (1, 2):
        running.workers.open(engine_id, Counting, 1)
    running.workers.take(event("token", 1, 0, -5))
    step(running.workers, 1)
    step(running.workers, 2)
    assert running.engine.wait_for(1) == [(2, 0, 1)]
    assert [engine_id for engine_id, _ in running.errors] == [1]


def test_guides_are_made_when_needed_and_freed_at_the_end(start: Callable[[int], Running]) -> None:
    running = start(1)
    made: list[Any] = []

    def make() -> Counting:
        made.append(None)
        return Counting()

    for engine_id in range(1000):
        running.workers.open(engine_id, make, 64)
    assert not made
    for output in range(64):
        running.workers.take(event("needs_mask", 7, output))
    running.engine.wait_for(64)
    assert len(made) == 1
    running.workers.take(event("finished", 7))
    running.workers.forget(7)
    running.workers.take(event("needs_mask", 7, 1))
    running.workers.take(event("needs_mask", 8))
    assert running.engine.wait_for(65)[-1] == (8, 0, 0)


def test_threads_start_with_the_first_guided_request(start: Callable[[int], Running]) -> None:
    before = threading.active_count()
    running = start(0)
    assert threading.active_count() == before
    running.workers.open(1, Counting, 1)
    assert threading.active_count() == before + default_threads()
    assert default_threads() >= 2


def _held(gate: threading.Event) -> None:
    assert gate.wait(_WAIT_S)
