"""Candidate buckets that may serve the steps of a histogram better than the existing ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from llmc.buckets.bucket import MAX_DIM, Bucket, whole_blocks

from .shapes import Limits, ShapeUse

MAX_CANDIDATES = 48
_OCTAVE_PARTS = 4
_MIXED_STEP = 16


def candidates(
    uses: Sequence[ShapeUse],
    ladder: Iterable[Bucket],
    limits: Limits,
    blocked: Iterable[Bucket] = (),
    *,
    totals: bool = False,
) -> list[Bucket]:
    """For each heavily used shape: buckets that fit it, and reductions of its present bucket. Sorted. totals: decode
    buckets for a total of contexts, too.

    None has more rows than the ladder's largest bucket, because larger steps would need more memory.
    """
    have, no = set(ladder), set(blocked)
    if not have:
        return []
    most_rows = max(bucket.max_tokens for bucket in have)
    # Guesses are rows too, so the ladder of a server that speculates has more rows than sequences.
    rows = max((bucket.batch for bucket in have if bucket.phase == "decode"), default=0)
    bounds = replace(limits, max_num_seqs=max(limits.max_num_seqs, rows))
    weight: dict[Bucket, float] = {}
    for use in uses:
        today = use.bucket or limits.choose(have, use.shape)
        for bucket in _around(use, have, limits, totals=totals):
            new = bucket not in have and bucket not in no
            if not new or not bounds.takes(bucket) or not limits.holds(bucket, use.shape):
                continue
            if bucket.max_tokens > most_rows or (today is not None and limits.covers(bucket, today)):
                continue
            weight[bucket] = weight.get(bucket, 0.0) + use.steps
    ranked = sorted(weight, key=lambda bucket: (-weight[bucket], bucket))
    return sorted(ranked[:MAX_CANDIDATES])


def _around(use: ShapeUse, have: set[Bucket], limits: Limits, *, totals: bool) -> set[Bucket]:
    shape, block = use.shape, limits.block_size
    most_context = whole_blocks(limits.max_model_len, block)
    found: set[tuple[str, int, int]] = set()
    sums, rows = set[int](), 1
    if shape.phase == "decode":
        # As long as existing buckets: contexts grow, and the next step should fit too.
        seqs = {
            bucket.seq
            for bucket in have
            if bucket.phase == "decode" and not bucket.total and limits.context(bucket) >= shape.context
        }
        lengths = {min(seqs)} | {max(seqs)} if seqs else {most_context}
        lengths.add(min(rounded(shape.context, block), most_context))
        rows = max(shape.sequences, shape.tokens)
        found = {("decode", rows, min(length, limits.max_model_len)) for length in lengths}
        # Of contexts that are all alike, a total brings nothing.
        if totals and shape.total < shape.rectangle:
            larger = [bucket.seq for bucket in have if bucket.total and bucket.seq >= shape.total]
            most = rows * most_context
            # A graph has a block for each row, since each might be a sequence.
            sums = {min(max(one, rows * block), most) for one in (rounded(shape.total, block), *larger)}
    elif shape.phase == "prefill":
        each = -(-shape.tokens // shape.sequences)
        found = {("prefill", shape.sequences, rounded(each, min(block, 16)))}
    else:
        batches = {b.batch for b in have if b.phase == "mixed" and b.batch >= shape.sequences}
        found = {("mixed", batch, max(batch, rounded(shape.tokens, _MIXED_STEP))) for batch in batches}
    return {Bucket(phase, batch, seq) for phase, batch, seq in found if 1 <= seq <= MAX_DIM} | {
        Bucket("decode", rows, total, total=True) for total in sums if total <= MAX_DIM
    }


def rounded(length: int, step: int) -> int:
    """Rounded up to a quarter of an octave and to whole steps, so that similar shapes yield one bucket."""
    octave = 1 << max(0, max(length, 1).bit_length() - 1)
    part = max(1, octave // _OCTAVE_PARTS)
    return whole_blocks(-(-length // part) * part, step)
