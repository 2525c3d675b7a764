"""The layout of compressed-tensors: pack-quantized where inputs stay as they are, otherwise int-quantized.

See `quantize/checkpoints/compressed_tensors.py` for the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.quantize.export.base import Layout, Tensors, has_whole_groups, tensor, zero_points
from llmc.quantize.export.bits import pack, stored_scale
from llmc.quantize.formats.base import WHOLE_ROW, Quantized
from llmc.quantize.formats.integers import Integers

_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class CompressedTensors(Layout):
    """Rows that are no whole groups are one group each."""

    name = "compressed-tensors"

    def check(self) -> None:
        pass

    @property
    def scale_dtype(self) -> str:
        return self.wanted.scale_dtype

    @property
    def _is_packed(self) -> bool:
        return self.wanted.act_bits == 16

    def format_of(self, n: int, k: int) -> Integers | None:
        format = self.wanted.format
        return format if has_whole_groups(k, format) else replace(format, group_size=WHOLE_ROW)

    def tensors(self, prefix: str, quantized: Quantized) -> Tensors:
        format = quantized.format
        assert isinstance(format, Integers)
        n, k = quantized.numbers.shape
        found = {"weight_scale": tensor(*stored_scale(quantized.scale, self.scale_dtype))}
        zero = zero_points(quantized, format)
        if self._is_packed:
            found["weight_packed"] = tensor(pack(quantized.numbers, format.bits), "I32")
            found["weight_shape"] = tensor(np.array([n, k], np.int64), "I64")
            if format.asymmetric:
                found["weight_zero_point"] = tensor(pack(zero.T, format.bits).T, "I32")
        else:
            middle = format.middle
            found["weight"] = tensor((quantized.numbers.astype(np.int16) - middle).astype(np.int8), "I8")
            if format.asymmetric:
                found["weight_zero_point"] = tensor((zero.astype(np.int16) - middle).astype(np.int8), "I8")
        return {f"{prefix}.{leaf}": value for leaf, value in found.items()}

    def settings(self, formats: Mapping[str, Integers], left: Collection[str]) -> dict[str, Any]:
        layout = "pack-quantized" if self._is_packed else "int-quantized"
        wholes = sorted(prefix for prefix, format in formats.items() if format != self.wanted.format)
        groups = {"group_0": self._group(self.wanted.format, ["Linear"], layout)}
        if wholes:
            groups["group_1"] = self._group(formats[wholes[0]], wholes, layout)
        return {
            "quant_method": self.name,
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(left),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def _group(self, format: Integers, targets: list[str], layout: str) -> dict[str, Any]:
        whole = format.group_size == WHOLE_ROW
        weights = {
            "num_bits": format.bits,
            "type": "int",
            "symmetric": not format.asymmetric,
            "strategy": "channel" if whole else "group",
            "group_size": None if whole else format.group_size,
            "dynamic": False,
        }
        inputs = None if self._is_packed else _INPUTS
        return {"targets": targets, "weights": weights, "input_activations": inputs, "format": layout}
