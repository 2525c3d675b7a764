"""Ladders: the sizes along one axis of the bucket grid, and the default grid."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from itertools import product

from .bucket import MAX_BUCKETS, MAX_DIM, Bucket, BucketError, BucketLadder

_DEFAULT_SEQ_STEP = 128
_DEFAULT_SEQ_STEPS = 16
_DEFAULT_PREFILL_TOKENS = 2048
_DEFAULT_MIXED_TOKENS = 256


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


def doubling(minimum: int, maximum: int) -> tuple[int, ...]:
    """`minimum` doubles up to `maximum`, which is always included: (1, 6) gives 1 2 4 6. Raises BucketError."""
    _check(f"{minimum}:exp:{maximum}", min=minimum, max=maximum)
    return ramp_up(minimum, maximum, maximum)


def exponential(minimum: int, maximum: int, step: int = 1, limit: int | None = None) -> tuple[int, ...]:
    """Without `limit`, doubling. With it, up to `limit` sizes in geometric progression, rounded up to `step`.

    The second form is the exponential strategy of Intel Gaudi's vLLM plugin (`warmup_range_with_limit` in
    vllm_gaudi/extension/bucketing/exponential.py, described at
    https://docs.vllm.ai/projects/gaudi/en/latest/features/bucketing_mechanism.html): size i of n is
    min · (max / min)^(i / (n - 1)), rounded up to a multiple of step, duplicates dropped. Two differences: the last
    size is `maximum` itself, which the plugin may round up past it, and a power that misses a whole number by
    rounding error alone counts as that number. (128, 2048, 128, 10) gives 128 256 384 512 640 896 1152 1536 2048.
    Raises BucketError when a value is not positive, minimum > maximum or limit > MAX_BUCKETS.
    """
    if limit is None:
        return doubling(minimum, maximum)
    what = f"{minimum}:{step}:{maximum}:exp:{limit}"
    _check(what, min=minimum, step=step, max=maximum, limit=limit)
    if minimum > maximum:
        raise BucketError(f"range {what} has min {minimum} above max {maximum}: swap them, MIN:STEP:MAX:exp:LIMIT")
    if limit > MAX_BUCKETS:
        raise BucketError(f"range {what} has a limit of {limit} sizes, at most {MAX_BUCKETS} are possible: lower it")
    if limit == 1:
        return (maximum,)
    sizes = {maximum}
    for index in range(limit - 1):
        power = minimum * (maximum / minimum) ** (index / (limit - 1))
        size = math.ceil(power / step * (1 - 1e-12)) * step if index else minimum
        sizes.add(min(size, maximum))
    return tuple(sorted(sizes))


def default_limit(maximum: int) -> int:
    """Sizes of an exponential ladder when no limit is given, as in the plugin: ceil(log2(max)) + 1."""
    return (maximum - 1).bit_length() + 1


def padding_bounded(minimum: int, step: int, maximum: int, percent: float, cap: int | None = None) -> tuple[int, ...]:
    """The ramp-up ladder with the sizes left out whose absence pads no length above the bound.

    After size a, the next is the largest b of ramp-up with (b - a - 1) / b ≤ percent / 100 and, with `cap`,
    b - a - 1 ≤ cap: a length one longer than a pads the most. Where even the neighbour of a exceeds the bound it is
    taken, so the bound holds at every length above `minimum` for step 1, and elsewhere from about step / percent on.
    Sizes up to `step`, the doubling part, stay. After the padding-aware strategy of Intel Gaudi's vLLM plugin
    (vllm_gaudi/extension/bucketing/padding_aware.py; same arguments, its four documented examples give the same
    sizes); unlike it, multiples of the cap are not kept for their own sake, and percent may reach 100, exclusive.
    Raises BucketError as `ramp_up` does, and for a percent outside 0 … 100 or a negative cap.
    """
    if not 0 <= percent < 100:
        raise BucketError(f"padding bound of {percent:g} % is out of range: use 0 or more and less than 100")
    if cap is not None and not 0 <= cap <= MAX_DIM:
        raise BucketError(f"padding cap of {cap} is out of range: use 0 to {MAX_DIM}")
    candidates = ramp_up(minimum, step, maximum)
    share = Fraction(percent) / 100
    kept = [size for size in candidates if size <= step] or [candidates[0]]
    while kept[-1] != candidates[-1]:
        last = kept[-1]
        reach = int((last + 1) / (1 - share))
        if cap is not None:
            reach = min(reach, last + 1 + cap)
        next_index = bisect_right(candidates, last)
        kept.append(candidates[max(next_index, bisect_right(candidates, reach) - 1)])
    return tuple(kept)


def default_axes(max_num_seqs: int, max_model_len: int, block_size: int) -> dict[str, tuple[int, int, int]]:
    """(min, step, max) of the default ramp-up axes: prompt_bs, decode_bs, their common seq, mixed_bs and mixed_seq.

    Batches: prefill (1, min(max_num_seqs, 32), min(max_num_seqs, 64)), decode (1, min(max_num_seqs, 32),
    max_num_seqs). Lengths start at the smallest multiple of block_size that is at least 128; the step is that, doubled
    until 16 steps reach max_model_len, so that a long context does not multiply the graphs. Mixed steps: max_num_seqs
    sequences, and 256 tokens, doubled until at least half of them are a prompt's, as far as so many can come together.
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
    mixed = _DEFAULT_MIXED_TOKENS
    while mixed < 2 * max_num_seqs:
        mixed *= 2
    mixed = min(mixed, max_num_seqs * max_model_len)
    return {
        "prompt_bs": (1, min(max_num_seqs, 32), min(max_num_seqs, 64)),
        "decode_bs": (1, min(max_num_seqs, 32), max_num_seqs),
        "seq": (start, step, max_model_len),
        "mixed_bs": (max_num_seqs, max_num_seqs, max_num_seqs),
        "mixed_seq": (mixed, mixed, mixed),
    }


def default_ladder(max_num_seqs: int, max_model_len: int, block_size: int) -> BucketLadder:
    """The grid used when no spec is given, over `default_axes`; lengths in tokens.

    Prefill buckets of more than max(2048, max_model_len) tokens are left out: a longer prompt or fuller batch runs in
    several steps. A single sequence has no other to be mixed with. Raises BucketError for sizes that are not positive.
    """
    axes = {name: ramp_up(*axis) for name, axis in default_axes(max_num_seqs, max_model_len, block_size).items()}
    max_tokens = max(_DEFAULT_PREFILL_TOKENS, max_model_len)
    return BucketLadder(
        prefill=tuple(
            Bucket("prefill", b, s) for b, s in product(axes["prompt_bs"], axes["seq"]) if b * s <= max_tokens
        ),
        decode=tuple(Bucket("decode", b, s) for b, s in product(axes["decode_bs"], axes["seq"])),
        mixed=tuple(Bucket("mixed", b, s) for b, s in product(axes["mixed_bs"], axes["mixed_seq"]) if b > 1),
    )


def _check(what: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIM:
            raise BucketError(f"{what}: {name} {value!r} is out of range, use a whole number from 1 to {MAX_DIM}")
