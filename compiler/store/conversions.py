"""Errors of stored weights relative to a checkpoint, measured on its tensors in runs of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llmc.compiler.dtypes import F32
from llmc.compiler.store.reads import Reads
from llmc.compiler.weight_request import WeightRequest
from llmc.models.convert import DTYPES, Array
from llmc.models.loader import Parameter
from llmc.models.sources.base import Checkpoint
from llmc.models.weight_map import WeightMap
from llmc.quantize import QuantizeError
from llmc.quantize.conversion import Conversion
from llmc.quantize.formats.base import Quantized, WeightFormat

_BLOCK = 1 << 16  # elements whose temporaries stay in cache
_MOST_ROUNDED = 1 << 22
"""Most elements of a matrix that are rounded again to measure it, in evenly spaced blocks of rows."""


def types_of(weights: WeightMap, checkpoint: Checkpoint) -> dict[str, str]:
    """Stored types of each weight's parts in a checkpoint, by weight name."""
    found = {t.name: {checkpoint.dtype(source.name) for source in t.sources} for t in weights.targets}
    return {name: ", ".join(sorted(types)) for name, types in found.items()}


def conversions(
    requests: Iterable[WeightRequest],
    parameters: Iterable[Parameter],
    types: Mapping[str, str],
    num_threads: int = 1,
    reads: Reads | None = None,
) -> dict[str, Conversion]:
    """Errors of every weight that is not stored exactly, by name. types: of the checkpoint's tensors, by weight. reads:
    told of measured elements.

    Rounding to a format is measured on evenly spaced rows, other conversions on all rows.
    """
    values = {parameter.name: parameter for parameter in parameters}
    wanted = [
        request
        for request in {request.name: request for request in requests}.values()
        if request.name in types and not _is_kept(request, values[request.name], types[request.name])
    ]
    told = reads or Reads()

    def measured(request: WeightRequest) -> Conversion:
        return _measured(request, values[request.name], types[request.name], told)

    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        found = zip(wanted, pool.map(measured, wanted), strict=True)
        return {request.name: one for request, one in found if one.error or one.overflows}


def _is_kept(request: WeightRequest, parameter: Parameter, types: str) -> bool:
    """Whether a weight is stored losslessly, whatever its values."""
    if request.format is None:
        return request.dtype in (F32.name, types)
    stored = parameter.stored
    return stored is not None and stored.format == request.format and stored.columns is None


def _measured(request: WeightRequest, parameter: Parameter, types: str, reads: Reads) -> Conversion:
    squares = of_values = 0.0
    most = largest = 0.0
    overflows = 0
    for value, stored in _pairs(request, parameter):
        reads.add(value.size)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = stored - value
        # Overflow and NaN are excluded: they say nothing of the other values.
        is_finite = np.isfinite(difference)
        overflows += int(np.count_nonzero(np.isfinite(value) & ~is_finite))
        difference[~is_finite] = 0
        finite = np.where(is_finite, value, 0)
        squares += float(np.square(difference, dtype=np.float64).sum())
        of_values += float(np.square(finite, dtype=np.float64).sum())
        most = max(most, float(np.abs(difference).max(initial=0)))
        largest = max(largest, float(np.abs(finite).max(initial=0)))
    error = math.sqrt(squares / of_values) if of_values else 0.0
    # Few digits suffice for readers.
    most = _brief(most / largest if largest else 0.0)
    return Conversion(types, _brief(error), most, _brief(math.sqrt(of_values)), overflows)


def _brief(value: float) -> float:
    return float(f"{value:.4g}")


def _pairs(request: WeightRequest, parameter: Parameter) -> Iterator[tuple[Array, Array]]:
    """(checkpoint rows, stored rows), both float32."""
    n, k = parameter.shape[0], math.prod(parameter.shape[1:])
    rows = max(1, min(n, _BLOCK // max(1, k)))
    blocks = -(-n // rows)
    count = blocks if request.format is None else min(blocks, max(1, _MOST_ROUNDED // (rows * k)))
    for index in range(count):
        first = index * blocks // count * rows
        value = np.empty((min(rows, n - first), *parameter.shape[1:]), np.float32)
        parameter.read(first, value)
        if request.format is not None:
            yield value, _rounded(value, request.format)
            continue
        stored = np.empty(value.shape, DTYPES[request.dtype])
        parameter.read(first, stored)
        yield value, stored.astype(np.float32)


def _rounded(value: Array, format: WeightFormat) -> Array:
    out = Quantized.empty(format, *value.shape)
    try:
        format.quantize_rows(value.copy(), out)
    except QuantizeError:
        # Packing reports the error.
        return value
    found: Array = out.value().astype(np.float32)
    return found
