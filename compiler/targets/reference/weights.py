"""Weights of the reference target: rows padded to whole words; 4-bit numbers two a byte, others one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmc.compiler.dtypes import FLOATS, U8
from llmc.compiler.targets.quantized_rows import quantized_rows
from llmc.compiler.targets.reference.kernels.padding import number_bytes
from llmc.compiler.weight_request import WeightRequest, WeightTensor
from llmc.models.convert import DTYPES as NUMPY_DTYPES
from llmc.models.loader import Parameter
from llmc.quantize import WeightFormat
from llmc.quantize.formats.base import Quantized

_PIECE_BYTES = 2 << 20


def weight_tensors(request: WeightRequest) -> list[WeightTensor]:
    """See `targets.base.Target`."""
    n, k = request.shape
    format = request.format
    if format is None:
        per_word = FLOATS[request.dtype].per_word
        return [WeightTensor(request.name, request.dtype, (n, -(-k // per_word) * per_word))]
    numbers = WeightTensor(request.name, U8.name, (n, number_bytes(k, format.bits)))
    planes = format.planes(k)
    return [numbers, *(WeightTensor(f"{request.name}.{plane.name}", plane.dtype, (n, plane.count)) for plane in planes)]


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
    padded, read_rows = number_bytes(k, 8), quantized_rows(parameter, format)
    count = max(1, _PIECE_BYTES // padded)
    for first in range(0, n, count):
        rows = min(count, n - first)
        numbers = np.zeros((rows, padded), np.uint8)
        some = Quantized(format, numbers[:, :k], Quantized.empty(format, rows, k).planes)
        read_rows(first, some)
        if format.bits == 4:
            numbers = numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4)
        yield tuple(np.ascontiguousarray(part).data.cast("B") for part in (numbers, *some.planes.values()))
