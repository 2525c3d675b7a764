"""The weights of an artifact for people and tools: one by one, by scheme, and by class of layer weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from llmc.graphs_format import DTYPES, name_in_model
from llmc.graphs_records import Tables
from llmc.quantize import QuantizeError, layer_kind
from llmc.quantize.conversion import conversion_of, error_of, error_text
from llmc.quantize.formats.registry import format_of


def stored_weights(tables: Tables, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All stored tensors, in file order."""
    known = manifest.get("weights") or {}
    weights = []
    for weight in tables.weights:
        dtype, whole = DTYPES[weight.dtype], whole_name(name_in_model(weight.name), known)
        weights.append(
            {
                "name": weight.name,
                "of": whole,
                "scheme": known.get(whole, {}).get("scheme") or dtype,
                "act_order": bool(known.get(whole, {}).get("act_order")),
                "dtype": dtype,
                "shape": list(weight.shape),
                "layout": weight.layout,
                "file_offset": weight.file_offset,
                "bytes": weight.bytes,
                "sources": known.get(name_in_model(weight.name), {}).get("sources", []),
            }
        )
    return weights


def whole_name(name: str, known: Mapping[str, Any]) -> str:
    """Name of the weight that a tensor is, or that it belongs to, for example as scales."""
    base = name.rpartition(".")[0]
    return base if name not in known and base in known else name


def weights_by_scheme(weights: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for weight in weights:
        key = (str(weight["scheme"]), str(weight["dtype"]))
        count[key] += 1
        size[key] += weight["bytes"]
    return [{"scheme": s, "dtype": d, "count": n, "bytes": size[s, d]} for (s, d), n in sorted(count.items())]


def weights_by_class(weights: list[dict[str, Any]], manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Scheme, format, method, bits, bytes and error of weights that layers share, in file order.

    bits_per_weight: includes scales and zero points; of a weight without known shape, bits of its dtype. error,
    max_error: relative to the checkpoint, see `Conversion`; 0: exact; None: not measured. types: types in the
    checkpoint of what was converted.
    """
    known, lost = manifest.get("weights") or {}, manifest.get("weights_converted")
    found: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for weight in weights:
        entry = known.get(weight["of"], {})
        scheme, groups, method = str(weight["scheme"]), _groups(entry), str(entry.get("method") or "-")
        kind = layer_kind(weight["of"])
        one = found.setdefault((kind, scheme, groups, method), {"names": set(), "bytes": 0, "elements": 0})
        if weight["of"] not in one["names"]:
            one["names"].add(weight["of"])
            one["elements"] += math.prod(entry.get("shape") or weight["shape"])
        one["bytes"] += weight["bytes"]
    return [
        {
            "class": kind,
            "scheme": scheme,
            "groups": groups,
            "method": method,
            "count": len(one["names"]),
            "bits_per_weight": round(8 * one["bytes"] / one["elements"], 3) if one["elements"] else 0,
            "bytes": one["bytes"],
            **_errors(one["names"], lost),
        }
        for (kind, scheme, groups, method), one in found.items()
    ]


def _errors(names: Collection[str], lost: Mapping[str, Any] | None) -> dict[str, Any]:
    if lost is None:
        return {"error": None, "max_error": None, "types": None}
    conversions = [conversion_of(lost[name]) for name in sorted(names) if name in lost]
    types = ", ".join(sorted({one.types for one in conversions})) or None
    most = max((one.most for one in conversions), default=0.0)
    return {"error": float(f"{error_of(conversions):.4g}"), "max_error": most, "types": types}


def error_column(of_class: Mapping[str, Any]) -> str:
    """As in `0.17 % of F16`, `exact`, `-`."""
    if of_class["error"] is None:
        return "-"
    types = f" of {str(of_class['types']).upper()}" if of_class["types"] else ""
    return f"{error_text(of_class['error'])}{types}"


def _groups(entry: Mapping[str, Any]) -> str:
    if not entry.get("format"):
        return "-"
    try:
        groups = format_of(entry["format"]).describe()
    except (QuantizeError, TypeError):
        groups = str(entry["format"].get("kind"))
    return f"{groups}, act-order" if entry.get("act_order") else groups


def bits_per_weight(weights: list[dict[str, Any]], manifest: Mapping[str, Any]) -> dict[str, float]:
    """Bits per number of the model by scheme, including scales and zero points, and in "all" matrices together."""
    size: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    known = manifest.get("weights") or {}
    for weight in weights:
        shape = known.get(weight["of"], {}).get("shape")
        if not isinstance(shape, list) or len(shape) != 2:
            continue
        for key in (str(weight["scheme"]), "all"):
            size[key] += 8 * weight["bytes"]
            elements[key] += math.prod(shape) if weight["name"] == weight["of"] else 0
    return {key: round(size[key] / elements[key], 3) for key in size if elements[key]}
