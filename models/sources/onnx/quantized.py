"""Operators on quantized numbers that llmc does not read, as (domain, operator); docs/onnx.md names them all."""

from __future__ import annotations

_OF_ONNX = (
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "ConvInteger",
    "QLinearMatMul",
    "QLinearConv",
)
_OF_ONNXRUNTIME = (
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
    "QGemm",
    "QAttention",
    "QOrderedMatMul",
    "QEmbedLayerNormalization",
    "QLinearAdd",
    "QLinearMul",
    "GatherBlockQuantized",
    "MatMulBnb4",
    "QMoE",
)
REFUSED = frozenset([("", name) for name in _OF_ONNX] + [("com.microsoft", name) for name in _OF_ONNXRUNTIME])
