"""The textual bucket spec and its file form.

    SPEC   = PHASE "=" GRID { "," PHASE "=" GRID }        each phase once, both phases present
    PHASE  = "prefill" | "decode"
    GRID   = AXIS "x" AXIS                                batch, then sequence
    AXIS   = MIN ":" STEP ":" MAX                         ramp-up
           | MIN ":exp:" MAX                              doubling
           | "[" N { "," N } "]"                          explicit
           | N

White space is free. A SPEC that ends in .toml or .json names a file with the keys `prefill` and `decode`; each is
a GRID text, a table {batch = AXIS, seq = AXIS} (AXIS a text, number or list), or a list of [batch, seq] pairs.
"""

from __future__ import annotations

import json
import re
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

from .bucket import MAX_BUCKETS, MAX_DIM, Bucket, BucketError, BucketLadder
from .ladder import exponential, ramp_up

LADDER_PHASES = ("prefill", "decode")
_EXAMPLE = "prefill=1:32:4x128:128:1024,decode=1:128:4x128:128:2048"
_MAX_FILE_BYTES = 1 << 20


def parse_spec(spec: str) -> BucketLadder:
    """Parses a spec text or reads a spec file (name ending in .toml or .json); the module's docstring has the grammar.

    Raises BucketError, one sentence with the offending value, for a spec that is malformed, empty, too large (more
    than 4096 buckets), gives a phase or bucket twice, or lacks a phase.
    """
    text = spec.strip()
    if text.endswith((".toml", ".json")):
        grids = _read_file(Path(text))
    else:
        grids = _parse_text(text)
    missing = [phase for phase in LADDER_PHASES if phase not in grids]
    if missing:
        raise BucketError(f"bucket spec {_short(spec)} has no {missing[0]} buckets: add {missing[0]}=BATCHxSEQ")
    total = sum(len(pairs) for pairs in grids.values())
    if total > MAX_BUCKETS:
        raise BucketError(
            f"bucket spec {_short(spec)} asks for {total} buckets, the limit is {MAX_BUCKETS}: use larger steps"
        )
    return BucketLadder(
        prefill=tuple(Bucket("prefill", batch, seq) for batch, seq in grids["prefill"]),
        decode=tuple(Bucket("decode", batch, seq) for batch, seq in grids["decode"]),
    )


def _parse_text(text: str) -> dict[str, list[tuple[int, int]]]:
    if not text:
        raise BucketError(f"bucket spec is empty: write it like {_EXAMPLE}")
    grids: dict[str, list[tuple[int, int]]] = {}
    for part in _split_outside_brackets(text):
        phase, equals, grid = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise BucketError(f"{_short(part)} in the bucket spec is not PHASE=BATCHxSEQ: write it like {_EXAMPLE}")
        _check_phase(phase)
        if phase in grids:
            raise BucketError(f"bucket spec gives {phase} twice: give each phase once, use a list for irregular sizes")
        grids[phase] = _parse_grid(phase, grid)
    return grids


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
        if depth not in (0, 1):
            break
    if depth != 0:
        raise BucketError(f"bucket spec {_short(text)} has unbalanced brackets: write lists as [1,2,4]")
    return [*parts, text[start:]]


def _parse_grid(phase: str, grid: str) -> list[tuple[int, int]]:
    # "exp" holds an x of its own.
    axes = re.split(r"(?<!e)x", grid)
    if len(axes) != 2:
        raise BucketError(f"{phase} grid {_short(grid)} is not BATCHxSEQ: write it like 1:32:4x128:128:1024")
    return _grid(phase, _parse_axis(axes[0]), _parse_axis(axes[1]))


def _grid(phase: str, batches: tuple[int, ...], seqs: tuple[int, ...]) -> list[tuple[int, int]]:
    if len(batches) * len(seqs) > MAX_BUCKETS:
        raise BucketError(
            f"{phase} grid has {len(batches)} x {len(seqs)} = {len(batches) * len(seqs)} buckets, "
            f"the limit is {MAX_BUCKETS}: use larger steps"
        )
    return list(product(batches, seqs))


def _parse_axis(axis: str) -> tuple[int, ...]:
    axis = axis.strip()
    if axis.startswith("[") and axis.endswith("]"):
        return _sizes([_number(item, axis) for item in axis[1:-1].split(",")], axis)
    fields = [field.strip() for field in axis.split(":")]
    if len(fields) == 1:
        return _sizes([_number(fields[0], axis)], axis)
    if len(fields) != 3:
        raise BucketError(f"{_short(axis)} is not a range of sizes: write MIN:STEP:MAX, [1,2,4] or one number")
    minimum, maximum = _number(fields[0], axis), _number(fields[2], axis)
    if fields[1] == "exp":
        return exponential(minimum, maximum)
    return ramp_up(minimum, _number(fields[1], axis), maximum)


def _number(text: str, axis: str) -> int:
    text = text.strip()
    # The length bound comes first: int() of a million digits is slow, and none of them is a size.
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII):
        raise BucketError(f"{_short(text)} in {_short(axis)} is not a size: use whole numbers from 1 to {MAX_DIM}")
    return int(text)


def _sizes(sizes: list[int], where: object) -> tuple[int, ...]:
    if len(sizes) > MAX_BUCKETS:
        raise BucketError(f"a list of {len(sizes)} sizes is too long, the limit is {MAX_BUCKETS} buckets: shorten it")
    seen: set[int] = set()
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_DIM:
            raise BucketError(
                f"size {size!r} in {_short(str(where))} is out of range: use whole numbers from 1 to {MAX_DIM}"
            )
        if size in seen:
            raise BucketError(f"size {size} in {_short(str(where))} is given twice: list each size once")
        seen.add(size)
    return tuple(sorted(sizes))


def _check_phase(phase: str) -> None:
    if phase not in LADDER_PHASES:
        raise BucketError(f"unknown phase {_short(phase)} in the bucket spec: use {' or '.join(LADDER_PHASES)}")


def _read_file(path: Path) -> dict[str, list[tuple[int, int]]]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise BucketError(f"bucket file {path} is larger than {_MAX_FILE_BYTES} bytes: give a smaller file")
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise BucketError(f"cannot read bucket file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, BucketError):
            raise
        raise BucketError(f"bucket file {path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(data, dict):
        raise BucketError(f"bucket file {path} must hold a table with the keys prefill and decode")
    grids = {}
    for phase, value in data.items():
        _check_phase(phase)
        grids[phase] = _file_grid(phase, value)
    return grids


def _file_grid(phase: str, value: Any) -> list[tuple[int, int]]:
    if isinstance(value, str):
        return _parse_grid(phase, value.strip())
    if isinstance(value, dict):
        if set(value) != {"batch", "seq"}:
            raise BucketError(
                f"{phase} in the bucket file has the keys {_short(', '.join(value))}: give exactly batch and seq"
            )
        return _grid(phase, _file_axis(value["batch"]), _file_axis(value["seq"]))
    if isinstance(value, list):
        pairs = []
        for item in value:
            if not (isinstance(item, list) and len(item) == 2):
                raise BucketError(f"{_short(str(item))} under {phase} in the bucket file is not a [batch, seq] pair")
            pairs.append((_sizes(item[:1], item)[0], _sizes(item[1:], item)[0]))
        return pairs
    raise BucketError(f"{phase} in the bucket file is {_short(str(value))}: give a text, a table or a list of pairs")


def _file_axis(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return _parse_axis(value)
    return _sizes(value if isinstance(value, list) else [value], value)


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 80 else text[:77] + "...")
