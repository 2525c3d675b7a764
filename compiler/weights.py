"""Packs parameters into weights.safetensors: a few MiB of each in memory at a time, several parameters at once."""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmc.compiler.config import CompileError
from llmc.compiler.packing import PanelPacker, packed_shape
from llmc.models.convert import DTYPES
from llmc.models.loader import Parameter

ALIGNMENT = 64
_SAFETENSORS_DTYPE = {"f32": "F32", "bf16": "BF16"}
_ITEM_BYTES = {"f32": 4, "bf16": 2}
LANES = {"f32": 1, "bf16": 2}
_PIECE_BYTES = 2 << 20
_EARLY_WRITE_BYTES = 64 << 10
# Linux: sync_file_range(2); None elsewhere, where the sync at the end does all of it.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_SYNC_FILE_RANGE_WRITE = 2


@dataclass(frozen=True)
class PackedWeight:
    """One tensor of weights.safetensors. shape: as stored; file_offset, nbytes in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file_offset: int
    nbytes: int
    packed: bool


@dataclass(frozen=True)
class WeightLayout:
    """Where every weight lies. header: the safetensors header with its length prefix."""

    weights: tuple[PackedWeight, ...]
    header: bytes
    total_bytes: int

    def find(self, name: str) -> PackedWeight:
        return next(w for w in self.weights if w.name == name)


@dataclass(frozen=True)
class WeightRequest:
    """A weight the graphs use: logical shape [N, K] (or any rank when not packed) and stored dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    packed: bool


def plan_weights(requests: Iterable[WeightRequest], panel_columns: int) -> WeightLayout:
    """Lays the weights out one after another; fillers keep every tensor 64-byte aligned."""
    entries: dict[str, dict[str, object]] = {}
    placed: list[tuple[WeightRequest, tuple[int, ...], int, int]] = []
    offset = 0
    for request in requests:
        shape = request.shape
        if request.packed:
            n, k = request.shape
            shape = packed_shape(n, k, panel_columns, LANES[request.dtype])
        nbytes = math.prod(shape) * _ITEM_BYTES[request.dtype]
        entries[request.name] = {
            "dtype": _SAFETENSORS_DTYPE[request.dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        placed.append((request, shape, offset, nbytes))
        offset += nbytes
        filler = -offset % ALIGNMENT
        if filler:
            entries[f"filler.{len(placed)}"] = {
                "dtype": "U8",
                "shape": [filler],
                "data_offsets": [offset, offset + filler],
            }
            offset += filler
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    weights = tuple(
        PackedWeight(r.name, r.dtype, shape, len(header) + start, nbytes, r.packed)
        for r, shape, start, nbytes in placed
    )
    return WeightLayout(weights, header, len(header) + offset)


def write_weights(
    layout: WeightLayout,
    parameters: Iterable[Parameter],
    panel_columns: int,
    path: Path,
    on_weight: Callable[[int, int], None],
    num_threads: int = 1,
) -> dict[str, int]:
    """Writes every weight of `layout` from `parameters` (any order) and returns the CRC-32 of each one's bytes.

    The caller syncs the file: most of it is on its way to the disk when this returns. Raises CompileError when a
    parameter is missing or does not fit, OSError when the disk does not take it.
    """
    values = {p.name: p for p in parameters}
    missing = sorted(w.name for w in layout.weights if w.name not in values)
    if missing:
        raise CompileError(f"the model has no value for weights {', '.join(missing[:5])}")
    checksums: dict[str, int] = {}
    with path.open("wb") as out, ThreadPoolExecutor(max(1, num_threads)) as pool:
        out.truncate(layout.total_bytes)
        _write(out.fileno(), layout.header, 0)
        # The largest first, so that no thread is left with it at the end.
        jobs = {
            pool.submit(_write_weight, out.fileno(), weight, values[weight.name], panel_columns): weight.name
            for weight in sorted(layout.weights, key=lambda w: -w.nbytes)
        }
        try:
            for job in as_completed(jobs):
                checksums[jobs[job]] = job.result()
                on_weight(len(checksums), len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return checksums


def _write_weight(fd: int, weight: PackedWeight, parameter: Parameter, panel_columns: int) -> int:
    """Converts, packs and writes one weight some MiB at a time; returns the CRC-32 of its bytes."""
    checksum, offset = 0, weight.file_offset
    for piece in _pieces(weight, parameter, panel_columns):
        checksum = zlib.crc32(piece, checksum)
        _write(fd, piece, offset)
        offset += len(piece)
    if offset - weight.file_offset != weight.nbytes:
        raise CompileError(
            f"weight {weight.name} has {offset - weight.file_offset} bytes where {weight.nbytes} were planned"
        )
    return checksum


def _pieces(weight: PackedWeight, parameter: Parameter, panel_columns: int) -> Iterator[memoryview]:
    """The bytes of a stored weight in order; a piece is valid until the next one is asked for."""
    dtype, shape = DTYPES[weight.dtype], parameter.shape
    if weight.packed:
        packer = PanelPacker(shape[0], shape[1], panel_columns, dtype, parameter.read)
        panel_bytes = packer.words * panel_columns * 4
        count = min(packer.panels, max(1, _PIECE_BYTES // panel_bytes))
        words = np.empty((count, packer.words, panel_columns), np.uint32)
        for first in range(0, packer.panels, count):
            some = words[: packer.panels - first]
            packer.pack(first, some)
            yield some.data.cast("B")
    else:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        count = min(shape[0], max(1, _PIECE_BYTES // max(1, row_bytes)))
        rows = np.empty((count, *shape[1:]), dtype)
        for first in range(0, shape[0], count):
            some = rows[: shape[0] - first]
            parameter.read(first, some)
            yield some.view(np.uint8).data.cast("B")


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset` and lets the disk begin with it: a sync at the end alone takes far longer."""
    rest = memoryview(data).cast("B")
    at = offset
    while rest:
        written = os.pwrite(fd, rest, at)
        rest, at = rest[written:], at + written
    if _sync_file_range is not None and at - offset >= _EARLY_WRITE_BYTES:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(at - offset), _SYNC_FILE_RANGE_WRITE)
