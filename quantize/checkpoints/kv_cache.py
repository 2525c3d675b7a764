"""Key and value scales that a checkpoint states for a quantized KV cache, with vLLM's conventions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmc.quantize.checkpoints.base import AGAIN, Floats, StoredTensor
from llmc.quantize.checkpoints.floats import widened
from llmc.quantize.checkpoints.modules import PLAIN
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

_NAME = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.self_attn\.(?:(?:attn|k_proj|v_proj|qkv_proj)\.)?(k|v|kv)_scale")
_KINDS = {"float": "fp8_e4m3", "int": "int8"}
_ALGORITHMS = {"FP8": "fp8_e4m3", "INT8": "int8"}


@dataclass(frozen=True)
class KvScales:
    """dtype: the cache dtype that the scales are for. tensors: per layer, those of keys ("k") and values ("v"), with
    their names."""

    dtype: str
    tensors: Mapping[tuple[int, str], tuple[str, StoredTensor]]

    def read(self, kv_heads: Mapping[int, int]) -> Iterator[Floats]:
        """Per layer, float32 [2, heads], keys before values. kv_heads: their number, by layer. Raises QuantizeError."""
        for layer, heads in kv_heads.items():
            scales = np.empty((2, heads), np.float32)
            for which, kind in enumerate("kv"):
                found = self.tensors.get((layer, kind))
                if found is None:
                    raise QuantizeError(
                        f"the checkpoint has scales of a KV cache but no {kind}_scale of layer {layer}; {AGAIN}"
                    )
                scales[which] = _read(*found, heads)
            yield scales


def _read(name: str, tensor: StoredTensor, num_kv_heads: int) -> Floats:
    if tensor.dtype not in PLAIN:
        raise QuantizeError(f"{name} has dtype {shown(tensor.dtype)}, not {' or '.join(PLAIN)}; {AGAIN}")
    count = int(np.prod(tensor.shape, dtype=object))
    if count not in (1, num_kv_heads) or len(tensor.shape) > 3:
        wanted = f"of one number or of {num_kv_heads}, one a KV head"
        raise QuantizeError(f"{name} has shape {shown(list(tensor.shape))}, not that {wanted}; {AGAIN}")
    values = widened(tensor.dtype, tensor.load()).reshape(-1)
    for value in values:
        if not (np.isfinite(value) and value > 0):
            raise QuantizeError(f"{name} has the scale {value}, which is not positive and finite; {AGAIN}")
    return values


def find_kv_scales(section: Section, tensors: Mapping[str, StoredTensor]) -> KvScales | None:
    """Finds the scales; None if settings and tensors have none. section: the quantization settings. Raises
    QuantizeError."""
    dtype = _dtype(section)
    found: dict[tuple[int, str], tuple[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        for kind in match[2] if match else "":
            found[int(match[1]) if match else 0, kind] = name, tensor
    return KvScales(dtype, found) if dtype is not None and found else None


def _dtype(section: Section) -> str | None:
    """The cache dtype that the scales are for; FP8 unless the settings say otherwise."""
    if isinstance(section.values.get("kv_cache_scheme"), Mapping):
        scheme = section.table("kv_cache_scheme")
        if scheme.flag("dynamic", False):
            return None
        if scheme.integer("num_bits", 8) != 8 or not scheme.flag("symmetric", True):
            raise scheme.wrong("num_bits", "8, symmetric: llmc reads no other scales of a KV cache")
        return _KINDS[scheme.choice("type", tuple(_KINDS), "float")]
    algorithm = section.values.get("kv_cache_quant_algo")
    if algorithm is not None:
        return _ALGORITHMS.get(str(algorithm))
    return "fp8_e4m3"
