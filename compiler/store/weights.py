"""Packs parameters into weights.safetensors: several parameters at once, a few MiB of each in memory."""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import DTYPES, I32, U8
from llmc.compiler.store.reads import Reads
from llmc.compiler.targets.base import Target
from llmc.compiler.weight_request import COLUMNS, WeightRequest, WeightTensor
from llmc.graphs_format import ALIGNMENT
from llmc.models.convert import DTYPES as NUMPY_DTYPES
from llmc.models.loader import Parameter
from llmc.quantize import QuantizeError

_PIECE_BYTES = 2 << 20
_EARLY_WRITE_BYTES = 64 << 10
# sync_file_range(2) on Linux; elsewhere None, and the final sync does all the work.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_SYNC_FILE_RANGE_WRITE = 2


@dataclass(frozen=True)
class PackedWeight:
    """One tensor of weights.safetensors. shape: as stored. file_offset, nbytes: in bytes. layout: see `WeightTensor`.

    request: of the weight that the tensor stores, or is a part of.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file_offset: int
    nbytes: int
    layout: str
    request: WeightRequest


@dataclass(frozen=True)
class WeightLayout:
    """The position of every weight. header: the safetensors header with its length prefix."""

    weights: tuple[PackedWeight, ...]
    header: bytes
    total_bytes: int

    def find(self, name: str) -> PackedWeight:
        return next(w for w in self.weights if w.name == name)


def plan_weights(requests: Iterable[WeightRequest], target: Target) -> WeightLayout:
    """Lays weights out consecutively; fillers keep every tensor 64-byte aligned."""
    entries: dict[str, dict[str, object]] = {}
    placed: list[PackedWeight] = []
    offset = 0
    for tensor, request in ((tensor, wanted) for wanted in requests for tensor in _tensors(wanted, target)):
        name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
        nbytes = math.prod(shape) * DTYPES[dtype].item_bytes
        entries[name] = {
            "dtype": DTYPES[dtype].safetensors,
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        placed.append(PackedWeight(name, dtype, shape, offset, nbytes, tensor.layout, request))
        offset += nbytes
        filler = -offset % ALIGNMENT
        if filler:
            entries[f"filler.{len(placed)}"] = {
                "dtype": U8.safetensors,
                "shape": [filler],
                "data_offsets": [offset, offset + filler],
            }
            offset += filler
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    weights = tuple(replace(w, file_offset=len(header) + w.file_offset) for w in placed)
    return WeightLayout(weights, header, len(header) + offset)


def _tensors(request: WeightRequest, target: Target) -> list[WeightTensor]:
    """All tensors that store a weight."""
    if request.packed:
        orders = (request.columns * request.shape[1],)
        columns = [WeightTensor(f"{request.name}.{COLUMNS}", I32.name, orders)] if request.columns else []
        return [*target.weight_tensors(request), *columns]
    return [WeightTensor(request.name, request.dtype, request.shape)]


def write_weights(
    layout: WeightLayout,
    parameters: Iterable[Parameter],
    target: Target,
    path: Path,
    on_weight: Callable[[int, int], None],
    num_threads: int = 1,
    reads: Reads | None = None,
) -> dict[str, int]:
    """Writes every weight of `layout` from `parameters` (any order); returns the CRC-32 of each tensor's bytes.

    reads: told of packed elements.

    The caller must sync the file; most of it is already being written back. Raises CompileError if a parameter is
    missing or does not fit, OSError if writing fails.
    """
    values = {p.name: p for p in parameters}
    parts: dict[str, list[PackedWeight]] = {}
    for weight in layout.weights:
        parts.setdefault(weight.request.name, []).append(weight)
    missing = sorted(name for name in parts if name not in values)
    if missing:
        raise CompileError(f"the model has no value for weights {', '.join(missing[:5])}")
    checksums: dict[str, int] = {}
    told = reads or Reads()
    with path.open("wb") as out, ThreadPoolExecutor(max(1, num_threads)) as pool:
        out.truncate(layout.total_bytes)
        _write(out.fileno(), layout.header, 0)
        # The largest first, so that no thread is left with it at the end.
        jobs = {
            pool.submit(_write_weight, out.fileno(), tensors, values[name], target, told)
            for name, tensors in sorted(parts.items(), key=lambda item: -item[1][0].nbytes)
        }
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                checksums.update(job.result())
                on_weight(done, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # In file order, whichever thread finished first.
    return {weight.name: checksums[weight.name] for weight in layout.weights}


def _write_weight(
    fd: int, tensors: list[PackedWeight], parameter: Parameter, target: Target, reads: Reads
) -> dict[str, int]:
    """Converts, packs and writes one weight a few MiB at a time; returns the CRC-32 of each of its tensors' bytes."""
    checksums, offsets = dict.fromkeys((t.name for t in tensors), 0), {t.name: t.file_offset for t in tensors}
    elements = math.prod(parameter.shape)
    for pieces in _pieces(tensors[0].request, parameter, target):
        for tensor, piece in zip(tensors, pieces, strict=True):
            checksums[tensor.name] = zlib.crc32(piece, checksums[tensor.name])
            _write(fd, piece, offsets[tensor.name])
            offsets[tensor.name] += len(piece)
        reads.add(elements * len(pieces[0]) // max(1, tensors[0].nbytes))
    for tensor in tensors:
        nbytes = offsets[tensor.name] - tensor.file_offset
        if nbytes != tensor.nbytes:
            raise CompileError(f"weight {tensor.name} has {nbytes} bytes where {tensor.nbytes} were planned")
    return checksums


def _pieces(request: WeightRequest, parameter: Parameter, target: Target) -> Iterator[tuple[memoryview, ...]]:
    """The bytes of a weight's tensors in order; a piece is valid until the next is requested."""
    if request.packed:
        rest = [_columns(parameter, request.columns)] if request.columns else []
        try:
            for pieces in target.weight_pieces(request, parameter):
                yield (*pieces, *rest)
                rest = [memoryview(b"")] * len(rest)
        except QuantizeError as error:
            raise CompileError(f"cannot quantize {request.name}: {error}") from None
        return
    shape, dtype = parameter.shape, NUMPY_DTYPES[request.dtype]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    count = min(shape[0], max(1, _PIECE_BYTES // max(1, row_bytes)))
    rows = np.empty((count, *shape[1:]), dtype)
    for first in range(0, shape[0], count):
        some = rows[: shape[0] - first]
        parameter.read(first, some)
        yield (some.view(np.uint8).data.cast("B"),)


def _columns(parameter: Parameter, orders: int) -> memoryview:
    """The bytes of NAME.columns: for each column, its number in the model's weight."""
    plain = np.arange(parameter.shape[1], dtype=np.int32)
    columns = plain if parameter.columns is None else parameter.columns
    if columns.ndim == 1 and orders > 1:
        columns = np.tile(columns, orders)
    return np.ascontiguousarray(columns, np.int32).data.cast("B")


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset` and starts write-back: a single sync at the end takes far longer."""
    rest = memoryview(data).cast("B")
    at = offset
    while rest:
        written = os.pwrite(fd, rest, at)
        rest, at = rest[written:], at + written
    if _sync_file_range is not None and at - offset >= _EARLY_WRITE_BYTES:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(at - offset), _SYNC_FILE_RANGE_WRITE)
