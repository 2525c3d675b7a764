"""Reads checkpoints quantized by other tools: the quantized modules with their numbers, scales and zero points. Numpy
alone."""

from llmc.quantize.checkpoints.base import CARRIERS, Activation, Rows, StoredFormat, StoredMatrix, StoredTensor
from llmc.quantize.checkpoints.registry import READERS, find_stored, quantization_method, quantization_settings
from llmc.quantize.checkpoints.result import StoredCheckpoint

__all__ = [
    "CARRIERS",
    "READERS",
    "Activation",
    "Rows",
    "StoredCheckpoint",
    "StoredFormat",
    "StoredMatrix",
    "StoredTensor",
    "find_stored",
    "quantization_method",
    "quantization_settings",
]
