"""Decode buckets with rows for draft tokens. If each of n sequences brings its last token and g draft tokens, a step
has n × (g + 1) rows."""

from __future__ import annotations

from dataclasses import replace

from .bucket import Bucket, BucketLadder

MAX_GUESSES = 64
DEFAULT_ODDS = 0.7
"""Default probability that a draft token is right, given that those before it are."""


def add_verify_buckets(ladder: BucketLadder, max_num_seqs: int, guesses: int, block_size: int = 1) -> BucketLadder:
    """Adds decode buckets for steps of up to max_num_seqs sequences with `guesses` draft tokens each.

    Rows double from 2 to the maximum, without those that a bucket already has. Contexts are the ladder's, thinned to at
    least double, the longest included. A ladder that already has more rows than sequences was planned and is kept.
    Raises BucketError if there are too many buckets in all.
    """
    present = {bucket.batch for bucket in ladder.decode}
    if max(present, default=0) > max_num_seqs:
        return ladder
    rows = rows_of(max_num_seqs, guesses)
    lengths = {
        total: doubling(sorted({bucket.seq for bucket in ladder.decode if bucket.total == total}))
        for total in (False, True)
    }
    added = (
        Bucket("decode", batch, seq, total)
        for batch in rows
        if batch not in present
        for total, sizes in lengths.items()
        for seq in sizes
        # A graph has a block for each row, since each might be a sequence.
        if not total or seq >= batch * block_size
    )
    return replace(ladder, decode=(*ladder.decode, *added))


def rows_of(max_num_seqs: int, guesses: int) -> list[int]:
    """Powers of two from 2 up, below the rows of max_num_seqs sequences with `guesses` each; then those rows."""
    most = max_num_seqs * (guesses + 1)
    return [1 << power for power in range(1, most.bit_length()) if 1 << power < most] + [most]


def doubling(lengths: list[int]) -> list[int]:
    """A subset of ascending lengths: the longest, then each at most half of the one before."""
    kept: list[int] = []
    for length in reversed(lengths):
        if not kept or 2 * length <= kept[-1]:
            kept.append(length)
    return kept
