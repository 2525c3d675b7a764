"""The bucket: the static shape that a graph is compiled for, and the choice among buckets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import PHASES
from llmc.shown import shown

REQUIRED_PHASES = ("prefill", "decode")
PROMPT_PHASES = ("prefill",)
"""Phases of a model that returns a vector per prompt and generates no tokens."""
MAX_DIM = 1 << 24
MAX_BUCKETS = 4096

TOTAL = "total"
"""Suffix of a bucket's length: it bounds the total of all contexts."""
_TEXT = re.compile(rf"([a-z]+):([0-9]{{1,9}})x([0-9]{{1,9}})({TOTAL})?", re.ASCII)


class BucketError(ValueError):
    """A bucket, ladder or spec is unusable; the message is one sentence with the offending value."""


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """Shape of one graph: `batch` sequences of at most `seq` tokens each.

    seq counts a sequence's new tokens in `prefill`, its context in `decode`, and all tokens of the step in `mixed`.
    total: in a decode bucket, seq bounds the sum of all contexts, each rounded up to whole KV blocks. Raises
    BucketError for an unknown phase, a dimension outside 1 … 2**24, and a total of another phase or of fewer tokens
    than sequences.
    """

    phase: str
    batch: int
    seq: int
    total: bool = False

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise BucketError(f"unknown phase {shown(self.phase)}: use one of {', '.join(PHASES)}")
        for name, value in (("batch", self.batch), ("seq", self.seq)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise BucketError(f"{name} of a {self.phase} bucket must be a whole number, not {shown(value)}")
            if not 1 <= value <= MAX_DIM:
                raise BucketError(f"{name} {value} of a {self.phase} bucket is out of range: use 1 to {MAX_DIM}")
        if self.total and self.phase != "decode":
            raise BucketError(f"bucket {self} has a total context, which only decode buckets have: leave out {TOTAL}")
        if self.total and self.seq < self.batch:
            raise BucketError(
                f"bucket {self} has {self.batch} sequences but {self.seq} tokens of context in all: give it a KV block "
                "a sequence at least"
            )

    @classmethod
    def parse(cls, text: str) -> Bucket:
        """Reads "decode:4x512" (phase:batch×seq) or "decode:4x2048total", as `str` writes. Raises BucketError."""
        match = _TEXT.fullmatch(text.strip())
        if not text.strip():
            raise BucketError("a bucket is empty: write it as PHASE:BATCHxSEQ, for example decode:4x512")
        if match is None:
            raise BucketError(f"{shown(text)} is not a bucket: write it as PHASE:BATCHxSEQ, for example decode:4x512")
        return cls(match[1], int(match[2]), int(match[3]), match[4] is not None)

    def __str__(self) -> str:
        return f"{self.phase}:{self.batch}x{self.length}"

    @property
    def length(self) -> str:
        """seq as in specs and labels: "512", or "2048total"."""
        return f"{self.seq}{TOTAL if self.total else ''}"

    @property
    def each(self) -> float:
        """Tokens per sequence: seq, or an equal share of the total."""
        return self.seq / self.batch if self.total else self.seq

    @property
    def max_tokens(self) -> int:
        """Token rows of the graph."""
        if self.phase == "prefill":
            return self.batch * self.seq
        return self.batch if self.phase == "decode" else self.seq

    def fits(self, num_seqs: int, length: int, total: int | None = None) -> bool:
        """Whether `num_seqs` sequences, the longest of `length` tokens (counted as for `seq`), fit this graph.

        total: tokens of all contexts, each in whole KV blocks; None if all are as long as the longest.
        """
        if self.total:
            length = num_seqs * length if total is None else total
        return num_seqs <= self.batch and length <= self.seq


Lengths = TypeVar("Lengths", int, npt.NDArray[np.int64])


def whole_blocks(length: Lengths, block_size: int) -> Lengths:
    """Context lengths rounded up to whole KV blocks, as a decode graph reads them."""
    return -(-length // block_size) * block_size


def area(bucket: Bucket, block_size: int = 1) -> int:
    """The unit of padding: batch × seq, or tokens in `mixed`. Decode contexts are whole KV blocks."""
    if bucket.phase == "mixed" or bucket.total:
        return bucket.seq
    return bucket.batch * (whole_blocks(bucket.seq, block_size) if bucket.phase == "decode" else bucket.seq)


def rank(bucket: Bucket) -> tuple[int, float, int]:
    """Sort key of the scheduler, which takes the least bucket of a phase that holds a step.

    Fewest token rows, then the shortest context (of a total: its share), then the fewest sequences.
    `GraphLadder::Choose` must agree.
    """
    return bucket.max_tokens, bucket.each if bucket.phase == "decode" else 0, bucket.batch


def beyond(bucket: Bucket, max_num_seqs: int, max_model_len: int, block_size: int) -> str:
    """The dimension of a bucket that no request can fill: "batch" or "seq"; "" if there is none."""
    if bucket.batch > max_num_seqs:
        return "batch"
    # A context may end within a block that crosses the limit.
    longest = -(-max_model_len // block_size) * block_size
    return "seq" if bucket.seq > longest * (bucket.batch if bucket.phase == "mixed" or bucket.total else 1) else ""


def check_total(bucket: Bucket, block_size: int) -> None:
    """Raises BucketError for a total of less than one KV block per sequence."""
    least = bucket.batch * block_size
    if bucket.total and bucket.seq < least:
        raise BucketError(
            f"bucket {bucket} has less than a block of {block_size} tokens for each of {bucket.batch} sequences: use "
            f"{least} tokens or more, or fewer sequences"
        )


def select(buckets: Iterable[Bucket], num_seqs: int, length: int, total: int | None = None) -> Bucket | None:
    """The bucket among those of a phase that the scheduler takes; None on a miss. total: as in `Bucket.fits`."""
    return min((bucket for bucket in buckets if bucket.fits(num_seqs, length, total)), key=rank, default=None)


@dataclass(frozen=True, slots=True)
class BucketLadder:
    """The buckets of an artifact, each phase sorted by (batch, seq) and free of duplicates; `mixed` may be empty.

    phases: required phases; with PROMPT_PHASES, also the only ones allowed.
    Raises BucketError if a required phase is empty, or a phase holds a foreign or duplicate bucket. Also raised if a
    mixed bucket has fewer tokens than sequences, or there are more than MAX_BUCKETS in all.
    """

    prefill: tuple[Bucket, ...]
    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...] = ()
    phases: tuple[str, ...] = REQUIRED_PHASES

    def __post_init__(self) -> None:
        if len(self) > MAX_BUCKETS:
            raise BucketError(f"{len(self)} buckets are more than the limit of {MAX_BUCKETS}: use larger steps")
        for phase in PHASES:
            buckets: tuple[Bucket, ...] = getattr(self, phase)
            if not buckets and phase in self.phases:
                needs = " and one ".join(self.phases)
                raise BucketError(f"no {phase} bucket: a ladder needs at least one {needs} bucket")
            if buckets and self.phases == PROMPT_PHASES and phase not in PROMPT_PHASES:
                raise BucketError(
                    f"bucket {buckets[0]}: a model that gives vectors has prefill buckets only; leave it out"
                )
            seen: set[Bucket] = set()
            for bucket in buckets:
                if bucket.phase != phase:
                    raise BucketError(f"bucket {bucket} is listed under {phase}: move it to {bucket.phase}")
                if phase == "mixed" and bucket.seq < bucket.batch:
                    raise BucketError(
                        f"bucket {bucket} has {bucket.batch} sequences but {bucket.seq} tokens in all: give it a token "
                        "a sequence at least, and room for a chunk of a prompt"
                    )
                if bucket in seen:
                    raise BucketError(f"bucket {bucket} is given twice: list each bucket once")
                seen.add(bucket)
            object.__setattr__(self, phase, tuple(sorted(buckets)))

    def __len__(self) -> int:
        return len(self.prefill) + len(self.decode) + len(self.mixed)

    def __iter__(self) -> Iterator[Bucket]:
        yield from self.prefill
        yield from self.decode
        yield from self.mixed

    @property
    def max_batch(self) -> int:
        """Most sequences in a decode step; without decode buckets, in a prefill step."""
        return max(bucket.batch for bucket in self.decode or self.prefill)

    @property
    def max_context(self) -> int:
        """Longest context, in tokens, of a decode bucket; without decode buckets, longest prompt of a prefill
        bucket."""
        return max(bucket.seq for bucket in self.decode or self.prefill)

    def select(self, phase: str, num_seqs: int, length: int, total: int | None = None) -> Bucket | None:
        """The bucket of a phase that the scheduler takes; None on a miss. Raises BucketError for an unknown phase."""
        if phase not in PHASES:
            raise BucketError(f"unknown phase {shown(phase)}: use one of {', '.join(PHASES)}")
        buckets: tuple[Bucket, ...] = getattr(self, phase)
        return select(buckets, num_seqs, length, total)
