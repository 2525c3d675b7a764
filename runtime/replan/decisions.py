"""A server's decisions about its buckets with reasons: the last hundred, and counts of all."""

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
    """A decision. time: Unix time. reason: one sentence. figures: numbers it is based on, by name."""

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
    """Thread-safe for readers."""

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._lock = threading.Lock()

    def note(
        self, kind: Kind, reason: str, added: Sequence[Bucket] = (), retired: Sequence[Bucket] = (),
        figures: Mapping[str, float] | None = None,
    ) -> Decision:  # fmt: skip
        """Adds a decision, dated now."""
        one = Decision(kind, tuple(added), tuple(retired), reason, time.time(), figures or {})
        with self._lock:
            self._kept.append(one)
            self._counts[kind] += 1
        return one

    def last(self) -> list[Decision]:
        """The last decisions, oldest first."""
        with self._lock:
            return list(self._kept)

    def counts(self) -> dict[str, int]:
        """Counts by kind since the start."""
        with self._lock:
            return dict(self._counts)
