"""Weights of the reference target: rows as they are, padded to whole words; numbers of 4 bits two a byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmc.compiler.dtypes import F32, FLOATS, U8
from llmc.compiler.targets.reference.kernels.padding import number_bytes
from llmc.compiler.weight_request import WeightRequest, WeightTensor
from llmc.models.convert import DTYPES as NUMPY_DTYPES
from llmc.models.loader import Parameter
from llmc.quantize import WeightFormat
from llmc.quantize.rtn import quantize_rows
from llmc.quantize.scheme import SCALE

_PIECE_BYTES = 2 << 20


def weight_tensors(request: WeightRequest) -> list[WeightTensor]:
    """See `targets.base.Target`."""
    n, k = request.shape
    format = request.format
    if format is None:
        per_word = FLOATS[request.dtype].per_word
        return [WeightTensor(request.name, request.dtype, (n, -(-k // per_word) * per_word))]
    tensors = [
        WeightTensor(request.name, U8.name, (n, number_bytes(k, format.bits))),
        WeightTensor(request.name + SCALE, F32.name, (n, format.scales(k))),
    ]
    if format.of_group:
        tensors.append(WeightTensor(f"{request.name}.{format.of_group}", U8.name, (n, format.groups(k))))
    return tensors


def weight_pieces(request: WeightRequest, parameter: Parameter) -> Iterator[tuple[memoryview, ...]]:
    """See `targets.base.Target`."""
    if request.format is not None:
        yield from _quantized_pieces(request.format, parameter)
        return
    n, k = parameter.shape
    dtype, (_, width) = NUMPY_DTYPES[request.dtype], weight_tensors(request)[0].shape
    count = max(1, _PIECE_BYTES // (width * dtype.itemsize))
    for first in range(0, n, count):
        rows = np.zeros((min(count, n - first), width), dtype)
        parameter.read(first, rows[:, :k])
        yield (rows.view(np.uint8).data.cast("B"),)


def _quantized_pieces(format: WeightFormat, parameter: Parameter) -> Iterator[tuple[memoryview, ...]]:
    n, k = parameter.shape
    padded = number_bytes(k, 8)
    count = max(1, _PIECE_BYTES // padded)
    for first in range(0, n, count):
        rows = min(count, n - first)
        values = np.empty((rows, k), np.float32)
        parameter.read(first, values)
        numbers = np.zeros((rows, padded), np.uint8)
        scale = np.zeros((rows, format.scales(k)), np.float32)
        of_group = np.zeros((rows, format.groups(k)), np.uint8) if format.of_group else None
        quantize_rows(values, numbers[:, :k], scale, of_group, format)
        if format.bits == 4:
            numbers = numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4)
        parts = (numbers, scale) if of_group is None else (numbers, scale, of_group)
        yield tuple(np.ascontiguousarray(part).data.cast("B") for part in parts)
