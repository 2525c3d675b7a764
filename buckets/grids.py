"""Grids of bucket specs: sizes of batches, sequences and blocks. The grammar is in `llmc.buckets.spec`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from llmc.graphs_format import PHASES
from llmc.shown import shown

from .bucket import MAX_BUCKETS, MAX_DIM, TOTAL, BucketError
from .ladder import default_limit, exponential, padding_bounded, ramp_up

_AXIS_FORMS = "MIN:STEP:MAX, MIN:STEP:MAX:pad:PERCENT, MIN:STEP:MAX:exp:LIMIT, [1,2,4] or one number"
_FIELDS = {
    "": ("MIN", "STEP", "MAX"),
    "pad": ("MIN", "STEP", "MAX", "pad", "PERCENT", "CAP"),
    "exp": ("MIN", "STEP", "MAX", "exp", "LIMIT"),
}

Pairs = list[tuple[int, int] | tuple[int, int, bool]]
"""(batch, seq) of buckets, optionally with whether seq is a total."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The values of `max` and of a block; None if unknown, in which case a spec that needs it is refused.

    max_num_batched_tokens: most new tokens of a prefill or mixed bucket; None for no limit.
    """

    max_num_seqs: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Axis:
    """The meaning of `max` on an axis: its value, and the flag that sets it. query: whether the axis counts new tokens
    of prompts."""

    maximum: int | None
    flag: str
    zero: bool = False
    query: bool = False


def parse_grid(phase: str, text: str, limits: Limits) -> Pairs:
    """The pairs of a GRIDS text. Raises BucketError."""
    grids = [grid.strip() for grid in text.split("+")]
    if grids == [""]:
        raise BucketError(f"{phase} has no buckets behind the =: write {phase}=BATCHxSEQ, like 1:32:4x128:128:1024")
    if "" in grids:
        raise BucketError(f"{short(text)} has a + with no grid beside it: write BATCHxSEQ+BATCHxSEQ")
    return [pair for grid in grids for pair in _product(phase, grid, limits)]


def _product(phase: str, grid: str, limits: Limits) -> Pairs:
    if "=" in grid:
        raise BucketError(f"{phase} grid {short(grid)} has an = in it: separate the phases by commas")
    # "exp" and "max" contain an x themselves.
    axes = [axis.strip() for axis in re.split(r"(?<!e)(?<!ma)x", grid)]
    if axes[-1].endswith(TOTAL):
        return _totals(phase, grid, axes, limits)
    blocks = [axis.endswith("blk") for axis in axes]
    if blocks not in ([False, False], [False, True], [False, False, True]):
        raise BucketError(f"{phase} grid {short(grid)} is not BATCHxSEQ: write it like 1:32:4x128:128:1024")
    for axis, name in zip(axes, ("batch", "length", "context"), strict=False):
        if not axis.removesuffix("blk"):
            raise BucketError(f"{phase} grid {short(grid)} has no {name}: write BATCHxSEQ, like 1x128")
    batches = parse_axis(axes[0], batch_axis(limits))
    if len(axes) == 3:
        if phase == "decode":
            raise BucketError(f"decode grid {short(grid)} has three axes: its length is SEQ or BLOCKSblk, not both")
        if phase == "mixed":
            raise BucketError(f"mixed grid {short(grid)} has three axes: write BATCHxTOKENS")
        parse_axis(axes[2].removesuffix("blk"), blocks_axis(limits, zero=True))
    if not blocks[1]:
        return grid_of(phase, batches, parse_axis(axes[1], seq_axis(phase, limits)))
    if phase == "mixed":
        raise BucketError(f"mixed grid {short(grid)} counts blocks: write BATCHxTOKENS, tokens of the whole step")
    if phase == "prefill":
        raise BucketError(f"prefill grid {short(grid)} has no query length in tokens: write BATCHxSEQxBLOCKSblk")
    return grid_of(phase, batches, in_tokens(parse_axis(axes[1].removesuffix("blk"), blocks_axis(limits)), limits))


def _totals(phase: str, grid: str, axes: list[str], limits: Limits) -> Pairs:
    """The pairs of a grid whose lengths are totals of all sequences."""
    length = axes[-1].removesuffix(TOTAL).strip()
    if phase != "decode" or len(axes) != 2 or not length.removesuffix("blk"):
        raise BucketError(
            f"{phase} grid {short(grid)} has a {TOTAL} that means nothing: only decode has it, behind the contexts of "
            f"all sequences, as in decode=8x[2048,8192]{TOTAL}"
        )
    batches, meaning = parse_axis(axes[0], batch_axis(limits)), total_axis(limits)
    if length.endswith("blk"):
        block = limits.block_size
        meaning = replace(meaning, maximum=meaning.maximum // block if meaning.maximum and block else None)
        sizes = in_tokens(parse_axis(length.removesuffix("blk"), meaning), replace(limits, max_model_len=None))
    else:
        sizes = parse_axis(length, meaning)
    return totals_of(batches, sizes, limits)


def totals_of(batches: Iterable[int], sizes: Iterable[int], limits: Limits) -> Pairs:
    """Pairs of batches and total contexts.

    Pairs of less than one block per sequence are dropped; totals beyond what a batch can fill are clipped. Raises
    BucketError if none remains.
    """
    block, sizes = limits.block_size or 1, tuple(sizes)
    longest = None if limits.max_model_len is None else -(-limits.max_model_len // block) * block
    found = {
        (batch, size if longest is None else min(size, batch * longest))
        for batch in batches
        for size in sizes
        if size >= batch * block
    }
    if not found:
        raise BucketError(
            f"a total context of {max(sizes)} tokens has less than a block of {block} tokens a sequence: raise it"
        )
    return [(batch, size, True) for batch, size in sorted(found)]


def grid_of(phase: str, batches: tuple[int, ...], seqs: tuple[int, ...]) -> Pairs:
    """All pairs. Raises BucketError if there are more than MAX_BUCKETS."""
    if len(batches) * len(seqs) > MAX_BUCKETS:
        raise BucketError(
            f"{phase} grid has {len(batches)} x {len(seqs)} = {len(batches) * len(seqs)} buckets, "
            f"the limit is {MAX_BUCKETS}: use larger steps"
        )
    return list(product(batches, seqs))


def batch_axis(limits: Limits) -> _Axis:
    """The batch axis, up to max_num_seqs."""
    return _Axis(limits.max_num_seqs, "max-num-seqs")


def seq_axis(phase: str, limits: Limits) -> _Axis:
    """The axis of prompt or context lengths in tokens: up to max_model_len; new tokens up to max_num_batched_tokens."""
    longest, tokens = limits.max_model_len, limits.max_num_batched_tokens
    if phase != "decode" and longest is not None and tokens is not None:
        longest = min(longest, tokens)
    return _Axis(longest, "max-model-len", query=phase == "prefill")


def total_axis(limits: Limits) -> _Axis:
    """The axis of total contexts, up to max_num_seqs × max_model_len, in whole blocks."""
    seqs, longest, block = limits.max_num_seqs, limits.max_model_len, limits.block_size or 1
    most = seqs * -(-longest // block) * block if seqs and longest else None
    return _Axis(most, "max-num-seqs and max-model-len")


def blocks_axis(limits: Limits, zero: bool = False) -> _Axis:
    """The axis of context blocks per sequence."""
    length, block = limits.max_model_len, limits.block_size
    return _Axis(-(-length // block) if length and block else None, "max-model-len and block-size", zero)


def in_tokens(blocks: Iterable[int], limits: Limits) -> tuple[int, ...]:
    """Converts sizes in blocks to tokens; a last block that crosses max_model_len is clipped.

    Raises BucketError if the block size is unknown.
    """
    if limits.block_size is None:
        raise BucketError("sizes in blocks need the block size: give sizes in tokens or a block size")
    sizes = {count * limits.block_size for count in blocks}
    if limits.max_model_len:
        end = limits.max_model_len
        sizes = {end if end < size < end + limits.block_size else size for size in sizes}
    if max(sizes) > MAX_DIM:
        raise BucketError(f"a context of {max(sizes)} tokens is out of range: use at most {MAX_DIM}")
    return tuple(sorted(sizes))


def parse_axis(axis: str, meaning: _Axis) -> tuple[int, ...]:
    """Ascending sizes of an AXIS text. Raises BucketError."""
    axis = axis.strip()
    if not axis:
        raise BucketError(f"a range of sizes is empty: write {_AXIS_FORMS}")
    if axis.startswith("[") and axis.endswith("]"):
        items = [item.strip() for item in axis[1:-1].split(",")]
        if "" in items:
            what = "is empty" if items == [""] else "has a comma with no number beside it"
            raise BucketError(f"list {short(axis)} {what}: write lists as [1,2,4]")
        return sizes_of([_number(item, axis) for item in items], axis, meaning.zero)
    fields = [field.strip() for field in axis.split(":")]
    if "" in fields:
        names = ("MIN", "exp", "MAX") if fields[1] == "exp" else _FIELDS.get(fields[3] if fields[3:] else "", ())
        place = fields.index("")
        missing = names[place] if place < len(names) else "a number"
        raise BucketError(f"{short(axis)} has nothing where {missing} belongs: write {_AXIS_FORMS}")
    if len(fields) == 1:
        return sizes_of([_maximum(fields[0], axis, meaning)], axis, meaning.zero)
    if len(fields) < 3:
        raise BucketError(f"{short(axis)} is not a range of sizes: write {_AXIS_FORMS}")
    minimum, maximum = _number(fields[0], axis), _maximum(fields[2], axis, meaning)
    with_zero = meaning.zero and minimum == 0
    if fields[1] == "exp":
        if len(fields) > 3:
            raise BucketError(f"{short(axis)} is not a range of sizes: write MIN:exp:MAX or MIN:STEP:MAX:exp:LIMIT")
        sizes = exponential(minimum or int(with_zero), maximum)
    else:
        step = _number(fields[1], axis)
        sizes = _range(minimum or (step if with_zero else 0), step, maximum, fields[3:], axis, meaning)
    return (0, *sizes) if with_zero else sizes


def _range(minimum: int, step: int, maximum: int, suffix: list[str], axis: str, meaning: _Axis) -> tuple[int, ...]:
    if not suffix:
        return ramp_up(minimum, step, maximum)
    kind, *values = suffix
    if kind == "pad" and 1 <= len(values) <= 2:
        cap = _number(values[1], axis) if len(values) == 2 else None
        return padding_bounded(minimum, step, maximum, _percent(values[0], axis), cap)
    if kind == "exp" and len(values) <= 1:
        limit = _number(values[0], axis) if values else default_limit(maximum, query=meaning.query)
        return exponential(minimum, maximum, step, limit)
    raise BucketError(f"{short(axis)} is not a range of sizes: write {_AXIS_FORMS}")


def _maximum(text: str, axis: str, meaning: _Axis) -> int:
    if text.strip() != "max":
        return _number(text, axis)
    if meaning.maximum is None:
        raise BucketError(f"max in {short(axis)} needs {meaning.flag}, which is not known here: write a number")
    return meaning.maximum


def _number(text: str, axis: str) -> int:
    text = text.strip()
    # Check the length first: int() of a million digits is slow, and no such number is a size.
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII):
        where = "" if text == axis else f" in {short(axis)}"
        raise BucketError(f"{short(text)}{where} is not a size: use whole numbers from 1 to {MAX_DIM}")
    return int(text)


def _percent(text: str, axis: str) -> float:
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text, re.ASCII):
        raise BucketError(f"{short(text)} in {short(axis)} is not a percentage: use 0 or more and less than 100")
    return float(text)


def sizes_of(sizes: list[int], where: object, zero: bool = False) -> tuple[int, ...]:
    """The sizes, checked and sorted. where: quoted in errors. Raises BucketError."""
    if len(sizes) > MAX_BUCKETS:
        raise BucketError(f"a list of {len(sizes)} sizes is too long, the limit is {MAX_BUCKETS} buckets: shorten it")
    seen: set[int] = set()
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not (0 if zero else 1) <= size <= MAX_DIM:
            raise BucketError(
                f"size {shown(size)} in {short(str(where))} is out of range: use whole numbers from 1 to {MAX_DIM}"
            )
        if size in seen:
            raise BucketError(f"size {size} in {short(str(where))} is given twice: list each size once")
        seen.add(size)
    return tuple(sorted(sizes))


def check_phase(phase: str) -> None:
    """Raises BucketError for an unknown phase."""
    if phase not in PHASES:
        raise BucketError(f"unknown phase {short(phase)} in the bucket spec: use {', '.join(PHASES)}")


def short(text: str) -> str:
    """The text in quotes, cut to 80 characters."""
    text = text.strip()
    return repr(text if len(text) <= 80 else text[:77] + "...")
