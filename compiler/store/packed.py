"""Which checkpoints were packed into which weights, beside the cache: `ROOT/packed/KEY.json`.

A key holds where a checkpoint lies and when it changed, which an artifact must not: the same weights are the same bytes
on every machine and every day. Without a record weights are packed again, to the same bytes.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llmc.regular_file import parse_json, read_regular

_KEPT = 64


def recorded_weights(root: Path, key: str) -> dict[str, int] | None:
    """CRC-32 of every weight that was packed under `key`, by name; None when none is known of."""
    try:
        crcs = parse_json(read_regular(_path(root, key), 1 << 24))
    except (OSError, ValueError):
        return None
    if isinstance(crcs, dict) and all(type(crc) is int for crc in crcs.values()):
        return crcs
    return None


def record_weights(root: Path, key: str, crcs: Mapping[str, int]) -> None:
    """Notes what was packed; of all such notes the latest are kept. One that cannot be written costs a packing."""
    path = _path(root, key)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(crcs))
        temporary.replace(path)
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for old in files[:-_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _path(root: Path, key: str) -> Path:
    return root / "packed" / f"{key}.json"
