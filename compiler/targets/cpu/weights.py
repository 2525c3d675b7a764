"""Storage of linear weights for a CPU: the tensors, and their bytes panel by panel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmc.compiler.dtypes import FLOATS, U8
from llmc.compiler.targets.cpu.packing import PanelPacker, packed_shape
from llmc.compiler.targets.cpu.quant_packing import QuantPanelPacker, QuantShapes
from llmc.compiler.targets.quantized_rows import quantized_rows
from llmc.compiler.weight_request import WeightRequest, WeightTensor
from llmc.models.convert import DTYPES as NUMPY_DTYPES
from llmc.models.loader import Parameter
from llmc.quantize import WeightFormat

_PIECE_BYTES = 2 << 20


def weight_tensors(request: WeightRequest, panel_columns: int) -> list[WeightTensor]:
    """See `targets.base.Target`."""
    n, k = request.shape
    layout = f"panels{panel_columns}"
    if request.format is None:
        shape = packed_shape(n, k, panel_columns, FLOATS[request.dtype].per_word, request.parts)
        return [WeightTensor(request.name, request.dtype, shape, layout)]
    shapes = QuantShapes.of(n, k, panel_columns, request.format, request.parts)
    planes = [
        WeightTensor(f"{request.name}.{plane.name}", plane.dtype, shapes.planes[plane.name], layout)
        for plane in request.format.planes(k)
    ]
    return [WeightTensor(request.name, U8.name, shapes.numbers, layout), *planes]


def weight_pieces(request: WeightRequest, parameter: Parameter, panel_columns: int) -> Iterator[tuple[memoryview, ...]]:
    """See `targets.base.Target`."""
    if request.format is not None:
        yield from _quantized_pieces(request, request.format, parameter, panel_columns)
        return
    n, k = parameter.shape
    packer = PanelPacker(n, k, panel_columns, NUMPY_DTYPES[request.dtype], parameter.read, request.parts)
    count = min(packer.panels, max(1, _PIECE_BYTES // (packer.words * panel_columns * 4)))
    words = np.empty((count, packer.words, panel_columns), np.uint32)
    for first in range(0, packer.panels, count):
        some = words[: packer.panels - first]
        packer.pack(first, some)
        yield (some.data.cast("B"),)


def _quantized_pieces(
    request: WeightRequest, format: WeightFormat, parameter: Parameter, panel_columns: int
) -> Iterator[tuple[memoryview, ...]]:
    """Yields the numbers, then the planes of the format."""
    n, k = parameter.shape
    packer = QuantPanelPacker(n, k, panel_columns, format, quantized_rows(parameter, format), request.parts)
    shapes = QuantShapes.of(n, k, panel_columns, format, request.parts)
    panels, words = shapes.numbers[:2]
    count = min(panels, max(1, _PIECE_BYTES // (words * panel_columns * 4)))
    numbers = np.empty((count, words, panel_columns), np.uint32)
    planes = {p.name: np.empty((count, *shapes.planes[p.name][1:]), p.numpy_dtype) for p in format.planes(k)}
    for first in range(0, panels, count):
        here = min(count, panels - first)
        some = {name: plane[:here] for name, plane in planes.items()}
        packer.pack(first, numbers[:here], some)
        yield tuple(part.data.cast("B") for part in (numbers[:here], *some.values()))
