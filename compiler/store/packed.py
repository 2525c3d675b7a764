"""Which checkpoints were packed into which weights, beside the cache: `ROOT/packed/KEY.json`.

A key holds where a checkpoint lies and when it changed, which an artifact must not: the same weights are the same bytes
on every machine and every day. Without a record weights are packed again, to the same bytes.
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
    """What is known of packed weights: CRC-32 of each tensor's bytes, and what was lost of a checkpoint, by name."""

    crcs: dict[str, int]
    conversions: dict[str, Conversion]


def recorded_weights(root: Path, key: str) -> Packed | None:
    """What was packed under `key`; None when nothing is known of."""
    try:
        found = parse_json(read_regular(_path(root, key), 1 << 24))
        crcs, conversions = found["crcs"], found["conversions"]
        if all(type(crc) is int for crc in crcs.values()):
            return Packed(dict(crcs), {name: conversion_of(record) for name, record in conversions.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def record_weights(root: Path, key: str, packed: Packed) -> None:
    """Notes what was packed; of all such notes the latest are kept. One that cannot be written costs a packing."""
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
