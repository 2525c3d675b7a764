"""What a server decided about its buckets and why, the last hundred of it, and counts of all of it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llmc.buckets.bucket import Bucket

MAX_DECISIONS = 100
Kind = Literal["proposed", "compiled", "joined", "kept", "reverted", "failed", "published"]
KINDS: tuple[Kind, ...] = ("proposed", "compiled", "joined", "kept", "reverted", "failed", "published")


@dataclass(frozen=True)
class Decision:
    """One of them. time: Unix. reason: one sentence. figures: numbers that it rests on, by name."""

    kind: Kind
    added: tuple[Bucket, ...]
    retired: tuple[Bucket, ...]
    reason: str
    time: float
    figures: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Of plain values."""
        return {
            "time": self.time, "kind": self.kind, "added": [str(b) for b in self.added],
            "retired": [str(b) for b in self.retired], "reason": self.reason, "figures": dict(self.figures),
        }  # fmt: skip

    def line(self) -> str:
        """One sentence for a log."""
        named = ", ".join([*(f"+{bucket}" for bucket in self.added), *(f"-{bucket}" for bucket in self.retired)])
        return f"replan: {self.kind} {named}: {self.reason}" if named else f"replan: {self.kind}: {self.reason}"


class DecisionLog:
    """Any thread may read it."""

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._lock = threading.Lock()

    def note(
        self, kind: Kind, reason: str, added: Sequence[Bucket] = (), retired: Sequence[Bucket] = (),
        figures: Mapping[str, float] | None = None,
    ) -> Decision:  # fmt: skip
        """Notes one of now."""
        one = Decision(kind, tuple(added), tuple(retired), reason, time.time(), figures or {})
        with self._lock:
            self._kept.append(one)
            self._counts[kind] += 1
        return one

    def last(self) -> list[Decision]:
        """Oldest first."""
        with self._lock:
            return list(self._kept)

    def counts(self) -> dict[str, int]:
        """Of all kinds, since the start."""
        with self._lock:
            return dict(self._counts)
