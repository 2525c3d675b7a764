"""The layout of compressed-tensors. Integers are pack-quantized, or int-quantized if inputs are rounded too.

See `quantize/checkpoints/compressed_tensors.py` for the tensors. A model may have layers of several formats: each is a
group of its config.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.quantize.export.base import Layout, Tensors, has_whole_groups, tensor, zero_points
from llmc.quantize.export.bits import nibble_pairs, pack, stored_scale
from llmc.quantize.formats.base import WHOLE_ROW, Quantized, QuantizeError, WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import Integers

_INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_FP8_INPUTS = {**_INT8_INPUTS, "type": "float"}


class CompressedTensors(Layout):
    """A row of integers whose length is not a multiple of the group size becomes one group."""

    name = "compressed-tensors"

    def check(self) -> None:
        format = self.wanted.format
        if isinstance(format, Integers | Fp8) or (isinstance(format, Codes) and format.scale_kind == E8M0):
            return
        raise QuantizeError(
            "--scheme nvfp4, nf4 and fp4 are not written; use mxfp4, or llmc compile --quant, which rounds to them"
        )

    @property
    def packs(self) -> bool:
        return self.wanted.act_bits == 16 and not isinstance(self.wanted.format, Fp8)

    @property
    def scale_dtype(self) -> str:
        return self.wanted.scale_dtype

    def format_of(self, n: int, k: int, format: WeightFormat) -> WeightFormat | None:
        if has_whole_groups(k, format):
            return format
        return replace(format, group_size=WHOLE_ROW) if isinstance(format, Integers) else None

    def tensors(self, prefix: str, quantized: Quantized, matrices: int = 1) -> Tensors:
        format = quantized.format
        if isinstance(format, Codes):
            found = {
                "weight_packed": tensor(nibble_pairs(quantized.numbers), "U8"),
                "weight_scale": tensor(quantized.scale, "U8"),
            }
        else:
            found = {"weight_scale": tensor(*stored_scale(quantized.scale, self.scale_dtype))}
            if isinstance(format, Fp8):
                found["weight"] = tensor(quantized.numbers, "F8_E4M3")
            else:
                assert isinstance(format, Integers)
                found |= self._integers(quantized, format)
        return {f"{prefix}.{leaf}": value for leaf, value in found.items()}

    def _integers(self, quantized: Quantized, format: Integers) -> Tensors:
        zero, middle = zero_points(quantized, format), format.middle
        found = {}
        if self.wanted.act_bits == 16:
            found["weight_packed"] = tensor(pack(quantized.numbers, format.bits), "I32")
            found["weight_shape"] = tensor(np.array(quantized.numbers.shape, np.int64), "I64")
            if format.asymmetric:
                found["weight_zero_point"] = tensor(pack(zero.T, format.bits).T, "I32")
        else:
            found["weight"] = tensor((quantized.numbers.astype(np.int16) - middle).astype(np.int8), "I8")
            if format.asymmetric:
                found["weight_zero_point"] = tensor((zero.astype(np.int16) - middle).astype(np.int8), "I8")
        return found

    def settings(self, formats: Mapping[str, WeightFormat], left: Collection[str]) -> dict[str, Any]:
        """Writes the most common format as the class default; layers of other formats are listed by name."""
        counts = Counter(formats.values())
        users = {format: sorted(p for p, of in formats.items() if of == format) for format in counts}
        order = sorted(counts, key=lambda format: (-counts[format], users[format]))
        groups = [self._group(format, users[format] if place else ["Linear"]) for place, format in enumerate(order)]
        layouts = sorted({str(group["format"]) for group in groups})
        return {
            "quant_method": self.name,
            "format": layouts[0] if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {f"group_{place}": group for place, group in enumerate(groups)},
            "ignore": sorted(left),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def _group(self, format: WeightFormat, targets: list[str]) -> dict[str, Any]:
        whole = format.group_size == WHOLE_ROW
        weights: dict[str, Any] = {
            "num_bits": format.bits,
            "type": "int" if isinstance(format, Integers) else "float",
            "symmetric": not getattr(format, "asymmetric", False),
            "strategy": "channel" if whole else "group",
            "group_size": None if whole else format.group_size,
            "dynamic": False,
        }
        inputs = None
        if isinstance(format, Codes):
            layout = "mxfp4-pack-quantized"
            weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        elif isinstance(format, Fp8):
            layout, inputs = "float-quantized", _FP8_INPUTS
        elif self.wanted.act_bits == 16:
            layout = "pack-quantized"
        else:
            layout, inputs = "int-quantized", _INT8_INPUTS
        return {"targets": targets, "weights": weights, "input_activations": inputs, "format": layout}
