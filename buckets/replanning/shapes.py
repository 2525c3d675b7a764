"""Step shapes, and the scheduler's rule for the graph that takes a step, on plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmc.buckets.bucket import Bucket, area, beyond, rank, whole_blocks

SERVES = {"prefill": ("prefill", "mixed"), "decode": ("decode", "mixed"), "mixed": ("mixed",)}
"""Phases of graphs tried first for steps of each phase; if none of them holds a step, any may."""


@dataclass(frozen=True, order=True, slots=True)
class StepShape:
    """The load of a step.

    phase: prompts, decodes or both. context: of the longest sequence, in whole KV blocks. samples: rows that become
    logits.
    """

    phase: str
    sequences: int
    tokens: int
    samples: int
    context: int

    @property
    def asked(self) -> int:
        """Tokens that a bucket of exactly this shape computes, counted as for padding: contexts in decode."""
        return self.sequences * self.context if self.phase == "decode" else self.tokens


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
        """Whether the bucket's graph can run such a step; for a total, assumes all contexts as long as the longest."""
        if bucket.total and shape.sequences * whole_blocks(shape.context, self.block_size) > bucket.seq:
            return False
        return (
            shape.sequences <= bucket.batch
            and shape.tokens <= bucket.max_tokens
            and shape.samples <= bucket.batch
            and shape.context <= self.context(bucket)
        )

    def covers(self, bucket: Bucket, other: Bucket) -> bool:
        """Whether `bucket` holds every step that `other` holds, and the scheduler tries it for them."""
        return (
            bucket.phase == other.phase
            and bucket.batch >= other.batch
            and bucket.max_tokens >= other.max_tokens
            and self.context(bucket) >= self.context(other)
        )

    def order(self, bucket: Bucket, phase: str) -> tuple[bool, int, int, int, Bucket]:
        """Sort key: among buckets that hold a step of this phase, the scheduler takes the least."""
        tokens, _, batch = rank(bucket)
        return bucket.phase not in SERVES[phase], tokens, self.context(bucket), batch, bucket

    def choose(self, buckets: Iterable[Bucket], shape: StepShape) -> Bucket | None:
        """The bucket that the scheduler takes; None on a miss."""
        holding = (bucket for bucket in buckets if self.holds(bucket, shape))
        return min(holding, key=lambda bucket: self.order(bucket, shape.phase), default=None)

    def parts(self, buckets: Sequence[Bucket], shape: StepShape) -> list[tuple[StepShape, Bucket]]:
        """The steps into which a step is split, each with its bucket: one, or several after a miss.

        Empty if a part has no bucket.
        """
        whole = self.choose(buckets, shape)
        if whole is not None:
            return [(shape, whole)]
        if shape.phase != "decode":
            return []
        found, left = [], shape.sequences
        while left:
            able = (b.batch for b in buckets if b.phase == "decode" and self.context(b) >= shape.context)
            many = max(able, default=1)
            count = min(left, many)
            part = StepShape("decode", count, count, count, shape.context)
            bucket = self.choose(buckets, part)
            if bucket is None:
                return []
            found.append((part, bucket))
            left -= count
        return found

    def padding(self, bucket: Bucket, shape: StepShape) -> int:
        """Padding tokens that the bucket computes for such a step."""
        if shape.phase == "decode":
            computed = area(bucket, self.block_size) if bucket.phase == "decode" else bucket.max_tokens * shape.context
        else:
            computed = bucket.max_tokens
        return max(0, computed - shape.asked)
