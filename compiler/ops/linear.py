"""linear, activated_linear and gated_linear, plain and quantized, and quantize_rows, which makes their int8 rows.

A linear over tokens may have a pool of adapters (`adapters.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.compiler.dtypes import DTYPES
from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.adapters import ADAPTER_X, adapter_scratch, with_adapters
from llmc.compiler.ops.definition import (
    ANY_FLOAT,
    F32,
    I32,
    Argument,
    BufferSource,
    Call,
    GraphParams,
    KernelCall,
    OpDef,
    int8_sums,
    makes_int8,
    weight_buffers,
    weight_format,
)
from llmc.quantize import WeightFormat


def linear_spec(dtype: str, **params: Param) -> KernelSpec:
    """The kernel of y [rows, n] = x [rows, k] · wᵀ, for a weight w [n, k] of the same dtype. params: k, n, rows (the
    scalar that counts valid ones), the target's row parameters, and optionally the following, bias and residual.

    gated: dtype of y [rows, n / 2] = f(gate) · up, where the weight's rows are gate's, then up's; "" for no gate.
    activated: dtype of y [rows, n] = f(x · wᵀ + bias), without a gate. activation: f, one of `models.activations`; left
    out for silu.
    """
    given: dict[str, Param] = {"bias": False, "residual": False, "rows": 0, "gated": "", **params}
    return KernelSpec.of("linear", "linear", act_dtype=dtype, weight_dtype=dtype, **given)


def linear_quant_spec(act_dtype: str, format: WeightFormat, **params: Param) -> KernelSpec:
    """As `linear_spec`, for a weight stored in `format`. act_dtype: f32, bf16, f16 or i8."""
    given: dict[str, Param] = {"bias": False, "residual": False, "rows": 0, "gated": "", **params}
    return KernelSpec.of("linear", "linear_quant", act_dtype=act_dtype, **format.kernel_params(), **given)


def _is_gated(site: Site) -> bool:
    return site.op in (GATED_LINEAR.name, GATED_LINEAR_QUANT.name)


def _is_activated(site: Site) -> bool:
    """Whether an activation follows the sums, with a gate or without."""
    return _is_gated(site) or site.op in (ACTIVATED_LINEAR.name, ACTIVATED_LINEAR_QUANT.name)


def _is_quantized_later(site: Site) -> bool:
    """Whether another kernel rounds activated rows to int8: that needs whole rows, and a linear's tasks compute
    columns."""
    return _is_activated(site) and makes_int8(site)


def activated_width(site: Site) -> int:
    """Elements in a row that a gated_linear or an activated_linear makes."""
    rows = int(site.attributes["weight_shapes"]["weight"][0])
    return rows // 2 if _is_gated(site) else rows


def _activation(site: Site, graph: GraphParams) -> dict[str, Param]:
    """Parameters of what follows the sums."""
    if not _is_activated(site):
        return {"gated": ""}
    name = str(site.attributes["activation"])
    of_name = {} if name == "silu" else {"activation": name}
    return {"gated": graph.act_dtype, **of_name} if _is_gated(site) else {"activated": graph.act_dtype, **of_name}


def _params(site: Site, graph: GraphParams) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parameters of every linear kernel, and this one's operands besides x, weight and out."""
    n, k = site.attributes["weight_shapes"]["weight"]
    optional = tuple(name for name in ("bias", "residual") if name in site.tensors)
    given = {name: name in optional for name in ("bias", "residual")}
    return {"k": k, "n": n, **_activation(site, graph), **given, **graph.rows(site)}, optional


def _with_int8(site: Site, graph: GraphParams, spec: KernelSpec, inputs: tuple[str, ...]) -> list[KernelCall]:
    """The linear kernel, followed by the one that rounds its rows to int8, if needed."""
    if not _is_quantized_later(site):
        return [KernelCall(spec, (*inputs, "out"))]
    later = _quantize_spec(site, graph, activated_width(site))
    return [KernelCall(spec, (*inputs, BufferSource.SCRATCH)), KernelCall(later, (BufferSource.SCRATCH, "out"))]


