"""Quantization: schemes by exact name, the choice of a scheme per layer, and rounding to nearest. Imports numpy
alone."""

from llmc.quantize.formats.base import QuantizeError, WeightFormat
from llmc.quantize.formats.registry import SCHEMES
from llmc.quantize.formats.scheme import Scheme
from llmc.quantize.recipe import QuantConfig, Recipe, layer_kind, layer_of
from llmc.quantize.scheme import get_scheme

__all__ = [
    "SCHEMES",
    "QuantConfig",
    "QuantizeError",
    "Recipe",
    "Scheme",
    "WeightFormat",
    "get_scheme",
    "layer_kind",
    "layer_of",
]
