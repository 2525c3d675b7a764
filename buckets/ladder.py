"""Ladders: the sizes along one axis of the bucket grid, and the default grid."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from itertools import product

from llmc.shown import shown

from .bucket import MAX_BUCKETS, MAX_DIM, PROMPT_PHASES, REQUIRED_PHASES, Bucket, BucketError, BucketLadder

DEFAULT_MAX_NUM_SEQS = 16
DEFAULT_BLOCK_SIZE = 32
"""Of a model without states."""
_DEFAULT_SEQ_STEP = 128
_DEFAULT_SEQ_STEPS = 16
_DEFAULT_PREFILL_TOKENS = 2048
_DEFAULT_MIXED_TOKENS = 256


def ramp_up(minimum: int, step: int, maximum: int) -> tuple[int, ...]:
    """`minimum` doubles until it reaches `step`, then multiples of `step` up to `maximum`, which is always included.

    (2, 32, 64) gives 2 4 8 16 32 64. Raises BucketError if a value is not positive, minimum > maximum, or the ladder
    has more than MAX_BUCKETS sizes.
    """
    what = f"{minimum}:{step}:{maximum}"
    _check(what, min=minimum, step=step, max=maximum)
    if minimum > maximum:
        raise BucketError(f"range {what} has min {minimum} above max {maximum}: swap them, MIN:STEP:MAX")
    # Count before building: an absurd range must not exhaust memory.
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
    """Without `limit`, doubling; with it, `limit` sizes in geometric progression, rounded up to `step`.

    The second form is the exponential strategy of Intel Gaudi's vLLM plugin: `warmup_range_with_limit` in
    vllm_gaudi/extension/bucketing/exponential.py, described at
    https://docs.vllm.ai/projects/gaudi/en/latest/features/bucketing_mechanism.html. Size i of n is min · (max / min)^(i
    / (n - 1)), rounded up to a multiple of step, duplicates dropped, the last one max. A minimum of 1 is an extra size,
    and the progression starts at the step; then there may be limit + 1 sizes. (128, 2048, 128, 10) gives 128 256 384
    512 640 896 1152 1536 2048, (1, 16, 2, 5) gives 1 2 4 6 10 16. Powers are computed in double precision, like the
    plugin's: (1, 32, 1, 6) gives 1 2 4 9 17 32. One difference: a minimum that is no multiple of the step is kept; the
    plugin rounds it up.
    Raises BucketError if a value is not positive, minimum > maximum or limit > MAX_BUCKETS.
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
    sizes = geometric(step if minimum == 1 else minimum, step, maximum, limit)
    return tuple(sorted({minimum, *sizes[0 if minimum == 1 else 1 :], maximum}))


def geometric(start: int, step: int, maximum: int, limit: int) -> list[int]:
    """`limit` (at least 2) sizes from `start` to `maximum` in geometric progression: multiples of step, or maximum."""
    # The plugin's own order of operations: any other rounds up elsewhere.
    powers = (start * (maximum / start) ** (1.0 / (limit - 1) * index) for index in range(limit))
    return [min(math.ceil(power / step) * step, maximum) for power in powers]


def default_limit(maximum: int, query: bool = False) -> int:
    """Number of sizes in an exponential ladder without a limit, as in the plugin: ceil(log2(max)) + 1.

    query: for new tokens of prompts, ceil(log2(max)), at least 1.
    """
    return max(1, (maximum - 1).bit_length() + (0 if query else 1))


