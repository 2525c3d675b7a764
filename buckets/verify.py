"""Decode buckets with rows for guesses: where each of n sequences brings its last token and g guesses, a step has
n × (g + 1) rows."""

from __future__ import annotations

from dataclasses import replace

from .bucket import Bucket, BucketLadder

MAX_GUESSES = 64
DEFAULT_ODDS = 0.7
"""That a guess is right, those before it being right, where nothing is known of a text."""


def add_verify_buckets(ladder: BucketLadder, max_num_seqs: int, guesses: int, block_size: int = 1) -> BucketLadder:
    """The ladder with decode buckets for steps of up to max_num_seqs sequences that bring `guesses` each.

    Rows double from 2 up to the most, those that a bucket has already left out; contexts are those of the ladder, at
    least doubling, with the longest. A ladder that has more rows than sequences already stays as it was planned. Raises
    BucketError when there are too many in all.
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
        # A graph has a block for each of its rows, which might be sequences.
        if not total or seq >= batch * block_size
    )
    return replace(ladder, decode=(*ladder.decode, *added))


def rows_of(max_num_seqs: int, guesses: int) -> list[int]:
    """Powers of two below the rows of max_num_seqs sequences with so many guesses each, from 2 on, and those rows."""
    most = max_num_seqs * (guesses + 1)
    return [1 << power for power in range(1, most.bit_length()) if 1 << power < most] + [most]


def doubling(lengths: list[int]) -> list[int]:
    """Of ascending lengths those from the longest down that are at most half of the one before."""
    kept: list[int] = []
    for length in reversed(lengths):
        if not kept or 2 * length <= kept[-1]:
            kept.append(length)
    return kept
