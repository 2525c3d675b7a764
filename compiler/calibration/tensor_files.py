"""Safetensors files written tensor by tensor, with only one in memory, and read back mapped."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

from llmc.quantize.checkpoints import CARRIERS, StoredTensor

_ALIGN = 8


def byte_count(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * CARRIERS[tensor.dtype].itemsize


def write_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Writes a file whole or not at all, with names in the given order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = byte_count(tensor)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.load().tobytes())
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Reads a file of `write_tensors`, as views of the mapping."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: StoredTensor.in_buffer(entry["dtype"], tuple(entry["shape"]), data, 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }
