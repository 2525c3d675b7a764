"""Bucket files: TOML or JSON with the phases as keys, and the text form of Intel Gaudi's vLLM plugin.

In TOML and JSON each phase is one of three. A GRIDS text (`llmc.buckets.spec`); a table {batch = AXIS, seq = AXIS},
with AXIS a text, number or list; or a list of [batch, seq] pairs, with [batch, seq, "total"] for a total context.
`mixed` is optional. The text form is described in `llmc.buckets.gaudi`.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from llmc.graphs_format import PHASES
from llmc.regular_file import parse_json, read_text
from llmc.replaced_file import write_replaced

from .bucket import TOTAL, Bucket, BucketError, BucketLadder
from .gaudi import parse_gaudi
from .grids import (
    Limits,
    Pairs,
    batch_axis,
    check_phase,
    grid_of,
    parse_axis,
    parse_grid,
    seq_axis,
    short,
    sizes_of,
)

_MAX_FILE_BYTES = 1 << 20


def read_file(path: Path, limits: Limits) -> dict[str, Pairs]:
    """(batch, seq) pairs by phase. Raises BucketError naming the file and, for the text form, the line."""
    try:
        text = read_text(path, _MAX_FILE_BYTES)
        if path.suffix == ".txt":
            return parse_gaudi(text, str(path), limits)
        data = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
    except OSError as error:
        raise BucketError(f"cannot read bucket file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, BucketError):
            raise
        kind = {".toml": "TOML", ".json": "JSON", ".txt": "UTF-8 text"}[path.suffix]
        raise BucketError(f"bucket file {path} is not valid {kind}: {error}") from error
    if not isinstance(data, dict):
        raise BucketError(f"bucket file {path} must hold a table with the keys prefill and decode")
    grids = {}
    for phase, value in data.items():
        check_phase(phase)
        grids[phase] = _file_grid(phase, value, limits)
    return grids


def format_file(ladder: BucketLadder, suffix: str, comment: str = "") -> str:
    """The text of a .toml or .json bucket file that `parse_spec` reads back. `comment` only goes into TOML."""
    listed = {phase: [entry(bucket) for bucket in getattr(ladder, phase)] for phase in PHASES}
    pairs = {phase: items for phase, items in listed.items() if items}
    if suffix == ".json":
        rows = [f'  "{phase}": {json.dumps(items)}' for phase, items in pairs.items()]
        return "{\n" + ",\n".join(rows) + "\n}\n"
    lines = [f"# {line}" for line in comment.splitlines()]
    for phase, items in pairs.items():
        lines += [f"{phase} = [", *(f"  {json.dumps(item)}," for item in items), "]"]
    return "\n".join(lines) + "\n"


def entry(bucket: Bucket) -> list[int | str]:
    """A bucket in JSON form: [batch, seq], or [batch, seq, "total"]."""
    return [bucket.batch, bucket.seq, *([TOTAL] if bucket.total else [])]


def write_file(path: Path, ladder: BucketLadder, comment: str = "") -> None:
    """Writes a .toml or .json bucket file atomically. Raises BucketError for another suffix or a failed write."""
    if path.suffix not in (".toml", ".json"):
        raise BucketError(f"bucket file {path} cannot be written: give a name that ends in .toml or .json")
    try:
        write_replaced(path, format_file(ladder, path.suffix, comment))
    except OSError as error:
        raise BucketError(f"cannot write bucket file {path}: {error.strerror or error}") from error


def _file_grid(phase: str, value: Any, limits: Limits) -> Pairs:
    if isinstance(value, str):
        return parse_grid(phase, value.strip(), limits)
    if isinstance(value, dict):
        if set(value) != {"batch", "seq"}:
            raise BucketError(
                f"{phase} in the bucket file has the keys {short(', '.join(value))}: give exactly batch and seq"
            )
        batches = parse_axis(value["batch"], batch_axis(limits)) if isinstance(value["batch"], str) else None
        seqs = parse_axis(value["seq"], seq_axis(phase, limits)) if isinstance(value["seq"], str) else None
        return grid_of(phase, batches or _listed(value["batch"]), seqs or _listed(value["seq"]))
    if isinstance(value, list):
        pairs: Pairs = []
        for item in value:
            total = phase == "decode" and isinstance(item, list) and item[2:] == [TOTAL]
            if not (isinstance(item, list) and len(item) == 2 + total):
                raise BucketError(f"{short(str(item))} under {phase} in the bucket file is not a [batch, seq] pair")
            batch, seq = sizes_of(item[:1], item)[0], sizes_of(item[1:2], item)[0]
            pairs.append((batch, seq, True) if total else (batch, seq))
        return pairs
    raise BucketError(f"{phase} in the bucket file is {short(str(value))}: give a text, a table or a list of pairs")


def _listed(value: Any) -> tuple[int, ...]:
    return sizes_of(value if isinstance(value, list) else [value], value)
