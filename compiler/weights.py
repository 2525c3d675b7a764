"""Packs parameters into weights.safetensors, streaming: one parameter in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from llmc.compiler.config import CompileError
from llmc.compiler.packing import pack_linear, packed_shape

ALIGNMENT = 64
_SAFETENSORS_DTYPE = {"f32": "F32", "bf16": "BF16"}
_ITEM_BYTES = {"f32": 4, "bf16": 2}
LANES = {"f32": 1, "bf16": 2}


@dataclass(frozen=True)
class PackedWeight:
    """One tensor of weights.safetensors. shape: as stored; file_offset, nbytes in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file_offset: int
    nbytes: int
    packed: bool


@dataclass(frozen=True)
class WeightLayout:
    """Where every weight lies. header: the safetensors header with its length prefix."""

    weights: tuple[PackedWeight, ...]
    header: bytes
    total_bytes: int

    def find(self, name: str) -> PackedWeight:
        return next(w for w in self.weights if w.name == name)


@dataclass(frozen=True)
class WeightRequest:
    """A weight the graphs use: logical shape [N, K] (or any rank when not packed) and stored dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    packed: bool


def plan_weights(requests: Iterable[WeightRequest], panel_columns: int) -> WeightLayout:
    """Lays the weights out one after another; fillers keep every tensor 64-byte aligned."""
    entries: dict[str, dict[str, object]] = {}
    placed: list[tuple[WeightRequest, tuple[int, ...], int, int]] = []
    offset = 0
    for request in requests:
        shape = request.shape
        if request.packed:
            n, k = request.shape
            shape = packed_shape(n, k, panel_columns, LANES[request.dtype])
        nbytes = int(np.prod(shape)) * _ITEM_BYTES[request.dtype]
        entries[request.name] = {
            "dtype": _SAFETENSORS_DTYPE[request.dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        placed.append((request, shape, offset, nbytes))
        offset += nbytes
        filler = -offset % ALIGNMENT
        if filler:
            entries[f"filler.{len(placed)}"] = {
                "dtype": "U8",
                "shape": [filler],
                "data_offsets": [offset, offset + filler],
            }
            offset += filler
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    weights = tuple(
        PackedWeight(r.name, r.dtype, shape, len(header) + start, nbytes, r.packed)
        for r, shape, start, nbytes in placed
    )
    return WeightLayout(weights, header, len(header) + offset)


def _as_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    if dtype == "bf16":
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.to(torch.float32).numpy()


def write_weights(
    layout: WeightLayout,
    parameters: Iterable[tuple[str, torch.Tensor]],
    panel_columns: int,
    path: Path,
    on_weight: Callable[[int, int], None],
) -> None:
    """Writes every weight of `layout` from `parameters` (any order). Raises CompileError when one is missing."""
    wanted = {w.name: w for w in layout.weights}
    with path.open("wb") as out:
        out.truncate(layout.total_bytes)
        out.write(layout.header)
        for name, tensor in parameters:
            weight = wanted.pop(name, None)
            if weight is None:
                continue
            array = _as_numpy(tensor, weight.dtype)
            if weight.packed:
                array = pack_linear(array, panel_columns, LANES[weight.dtype])
            if array.nbytes != weight.nbytes:
                raise CompileError(f"weight {name} has {array.nbytes} bytes where {weight.nbytes} were planned")
            out.seek(weight.file_offset)
            out.write(np.ascontiguousarray(array).view(np.uint8).data)
            on_weight(len(layout.weights) - len(wanted), len(layout.weights))
        if wanted:
            raise CompileError(f"the model has no value for weights {', '.join(sorted(wanted)[:5])}")
        out.flush()
        os.fsync(out.fileno())
