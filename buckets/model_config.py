"""config.json of a model directory, of which plans without an artifact take the model's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmc.buckets.bucket import BucketError
from llmc.regular_file import JsonError, parse_json, read_regular


def read_config(model: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises BucketError."""
    path = model / "config.json"
    try:
        data = parse_json(read_regular(path, 1 << 24))
    except OSError as error:
        raise BucketError(f"cannot read {path}: {error.strerror or error}; give a model directory") from None
    except JsonError:
        raise BucketError(f"{path} is not valid JSON; download the model again") from None
    if not isinstance(data, dict):
        raise BucketError(f"{path} is not a JSON object; download the model again")
    return data
