"""The layout of GPTQ; see `quantize/checkpoints/gptq.py` for the tensors. Groups are contiguous."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from llmc.quantize.export.base import Layout, Tensors, has_whole_groups, integers_of, tensor, zero_points
from llmc.quantize.export.bits import pack
from llmc.quantize.formats.base import WHOLE_ROW, Quantized, WeightFormat
from llmc.quantize.formats.integers import Integers

_UNIT = 32  # kernels need N and K to be multiples of this


class Gptq(Layout):
    name = "gptq"

    def check(self) -> None:
        integers_of(self.name, self.wanted)

    @property
    def scale_dtype(self) -> str:
        return "f16"

    @property
    def _minus_one(self) -> bool:
        """Whether zero points are stored minus one. Such a layout cannot store 0, which symmetric numbers never use."""
        return not integers_of(self.name, self.wanted).asymmetric

    def format_of(self, n: int, k: int, format: WeightFormat) -> WeightFormat | None:
        return format if has_whole_groups(k, format) and k % _UNIT == 0 and n % _UNIT == 0 else None

    def tensors(self, prefix: str, quantized: Quantized, matrices: int = 1) -> Tensors:
        format = quantized.format
        assert isinstance(format, Integers)
        k = quantized.numbers.shape[1]
        zero = zero_points(quantized, format) - np.uint8(self._minus_one)
        width = k if format.group_size == WHOLE_ROW else format.group_size
        found = {
            "qweight": tensor(pack(quantized.numbers, format.bits).T, "I32"),
            "qzeros": tensor(pack(zero.T, format.bits), "I32"),
            "scales": tensor(quantized.scale.T.astype(np.float16), "F16"),
            "g_idx": tensor((np.arange(k) // width).astype(np.int32), "I32"),
        }
        return {f"{prefix}.{leaf}": value for leaf, value in found.items()}

    def settings(self, formats: Mapping[str, WeightFormat], left: Collection[str]) -> dict[str, Any]:
        format = integers_of(self.name, self.wanted)
        inside = sorted(prefix for prefix in left if prefix != "lm_head")
        return {
            "quant_method": self.name,
            "bits": format.bits,
            "group_size": format.group_size,
            "sym": not format.asymmetric,
            "desc_act": False,
            "static_groups": True,
            "true_sequential": False,
            "lm_head": False,
            "checkpoint_format": "gptq" if self._minus_one else "gptq_v2",
            **({"dynamic": {f"-:^{re.escape(prefix)}$": {} for prefix in inside}} if inside else {}),
        }
