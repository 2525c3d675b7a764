"""How linear weights are stored for a CPU: which tensors, and their bytes panel by panel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmc.compiler.dtypes import F32, FLOATS, U8
from llmc.compiler.targets.cpu.packing import PanelPacker, packed_shape
from llmc.compiler.targets.cpu.quant_packing import QuantPanelPacker, QuantShapes
from llmc.compiler.weight_request import WeightRequest, WeightTensor
from llmc.models.convert import DTYPES as NUMPY_DTYPES
from llmc.models.loader import Parameter
from llmc.quantize import WeightFormat
from llmc.quantize.scheme import SCALE

_PIECE_BYTES = 2 << 20


def weight_tensors(request: WeightRequest, panel_columns: int) -> list[WeightTensor]:
    """See `targets.base.Target`."""
    n, k = request.shape
    layout = f"panels{panel_columns}"
    if request.format is None:
        shape = packed_shape(n, k, panel_columns, FLOATS[request.dtype].per_word, request.parts)
        return [WeightTensor(request.name, request.dtype, shape, layout)]
    shapes = QuantShapes.of(n, k, panel_columns, request.format, request.parts)
    tensors = [
        WeightTensor(request.name, U8.name, shapes.numbers, layout),
        WeightTensor(request.name + SCALE, F32.name, shapes.scale, layout),
    ]
    if shapes.of_group is not None:
        tensors.append(WeightTensor(f"{request.name}.{request.format.of_group}", U8.name, shapes.of_group, layout))
    return tensors


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
    """Numbers, scales and, where the format has them, bytes of groups."""
    n, k = parameter.shape
    packer = QuantPanelPacker(n, k, panel_columns, format, parameter.read, request.parts)
    shapes = QuantShapes.of(n, k, panel_columns, format, request.parts)
    panels, words = shapes.numbers[:2]
    count = min(panels, max(1, _PIECE_BYTES // (words * panel_columns * 4)))
    numbers = np.empty((count, words, panel_columns), np.uint32)
    scale = np.empty((count, *shapes.scale[1:]), np.float32)
    of_group = np.empty((count, *shapes.of_group[1:]), np.uint8) if shapes.of_group is not None else None
    for first in range(0, panels, count):
        here = min(count, panels - first)
        some = (numbers[:here], scale[:here], None if of_group is None else of_group[:here])
        packer.pack(first, *some)
        yield tuple(part.data.cast("B") for part in some if part is not None)
