"""Step shapes, and the scheduler's rule for the graph that takes a step, on plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llmc.buckets.bucket import Bucket, area, beyond, rank, whole_blocks

SERVES = {"prefill": ("prefill", "mixed"), "decode": ("decode", "mixed"), "mixed": ("mixed",)}
"""Phases of graphs tried first for steps of each phase; if none of them holds a step, any may."""


@dataclass(frozen=True, order=True, slots=True)
class StepShape:
    """The load of a step.

    phase: prompts, decodes or both. context: of the longest sequence, in whole KV blocks. samples: rows that become
    logits. total: of all contexts together, each in whole KV blocks; known only of decodes. 0, for unknown, becomes as
    if all were the longest, and so does more than that: totals are rounded up.
    """

    phase: str
    sequences: int
    tokens: int
    samples: int
    context: int
    total: int = 0

    def __post_init__(self) -> None:
        if not self.total or self.total > self.rectangle:
            object.__setattr__(self, "total", self.rectangle)

    @property
    def rectangle(self) -> int:
        """Tokens of all contexts if each were as long as the longest."""
        return self.sequences * self.context

    @property
    def asked(self) -> int:
        """Tokens that a bucket of exactly this shape computes, counted as for padding: contexts in decode."""
        return self.total if self.phase == "decode" else self.tokens

    def even(self) -> StepShape:
        """The shape with all contexts as long as the longest."""
        return self if self.total == self.rectangle else replace(self, total=0)


@dataclass(frozen=True, slots=True)
class ShapeUse:
    """Frequency of a shape, in steps that fade with age, and mean seconds of a step (0 if not measured).

    bucket: the one that ran them; None if the step missed and ran in parts, which are shapes of their own.
    """

    shape: StepShape
    bucket: Bucket | None
    steps: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the artifact and the server; lengths in tokens."""

    max_model_len: int
    max_num_seqs: int
    block_size: int

    def context(self, bucket: Bucket) -> int:
        """Longest context that a bucket's graph reads; only a decode graph is limited below the model's."""
        longest = min(bucket.seq, self.max_model_len) if bucket.phase == "decode" else self.max_model_len
        return whole_blocks(longest, self.block_size)

    def takes(self, bucket: Bucket) -> bool:
        """Whether a request could fill the bucket, and it could be compiled."""
        if bucket.phase == "mixed" and bucket.seq < bucket.batch:
            return False
        return beyond(bucket, self.max_num_seqs, self.max_model_len, self.block_size) == ""

    def holds(self, bucket: Bucket, shape: StepShape) -> bool:
        """Whether the bucket's graph can run such a step."""
        return (
            shape.sequences <= bucket.batch
            and shape.tokens <= bucket.max_tokens
            and shape.samples <= bucket.batch
            and shape.context <= self.context(bucket)
            and (not bucket.total or shape.total <= bucket.seq)
        )

    def covers(self, bucket: Bucket, other: Bucket) -> bool:
        """Whether `bucket` holds every step that `other` holds, and the scheduler tries it for them."""
        most = other.seq if other.total else other.batch * self.context(other)
        return (
            bucket.phase == other.phase
            and bucket.batch >= other.batch
            and bucket.max_tokens >= other.max_tokens
            and self.context(bucket) >= self.context(other)
            and (not bucket.total or bucket.seq >= most)
        )

    def order(self, bucket: Bucket, phase: str) -> tuple[bool, int, float, int, Bucket]:
        """Sort key: among buckets that hold a step of this phase, the scheduler takes the least."""
        tokens, _, batch = rank(bucket)
        share = bucket.seq // self.block_size * self.block_size / batch if bucket.total else self.context(bucket)
        return bucket.phase not in SERVES[phase], tokens, share, batch, bucket

    def choose(self, buckets: Iterable[Bucket], shape: StepShape) -> Bucket | None:
        """The bucket that the scheduler takes; None on a miss."""
        holding = (bucket for bucket in buckets if self.holds(bucket, shape))
        return min(holding, key=lambda bucket: self.order(bucket, shape.phase), default=None)

    def parts(self, buckets: Sequence[Bucket], shape: StepShape) -> list[tuple[StepShape, Bucket]]:
        """The steps into which a step is split, each with its bucket: one, or several after a miss, whose sequences
        share its contexts equally.

        Empty if a part has no bucket.
        """
        whole = self.choose(buckets, shape)
        if whole is not None:
            return [(shape, whole)]
        if shape.phase != "decode":
            return []
        found, left = [], shape.sequences
        while left:
            able = (self._room(b, shape) for b in buckets if b.phase == "decode")
            count = max(1, min(left, max(able, default=1)))
            part = StepShape("decode", count, count, count, shape.context, self._part(shape, count))
            bucket = self.choose(buckets, part)
            if bucket is None:
                return []
            found.append((part, bucket))
            left -= count
        return found

    def _part(self, shape: StepShape, count: int) -> int:
        """Total of the contexts of `count` sequences of a step, the longest among them."""
        return max(shape.context, whole_blocks(-(-shape.total * count // shape.sequences), self.block_size))

    def _room(self, bucket: Bucket, shape: StepShape) -> int:
        """Sequences of a step that a decode bucket holds together."""
        if self.context(bucket) < shape.context:
            return 0
        count = min(bucket.batch, shape.sequences)
        while bucket.total and count and self._part(shape, count) > bucket.seq:
            count -= 1
        return count

    def padding(self, bucket: Bucket, shape: StepShape) -> int:
        """Padding tokens that the bucket computes for such a step."""
        if shape.phase == "decode":
            computed = area(bucket, self.block_size) if bucket.phase == "decode" else bucket.max_tokens * shape.context
        else:
            computed = bucket.max_tokens
        return max(0, computed - shape.asked)
