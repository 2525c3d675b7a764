"""Operators that TVM's importer lacks, or imports in a form that can no longer be recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import relax

Convert = Callable[[Any, list[Any], Mapping[str, Any]], Any]
_MICROSOFT = "com.microsoft"


def _gather(_: Any, inputs: list[Any], attributes: Mapping[str, Any]) -> Any:
    """TVM's own version handles negative indices, which tokens never have."""
    return relax.op.take(inputs[0], inputs[1], attributes.get("axis", 0))


def _power(builder: Any, inputs: list[Any], _: Mapping[str, Any]) -> Any:
    """The exponent may have another type."""
    dtype = inputs[0].ty.dtype
    return relax.op.power(inputs[0], builder.normalize(relax.op.astype(inputs[1], dtype)))


def _extreme(reduce: Callable[[Any, Any], Any]) -> Convert:
    def convert(builder: Any, inputs: list[Any], _: Mapping[str, Any]) -> Any:
        result = inputs[0]
        for other in inputs[1:]:
            result = builder.normalize(reduce(result, other))
        return result

    return convert


def _clip(builder: Any, inputs: list[Any], _: Mapping[str, Any]) -> Any:
    result = inputs[0]
    if inputs[1] is not None:
        result = builder.normalize(relax.op.maximum(result, inputs[1]))
    return result if inputs[2] is None else builder.normalize(relax.op.minimum(result, inputs[2]))


def _gelu_tanh(builder: Any, inputs: list[Any], _: Mapping[str, Any]) -> Any:
    return relax.op.nn.gelu_tanh(_added(builder, inputs[0], inputs[1]))


def _bias_gelu(builder: Any, inputs: list[Any], _: Mapping[str, Any]) -> Any:
    return relax.op.nn.gelu(_added(builder, inputs[0], inputs[1]))


def _quick_gelu(builder: Any, inputs: list[Any], attributes: Mapping[str, Any]) -> Any:
    x, dtype = inputs[0], str(inputs[0].ty.dtype)
    scaled = builder.normalize(relax.op.multiply(x, relax.const(np.float32(attributes.get("alpha", 1.702)), dtype)))
    return relax.op.multiply(x, builder.normalize(relax.op.sigmoid(scaled)))


def _simplified_norm(_: Any, inputs: list[Any], attributes: Mapping[str, Any]) -> Any:
    return relax.op.nn.rms_norm(inputs[0], inputs[1], [-1], attributes.get("epsilon", 1e-5))


def _skip_simplified_norm(builder: Any, inputs: list[Any], attributes: Mapping[str, Any]) -> Any:
    """Results: the norm, two unused ones, the sum."""
    total = _sum(builder, inputs[0], inputs[1], inputs[3])
    normed = builder.normalize(relax.op.nn.rms_norm(total, inputs[2], [-1], attributes.get("epsilon", 1e-5)))
    return relax.Tuple([normed, _nothing(), _nothing(), total])


def _skip_norm(builder: Any, inputs: list[Any], attributes: Mapping[str, Any]) -> Any:
    total = _sum(builder, inputs[0], inputs[1], inputs[4])
    weight = inputs[2]
    zeros = relax.const(np.zeros([int(dim) for dim in weight.ty.shape]), str(weight.ty.dtype))
    bias = zeros if inputs[3] is None else inputs[3]
    normed = builder.normalize(relax.op.nn.layer_norm(total, weight, bias, [-1], attributes.get("epsilon", 1e-5)))
    return relax.Tuple([normed, _nothing(), _nothing(), total])


def _sum(builder: Any, x: Any, skip: Any, bias: Any) -> Any:
    """The bias is that of the layer before, whose result is either addend."""
    if bias is not None and not _is_product(builder, x) and _is_product(builder, skip):
        x, skip = skip, x
    return _added(builder, _added(builder, x, bias), skip)


def _is_product(builder: Any, x: Any) -> bool:
    made = builder.lookup_binding(x) if isinstance(x, relax.Var) else None
    return isinstance(made, relax.Call) and made.op == relax.op.matmul(x, x).op


def _added(builder: Any, x: Any, y: Any) -> Any:
    return x if y is None else builder.normalize(relax.op.add(x, y))


def _nothing() -> Any:
    return relax.const(0.0, "float32")


CONVERTERS: Mapping[tuple[str, str], Convert] = {
    ("", "Gather"): _gather,
    ("", "Clip"): _clip,
    ("", "Pow"): _power,
    ("", "Max"): _extreme(relax.op.maximum),
    ("", "Min"): _extreme(relax.op.minimum),
    ("", "SimplifiedLayerNormalization"): _simplified_norm,
    (_MICROSOFT, "SimplifiedLayerNormalization"): _simplified_norm,
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_simplified_norm,
    (_MICROSOFT, "SkipLayerNormalization"): _skip_norm,
    (_MICROSOFT, "FastGelu"): _gelu_tanh,
    (_MICROSOFT, "Gelu"): lambda builder, inputs, _: relax.op.nn.gelu(inputs[0]),
    (_MICROSOFT, "BiasGelu"): _bias_gelu,
    (_MICROSOFT, "QuickGelu"): _quick_gelu,
}
"""By (domain, operator); "" is ONNX's own domain."""
