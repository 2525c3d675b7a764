"""Measures the quantization of a checkpoint's matrices: their size and error. Compiles nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llmc.compiler.config import CompileConfig
from llmc.compiler.dtypes import FLOATS
from llmc.compiler.resolve import resolve
from llmc.models.loader import load_parameters
from llmc.quantize.error import WeightError, weight_error


@dataclass(frozen=True)
class LayerError:
    """name: of the weight. error: root of (squared change / squared weight)."""

    name: str
    scheme: str
    error: float


@dataclass(frozen=True)
class Rounding:
    """weight_bytes: of all matrices, scales included. error: over all quantized matrices; see LayerError."""

    bits_per_weight: float
    weight_bytes: int
    error: float
    layers: tuple[LayerError, ...]


def rounding_of(config: CompileConfig, on_weight: Callable[[int, int], None]) -> Rounding:
    """Quantizes every matrix as `config` requests, one at a time. Raises what `resolve` raises for a bad model."""
    source = config.open_source()
    resolved = resolve(config, source)
    parameters = load_parameters(resolved.model, source.checkpoint(), resolved.act_dtype)
    matrices = [p for p in parameters if len(p.shape) == 2]
    total, bits, elements = WeightError(0.0, 0.0), 0.0, 0
    layers = []
    for done, matrix in enumerate(matrices, 1):
        scheme, count = resolved.recipe.schemes.get(matrix.name), math.prod(matrix.shape)
        elements += count
        if scheme is None:
            bits += count * 8 * FLOATS[resolved.act_dtype].item_bytes
        else:
            bits += count * scheme.weight.bits_per_weight(matrix.shape[1])
            error = weight_error(matrix.shape, matrix.read, scheme.weight)
            layers.append(LayerError(matrix.name, scheme.name, error.relative))
            total += error
        on_weight(done, len(matrices))
    return Rounding(bits / elements, round(bits / 8), total.relative, tuple(layers))
