"""The tensors of a safetensors file of floats, as float32 arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.regular_file import JsonError, open_regular, parse_json, why_pointer
from llmc.runtime.request_error import RequestError
from llmc.shown import shown

Array = npt.NDArray[np.float32]
_MAX_HEADER_BYTES = 16 << 20
_MAX_DIMENSIONS = 8
_BEGIN_BYTES = 64
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class AdapterError(RequestError):
    """An adapter cannot be loaded, or does not exist; the message is one sentence."""


def read_tensors(path: Path, skip: Callable[[str], bool]) -> Iterator[tuple[str, Array]]:
    """(name, values) of each tensor. skip: whether to leave the tensor of a name unread.

    Raises AdapterError for a damaged file, or for tensors of other dtypes.
    """
    try:
        with open_regular(path) as file:
            if (why := why_pointer(file.peek(_BEGIN_BYTES))) is not None:
                raise AdapterError(f"{path} {why}")
            size = os.fstat(file.fileno()).st_size
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > min(size, _MAX_HEADER_BYTES):
                raise _broken(path, f"a header of {start - 8} bytes in a file of {size}")
            header = _header(path, file.read(start - 8))
            for name, entry in header.items():
                if name == "__metadata__" or skip(name):
                    continue
                dtype, shape, begin, end = _entry(path, name, entry, size - start)
                file.seek(start + begin)
                yield name, _floats(file.read(end - begin), dtype).reshape(shape)
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror or error}") from None


def _broken(path: Path, why: str) -> AdapterError:
    return AdapterError(f"{path} is truncated or corrupt ({why}); save the adapter again")


def _header(path: Path, data: bytes) -> dict[str, Any]:
    try:
        header = parse_json(data)
    except JsonError as error:
        raise _broken(path, f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _broken(path, "the header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any, size: int) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of a tensor, in bytes."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(value) is int and value >= 0 for value in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or len(shape) > _MAX_DIMENSIONS:
        raise _broken(path, f"the entry of {shown(name)}")
    if dtype not in _BYTES:
        raise AdapterError(f"{path}: {shown(name)} has the type {shown(dtype)}; use one of {', '.join(_BYTES)}")
    if begin > end or end > size or end - begin != math.prod(shape) * _BYTES[dtype]:
        raise _broken(path, f"{shown(name)} has {end - begin} bytes at {begin} of {size}")
    return dtype, shape, begin, end


def _floats(data: bytes, dtype: str) -> Array:
    if dtype == "F32":
        return np.frombuffer(data, np.dtype("<f4")).astype(np.float32)
    if dtype == "F16":
        return np.frombuffer(data, np.dtype("<f2")).astype(np.float32)
    return (np.frombuffer(data, np.dtype("<u2")).astype(np.uint32) << 16).view(np.float32)
