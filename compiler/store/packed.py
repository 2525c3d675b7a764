"""Records of packed checkpoints, beside the cache: `ROOT/packed/KEY.json`.

A key contains a checkpoint's path and modification time. An artifact must not: equal weights are equal bytes on every
machine. Without a record, weights are packed again, to the same bytes.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llmc.quantize.conversion import Conversion, conversion_of
from llmc.regular_file import parse_json, read_regular

_KEPT = 64


@dataclass(frozen=True)
class Packed:
    """Facts of packed weights: CRC-32 of each tensor's bytes, and conversion errors, by name."""

    crcs: dict[str, int]
    conversions: dict[str, Conversion]


def recorded_weights(root: Path, key: str) -> Packed | None:
    """The record for `key`; None if there is none."""
    try:
        found = parse_json(read_regular(_path(root, key), 1 << 24))
        crcs, conversions = found["crcs"], found["conversions"]
        if all(type(crc) is int for crc in crcs.values()):
            return Packed(dict(crcs), {name: conversion_of(record) for name, record in conversions.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def record_weights(root: Path, key: str, packed: Packed) -> None:
    """Records packed weights, and keeps only the latest records. A failed write merely costs a packing."""
    path = _path(root, key)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(packed)))
        temporary.replace(path)
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for old in files[:-_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _path(root: Path, key: str) -> Path:
    return root / "packed" / f"{key}.json"
