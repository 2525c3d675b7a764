"""gpt-oss's layout of MXFP4, which holds experts alone; see `quantize/checkpoints/mxfp4.py` for the tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from llmc.quantize.export.base import Layout, Tensors, has_whole_groups, tensor
from llmc.quantize.export.bits import nibble_pairs
from llmc.quantize.formats.base import Quantized, QuantizeError, WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes

_FORMAT = Codes("e2m1", 32, E8M0)


class Mxfp4(Layout):
    name = "mxfp4"
    stacks = "_blocks"

    def check(self) -> None:
        if self.wanted.format != _FORMAT:
            raise QuantizeError("--format mxfp4 holds --scheme mxfp4 alone; use it or --format compressed-tensors")

    @property
    def scale_dtype(self) -> str:
        return "f32"

    def format_of(self, n: int, k: int, format: WeightFormat) -> WeightFormat | None:
        return format if has_whole_groups(k, format) else None

    def tensors(self, prefix: str, quantized: Quantized, matrices: int = 1) -> Tensors:
        shape = (matrices, len(quantized.numbers) // matrices, -1)
        packed = nibble_pairs(quantized.numbers).reshape(*shape, _FORMAT.group_size // 2)
        found = {self.stacks: packed, "_scales": quantized.scale.reshape(shape)}
        return {f"{prefix}{leaf}": tensor(array, "U8") for leaf, array in found.items()}

    def settings(self, formats: Mapping[str, WeightFormat], left: Collection[str]) -> dict[str, Any]:
        return {"quant_method": self.name, "modules_to_not_convert": sorted(left)}
