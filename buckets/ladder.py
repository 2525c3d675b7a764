"""Ladders: the sizes along one axis of the bucket grid, and the default grid."""

from __future__ import annotations

from itertools import product

from .bucket import MAX_BUCKETS, MAX_DIM, Bucket, BucketError, BucketLadder

_DEFAULT_SEQ_STEP = 128
_DEFAULT_SEQ_STEPS = 16
_DEFAULT_PREFILL_TOKENS = 2048


def ramp_up(minimum: int, step: int, maximum: int) -> tuple[int, ...]:
    """`minimum` doubles until it reaches `step`, then multiples of `step` up to `maximum`, which is always included.

    (2, 32, 64) gives 2 4 8 16 32 64. Raises BucketError when a value is not positive, minimum > maximum, or the
    ladder has more than MAX_BUCKETS sizes.
    """
    what = f"{minimum}:{step}:{maximum}"
    _check(what, min=minimum, step=step, max=maximum)
    if minimum > maximum:
        raise BucketError(f"range {what} has min {minimum} above max {maximum}: swap them, MIN:STEP:MAX")
    # Counted before it is built: an absurd range must not fill the memory.
    count = (maximum - minimum) // step + 1
    if count > MAX_BUCKETS:
        raise BucketError(f"range {what} has about {count} sizes, the limit is {MAX_BUCKETS}: use a larger step")
    sizes = []
    size = minimum
    while size < min(step, maximum):
        sizes.append(size)
        size *= 2
    if minimum > step and minimum % step:
        sizes.append(minimum)
    first = max(step, -(-minimum // step) * step)
    sizes.extend(range(first, maximum + 1, step))
    if not sizes or sizes[-1] != maximum:
        sizes.append(maximum)
    return tuple(sizes)


def exponential(minimum: int, maximum: int) -> tuple[int, ...]:
    """`minimum` doubles up to `maximum`, which is always included: (1, 6) gives 1 2 4 6. Raises BucketError."""
    _check(f"{minimum}:exp:{maximum}", min=minimum, max=maximum)
    return ramp_up(minimum, maximum, maximum)


def default_ladder(max_num_seqs: int, max_model_len: int, block_size: int) -> BucketLadder:
    """The grid used when no spec is given; lengths in tokens.

    Batches: prefill (1, min(max_num_seqs, 32), min(max_num_seqs, 64)), decode (1, min(max_num_seqs, 32),
    max_num_seqs). Lengths start at the smallest multiple of block_size that is at least 128; the step is that, doubled
    until 16 steps reach max_model_len, so that a long context does not multiply the graphs. Prefill buckets of more
    than max(2048, max_model_len) tokens are left out: a longer prompt or fuller batch runs in several steps.
    Raises BucketError for sizes that are not positive.
    """
    _check(
        f"default ladder for max_num_seqs={max_num_seqs}, max_model_len={max_model_len}, block_size={block_size}",
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
    )
    start = min(-(-_DEFAULT_SEQ_STEP // block_size) * block_size, max_model_len)
    step = start
    while step * _DEFAULT_SEQ_STEPS < max_model_len:
        step *= 2
    lengths = ramp_up(start, step, max_model_len)
    prefill_batches = ramp_up(1, min(max_num_seqs, 32), min(max_num_seqs, 64))
    decode_batches = ramp_up(1, min(max_num_seqs, 32), max_num_seqs)
    max_tokens = max(_DEFAULT_PREFILL_TOKENS, max_model_len)
    return BucketLadder(
        prefill=tuple(Bucket("prefill", b, s) for b, s in product(prefill_batches, lengths) if b * s <= max_tokens),
        decode=tuple(Bucket("decode", b, s) for b, s in product(decode_batches, lengths)),
    )


def _check(what: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIM:
            raise BucketError(f"{what}: {name} {value!r} is out of range, use a whole number from 1 to {MAX_DIM}")
