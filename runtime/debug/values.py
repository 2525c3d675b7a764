"""A command's outputs as plain arrays, with tensor and layout derived from the kernel's parameters.

A packed activation is [units][words][rows of a unit][elements of a word]. A unit of one row is row-major. Rows of int8
are words of four numbers, then a scale, then sums (FORMAT.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.graphs_records import Graph
from llmc.runtime.graph_view import row_unit

_NUM_SAMPLES = 2  # the kernel scalar
_LINE = 8  # numbers of an int8 row are padded to a multiple of this
_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "bool": 1}

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ValueLayout:
    """One tensor that a command writes. operand: its operand index. on_samples: rows are samples instead of tokens.
    shape: of a row. dtype: f32, bf16, f16, i8, i32 or bool. held: rows that the operand has, of int8 rows."""

    operand: int
    on_samples: bool
    shape: tuple[int, ...]
    dtype: str
    packed: bool = False
    row_unit: int = 1
    held: int = 0

    @property
    def width(self) -> int:
        return prod(self.shape)

    def read(self, data: NDArray[np.uint8], num_rows: int) -> Floats:
        """The first `num_rows` rows as float32, from the operand's bytes; int8 numbers are multiplied by their
        scale."""
        units = -(-num_rows // self.row_unit)
        if self.dtype == "i8":
            return self._int8(data, units)[:num_rows]
        per_word = 4 // _ITEM_BYTES[self.dtype] if self.packed else 1
        words = -(-self.width // per_word)
        count = units * words * self.row_unit * per_word if self.packed else num_rows * self.width
        flat = _floats(data[: count * _ITEM_BYTES[self.dtype]], self.dtype)
        if self.packed:
            lying = flat.reshape(units, words, self.row_unit, per_word)
            flat = lying.transpose(0, 2, 1, 3).reshape(units * self.row_unit, words * per_word)[:num_rows, : self.width]
        return np.ascontiguousarray(flat).reshape(num_rows, *self.shape)

    def _int8(self, data: NDArray[np.uint8], units: int) -> Floats:
        number_words = -(-self.width // _LINE) * _LINE // 4
        # Sums and padding follow the scale, as many as the target has.
        words = data.size // 4 // (-(-self.held // self.row_unit) * self.row_unit)
        words_of_unit = data[: units * words * self.row_unit * 4].view(np.int32).reshape(units, words, self.row_unit)
        lying = np.ascontiguousarray(words_of_unit.transpose(0, 2, 1)).reshape(units * self.row_unit, words)
        numbers = np.ascontiguousarray(lying[:, :number_words]).view(np.int8)[:, : self.width]
        scale = np.ascontiguousarray(lying[:, number_words]).view(np.float32)
        return numbers.astype(np.float32) * scale[:, None]


def _floats(data: NDArray[np.uint8], dtype: str) -> Floats:
    match dtype:
        case "f32":
            return data.view(np.float32).copy()
        case "bf16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "f16":
            return data.view(np.float16).astype(np.float32)
        case "i32":
            return data.view(np.int32).astype(np.float32)
    return data.astype(np.float32)


def written_values(op: str, parameters: str, graph: Graph) -> list[ValueLayout]:
    """The outputs of a kernel in a graph, given op and parameters in the manifest; empty if only kernels of the same op
    understand them."""
    p: dict[str, Any] = dict(json.loads(parameters))
    on_samples = p.get("rows", 0) == _NUM_SAMPLES
    held = graph.max_samples if on_samples else graph.max_tokens
    unit = row_unit(graph, held)

    def activation(width: int, dtype: str) -> list[ValueLayout]:
        """A row that linear layers read."""
        return [ValueLayout(-1, on_samples, (width,), dtype, True, unit, held)]

    match op:
        case "embedding" | "embedding_quant":
            return [ValueLayout(-1, False, (p["dim"],), "f32")]
        case "choose_experts":
            return [ValueLayout(-1, False, (2 * p["top_k"],), "i32")]
        case "expert_combine":
            return [ValueLayout(-1, False, (p["dim"],), "f32")]
        case "gather_rows":
            return [ValueLayout(-1, True, (p["dim"],), "f32")]
        case "rms_norm" | "permute_columns" | "activate":
            return activation(p["dim"], p["act_dtype"])
        case "quantize_rows":
            return activation(p["dim"], "i8")
        case "linear" | "linear_quant" | "normed_linear" | "normed_linear_quant":
            if p["gated"]:
                return activation(p["n"] // 2, p["gated"])
            if p.get("activated"):
                return activation(p["n"], p["activated"])
            return [ValueLayout(-1, on_samples, (p["n"],), "f32")]
        case "head_linear":
            return [ValueLayout(-1, False, (p["n"],), "f32")]
        case "packed_head_linear":
            return activation(p["n"], p["gives"])
        case "latent_kv_write":
            return [ValueLayout(-1, False, (p["num_heads"] * p["rotary_dim"],), "f32")]
        case "latent_attention":
            return [] if p["segments"] else [ValueLayout(-1, False, (p["num_heads"] * p["rank"],), "f32")]
        case "short_conv":
            return [ValueLayout(-1, False, (p["channels"],), "f32")]
        case "delta_rule":
            return [ValueLayout(-1, False, (p["heads"] * p["value_dim"],), "f32")]
        case "selective_state":
            return [ValueLayout(-1, False, (p["heads"] * p["head_dim"],), "f32")]
        case "rope_kv_write":
            return [ValueLayout(-1, False, (p["num_heads"] * p["head_dim"],), "f32")]
        case "paged_attention" | "rotated_attention":
            return [] if p["segments"] else activation(p["num_heads"] * p["head_dim"], p["act_dtype"])
        case "merge_attention":
            return activation(p["num_heads"] * p["head_dim"], p["act_dtype"])
        case "fused":
            return _written_by_fused(json.loads(p["program"]), on_samples=on_samples, row_unit=unit)
    return []


def inner_norm(op: str) -> int | None:
    """The operand, counted from the end, whose norm a kernel computes without writing its result; None for others."""
    return -2 if op in ("normed_linear", "normed_linear_quant") else None


def inner_op(op: str) -> str | None:
    """The op whose result a kernel of attention makes for itself, without writing it; None for others."""
    return "rope_kv_write" if op == "rotated_attention" else None


def _written_by_fused(program: Mapping[str, Any], *, on_samples: bool, row_unit: int) -> list[ValueLayout]:
    """The outputs of a row program that have rows."""
    outputs, first = program["outputs"], len(program["inputs"])
    return [
        ValueLayout(first + i, on_samples, tuple(out["shape"]), out["dtype"], out["packed"], row_unit)
        for i, out in enumerate(outputs)
        if out["row"]
    ]