def _linear(site: Site, graph: GraphParams) -> list[KernelCall]:
    params, optional = _params(site, graph)
    spec = linear_spec(graph.act_dtype, **params)
    return with_adapters(site, graph, _with_int8(site, graph, spec, ("x", "weight", *optional)))


def _linear_quant(site: Site, graph: GraphParams) -> list[KernelCall]:
    params, optional = _params(site, graph)
    act = "i8" if site.attributes["int8"] else graph.act_dtype
    spec = linear_quant_spec(act, weight_format(site), **params)
    return with_adapters(site, graph, _with_int8(site, graph, spec, ("x", *weight_buffers(site), *optional)))


def _quantize_spec(site: Site, graph: GraphParams, width: int) -> KernelSpec:
    return KernelSpec.of(
        "other", "quantize_rows", dim=width, act_dtype=graph.act_dtype, **int8_sums(site), **graph.rows(site)
    )


def _quantize_rows(site: Site, graph: GraphParams) -> list[KernelCall]:
    return [KernelCall(_quantize_spec(site, graph, site.attributes["widths"]["x"]), ("x", "out"))]


def _scratch_bytes(site: Site, graph: GraphParams) -> int:
    words = -(-activated_width(site) // DTYPES[graph.act_dtype].per_word) if _is_quantized_later(site) else 0
    return 4 * graph.shape.tokens * words


def _gated_result(call: Call) -> tuple[tuple[Any, int], str]:
    return (call.shapes["x"][0], call.packed_width(int(call.shapes["weight"][0]) // 2)), call.act.long_name


def _activated_result(call: Call) -> tuple[tuple[Any, int], str]:
    return (call.shapes["x"][0], call.packed_width(int(call.shapes["weight"][0]))), call.act.long_name


_X, _WEIGHT, _BIAS = Argument(2, ANY_FLOAT, packed=True), Argument(2, ANY_FLOAT), Argument(1, F32)

LINEAR = OpDef(
    "linear",
    {"x": _X, "weight": _WEIGHT, "bias": _BIAS, "residual": Argument(2, F32), ADAPTER_X: _X},
    lambda call: ((call.shapes["x"][0], call.shapes["weight"][0]), F32[0]),
    _linear,
    quantized="linear_quant",
    reads_int8=True,
    scratch_parts=adapter_scratch,
    quantized_calls=("linear_quant",),
)
LINEAR_QUANT = OpDef(
    "linear_quant", LINEAR.arguments, LINEAR.result, _linear_quant, scratch_parts=adapter_scratch, traced=False
)
GATED_LINEAR = OpDef(
    "gated_linear",
    {"x": _X, "weight": _WEIGHT, "bias": _BIAS},
    _gated_result,
    _linear,
    packed_result=True,
    quantized="gated_linear_quant",
    reads_int8=True,
    writes_int8=True,
    scratch_bytes=_scratch_bytes,
    calls=LINEAR.kernel_names,
    quantized_calls=LINEAR.quantized_calls,
)
GATED_LINEAR_QUANT = OpDef(
    "gated_linear_quant",
    GATED_LINEAR.arguments,
    _gated_result,
    _linear_quant,
    packed_result=True,
    scratch_bytes=_scratch_bytes,
    traced=False,
    calls=LINEAR_QUANT.kernel_names,
)
ACTIVATED_LINEAR = replace(
    GATED_LINEAR, name="activated_linear", result=_activated_result, quantized="activated_linear_quant"
)
ACTIVATED_LINEAR_QUANT = replace(GATED_LINEAR_QUANT, name="activated_linear_quant", result=_activated_result)
QUANTIZE_ROWS = OpDef("quantize_rows", {"x": _X}, lambda call: (call.shapes["x"], I32[0]), _quantize_rows, traced=False)
