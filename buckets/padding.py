"""The padding convention, in one place.

Tokens of a step are packed (ragged) at the front of the bucket: sequence after sequence, no gap. Rows past the last
token are padding: their slot is in the dummy block 0 and their results are never read. `query_start[i]` is the first
row of sequence i, `query_start[num_seqs]` the number of valid rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bucket import Bucket, BucketError

DUMMY_BLOCK = 0


def num_blocks(num_tokens: int, block_size: int) -> int:
    """KV blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def query_start(query_lens: Sequence[int]) -> list[int]:
    """First packed row of every sequence, then the row count: [num_seqs + 1]."""
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    return starts


def token_seq(query_lens: Sequence[int]) -> list[int]:
    """Sequence index of every packed row: [num_tokens]."""
    return [index for index, length in enumerate(query_lens) for _ in range(length)]


def pad_rows(rows: Sequence[int], length: int, fill: int) -> list[int]:
    """`rows` followed by `fill` up to `length`. Raises BucketError when the rows do not fit."""
    if len(rows) > length:
        raise BucketError(f"{len(rows)} rows do not fit the {length} of the bucket: select a larger bucket")
    return [*rows, *[fill] * (length - len(rows))]


def pad_slots(slots: Sequence[int], bucket: Bucket, block_size: int) -> list[int]:
    """Slot mapping of the whole bucket, padding rows in the dummy block: [bucket.max_tokens]."""
    return pad_rows(slots, bucket.max_tokens, DUMMY_BLOCK * block_size)


def padding_tokens(bucket: Bucket, num_tokens: int) -> int:
    """Rows of `bucket` that are padding when it carries `num_tokens` tokens. Raises BucketError if too many."""
    if not 0 <= num_tokens <= bucket.max_tokens:
        raise BucketError(f"{num_tokens} tokens do not fit the {bucket.max_tokens} rows of {bucket}")
    return bucket.max_tokens - num_tokens


def waste(scheduled_tokens: int, padded_tokens: int) -> float:
    """Share of replayed rows that was padding, 0 … 1."""
    total = scheduled_tokens + padded_tokens
    return padded_tokens / total if total else 0.0
