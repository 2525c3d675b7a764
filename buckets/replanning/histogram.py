"""A histogram of step shapes in bounded memory, in which old steps fade."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from llmc.buckets.bucket import Bucket

from .shapes import ShapeUse, StepShape

MAX_SHAPES = 4096
HALF_LIFE_S = 1800.0


@dataclass(slots=True)
class _Cell:
    steps: float = 0.0
    measured: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CountedSteps:
    """A number of similar steps. seconds: of all of them; 0 if not measured."""

    shape: StepShape
    bucket: Bucket | None
    count: float
    seconds: float = 0.0


class StepHistogram:
    """Counts steps by shape and bucket.

    A step's weight halves every half_life_s. Beyond max_shapes the lightest shapes are dropped. `now_s` must not
    decrease. Not thread-safe.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, max_shapes: int = MAX_SHAPES) -> None:
        if not 0 < half_life_s < math.inf:
            raise ValueError(f"half_life_s is {half_life_s}: use more than 0")
        if max_shapes < 1:
            raise ValueError(f"max_shapes is {max_shapes}: use 1 or more")
        self.half_life_s, self._max_shapes = half_life_s, max_shapes
        self._cells: dict[tuple[StepShape, Bucket | None], _Cell] = {}
        self._now_s: float | None = None
        self.observed_s = 0.0
        """Seconds that the steps are of, faded as they are."""
        self.forgotten = 0.0
        """Steps that found no room, since the beginning."""

    def add(self, steps: Iterable[CountedSteps], now_s: float) -> None:
        """Counts steps that ran between the previous call and now."""
        self._fade(now_s)
        for one in steps:
            cell = self._cells.setdefault((one.shape, one.bucket), _Cell())
            cell.steps += one.count
            if one.seconds > 0:
                cell.measured += one.count
                cell.seconds += one.seconds
        if len(self._cells) > self._max_shapes:
            # Drop a quarter at once, so that this is rare.
            order = sorted(self._cells, key=lambda key: (self._cells[key].steps, key[0], str(key[1])))
            for key in order[: len(order) - self._max_shapes * 3 // 4]:
                self.forgotten += self._cells.pop(key).steps

    def uses(self) -> list[ShapeUse]:
        """The counted shapes, sorted by shape and bucket."""
        rows = (
            ShapeUse(shape, bucket, cell.steps, cell.seconds / cell.measured if cell.measured else 0.0)
            for (shape, bucket), cell in self._cells.items()
        )
        return sorted(rows, key=lambda use: (use.shape, str(use.bucket)))

    def _fade(self, now_s: float) -> None:
        if self._now_s is None:
            self._now_s = now_s
            return
        passed, self._now_s = max(0.0, now_s - self._now_s), max(now_s, self._now_s)
        kept = 0.5 ** (passed / self.half_life_s)
        # Recent seconds count fully, older ones less, like the steps in which they were spent.
        self.observed_s = self.observed_s * kept + passed
        if kept < 1.0:
            for key, cell in list(self._cells.items()):
                cell.steps *= kept
                cell.measured *= kept
                cell.seconds *= kept
                if cell.steps < 1e-3:
                    del self._cells[key]