def padding_bounded(minimum: int, step: int, maximum: int, percent: float, cap: int | None = None) -> tuple[int, ...]:
    """The ramp-up ladder without the sizes that are not needed to keep padding within a bound.

    The size after a is the largest b of ramp-up with (b - a - 1) / b ≤ percent / 100 and, with `cap`, b - a - 1 ≤ cap:
    length a + 1 pads the most. If even the neighbour of a exceeds the bound, it is taken. So the bound holds at every
    length above `minimum` for step 1, otherwise from about step / percent on. Sizes up to `step`, the doubling part,
    are kept.
    It follows the padding-aware strategy of Intel Gaudi's vLLM plugin
    (vllm_gaudi/extension/bucketing/padding_aware.py). Arguments are the same, and its four documented examples give the
    same sizes. Unlike the plugin, it does not keep multiples of the cap as such, and percent may reach 100, exclusive.
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


def default_tokens(max_model_len: int) -> int:
    """Most new tokens of a default prefill bucket; a longer prompt or fuller batch takes several steps."""
    return max(_DEFAULT_PREFILL_TOKENS, max_model_len)


def default_axes(
    max_num_seqs: int, max_model_len: int, block_size: int, max_num_batched_tokens: int | None = None
) -> dict[str, tuple[int, int, int]]:
    """(min, step, max) of the default ramp-up axes: prompt_bs, decode_bs, prompt_seq, decode_seq, mixed_bs, mixed_seq.

    Batches: prefill (1, min(max_num_seqs, 32), min(max_num_seqs, 64)), decode (1, min(max_num_seqs, 32), max_num_seqs).
    Lengths start at the smallest multiple of block_size that is at least 128. The step is that value, doubled until 16
    steps reach max_model_len, which limits the graphs of a long context. Prompt lengths end at max_num_batched_tokens.
    Mixed steps: max_num_seqs sequences, and 256 tokens. The tokens are doubled until at least half can be a prompt's,
    within max_num_batched_tokens and what can occur in one step.
    Raises BucketError for sizes that are not positive.
    """
    tokens = default_tokens(max_model_len) if max_num_batched_tokens is None else max_num_batched_tokens
    _check(
        f"default ladder for max_num_seqs={max_num_seqs}, max_model_len={max_model_len}, block_size={block_size}",
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_batched_tokens=tokens,
    )
    start = min(-(-_DEFAULT_SEQ_STEP // block_size) * block_size, max_model_len)
    step = start
    while step * _DEFAULT_SEQ_STEPS < max_model_len:
        step *= 2
    mixed = _DEFAULT_MIXED_TOKENS
    while mixed < 2 * max_num_seqs:
        mixed *= 2
    mixed = min(mixed, max_num_seqs * max_model_len, tokens)
    longest = min(max_model_len, tokens)
    return {
        "prompt_bs": (1, min(max_num_seqs, 32), min(max_num_seqs, 64)),
        "decode_bs": (1, min(max_num_seqs, 32), max_num_seqs),
        "prompt_seq": (min(start, longest), step, longest),
        "decode_seq": (start, step, max_model_len),
        "mixed_bs": (min(max_num_seqs, mixed),) * 3,
        "mixed_seq": (mixed,) * 3,
    }


def default_ladder(
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    max_num_batched_tokens: int | None = None,
    phases: tuple[str, ...] = REQUIRED_PHASES,
) -> BucketLadder:
    """The grid over `default_axes`, used without a spec; lengths in tokens.

    Prefill buckets of more than max_num_batched_tokens (None: max(2048, max_model_len)) are left out. There are no
    mixed buckets for a single sequence. phases: of the ladder. Raises BucketError for sizes that are not positive.
    """
    axes = default_axes(max_num_seqs, max_model_len, block_size, max_num_batched_tokens)
    return ladder_of_axes(
        {name: ramp_up(*axis) for name, axis in axes.items()},
        default_tokens(max_model_len) if max_num_batched_tokens is None else max_num_batched_tokens,
        phases,
    )


def ladder_of_axes(
    sizes: Mapping[str, tuple[int, ...]], max_tokens: int, phases: tuple[str, ...] = REQUIRED_PHASES
) -> BucketLadder:
    """The ladder with given sizes per axis, named as in `default_axes`.

    Prefill and mixed buckets of more than max_tokens new tokens, and mixed ones of a single sequence, are left out.
    Raises BucketError if no prefill bucket remains.
    """
    prefill = [
        Bucket("prefill", batch, seq)
        for batch in sizes["prompt_bs"]
        for seq in sizes["prompt_seq"][: bisect_right(sizes["prompt_seq"], max_tokens // batch)]
    ]
    if not prefill:
        raise BucketError(
            f"the smallest prefill bucket has {sizes['prompt_bs'][0] * sizes['prompt_seq'][0]} tokens but "
            f"max-num-batched-tokens is {max_tokens}: give a smaller bucket or raise it"
        )
    if phases == PROMPT_PHASES:
        return BucketLadder(tuple(prefill), (), phases=phases)
    mixed = _grid("mixed", sizes["mixed_bs"], sizes["mixed_seq"])
    return BucketLadder(
        prefill=tuple(prefill),
        decode=_grid("decode", sizes["decode_bs"], sizes["decode_seq"]),
        mixed=tuple(bucket for bucket in mixed if bucket.batch > 1 and bucket.seq <= max_tokens),
    )


def _grid(phase: str, batches: tuple[int, ...], seqs: tuple[int, ...]) -> tuple[Bucket, ...]:
    """All buckets of the sizes. Raises BucketError if there are more than MAX_BUCKETS."""
    if len(batches) * len(seqs) > MAX_BUCKETS:
        raise BucketError(
            f"{phase} grid has {len(batches)} x {len(seqs)} = {len(batches) * len(seqs)} buckets, "
            f"the limit is {MAX_BUCKETS}: use larger steps"
        )
    return tuple(Bucket(phase, batch, seq) for batch, seq in product(batches, seqs))


def _check(what: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIM:
            raise BucketError(f"{what}: {name} {shown(value)} is out of range, use a whole number from 1 to {MAX_DIM}")
