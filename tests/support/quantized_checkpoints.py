"""Whole tiny models that are quantized as published tools do it, written as checkpoint directories."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from llmc.quantize.checkpoints import StoredTensor

from support.stored_checkpoints import Integers, bf16, gptq_config, gptq_tensors, named, tensor
from support.tiny_models import make_tiny_model

Tensors = Mapping[str, StoredTensor]
HIDDEN, INNER = 64, 96
_LINEARS = ("_proj.weight",)


def save_tensors(path: Path, tensors: Tensors) -> None:
    """A safetensors file, by hand: numpy has no FP8."""
    header, data, at = {}, [], 0
    for name, value in sorted(tensors.items()):
        raw = np.ascontiguousarray(value.load()).tobytes()
        header[name] = {"dtype": value.dtype, "shape": list(value.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def make_quantized_model(
    folder: Path, settings: Mapping[str, Any], quantize: Callable[[str, np.ndarray], Tensors], family: str = "llama"
) -> Path:
    """A model whose linear layers but the output projection are what `quantize` makes of their prefix and weight."""
    make_tiny_model(folder, family, hidden_size=HIDDEN, intermediate_size=INNER, head_dim=32, num_attention_heads=2,
                    num_hidden_layers=2)  # fmt: skip
    found: dict[str, StoredTensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith(_LINEARS):
            found |= quantize(name.removesuffix(".weight"), value)
        else:
            found[name] = tensor(value)
    save_tensors(folder / "model.safetensors", found)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": dict(settings)}))
    return folder


def make_gptq_model(folder: Path, bits: int = 4, group_size: int = 32, *, symmetric: bool = False) -> Path:
    """Random numbers: what they stand for is all that counts. Zero points are stored less 1."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        n, k = weight.shape
        data = Integers.random(n, k, bits, group_size, symmetric=symmetric, least_zero=1)
        return gptq_tensors(data, bits, 1, prefix)

    return make_quantized_model(folder, gptq_config(bits=bits, group_size=group_size, sym=symmetric), quantize)


def order_by_input(prefix: str) -> str:
    """One order of columns for the layers that read one input, as calibration gives them."""
    layer, _, name = prefix.rpartition(".")
    return {"k_proj": f"{layer}.q_proj", "v_proj": f"{layer}.q_proj", "up_proj": f"{layer}.gate_proj"}.get(name, prefix)


def make_act_order_model(
    folder: Path, family: str = "llama", order_of: Callable[[str], str | None] = order_by_input
) -> Path:
    """GPTQ with desc_act: groups of 32 columns that lie apart. order_of: equal for prefixes whose columns are in the
    same groups, None: neighbours are a group."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        n, k = weight.shape
        data = Integers.random(n, k, 4, 32, symmetric=True)
        # Scales as large as the weights need, so that logits are those of a model.
        data = replace(data, scale=np.float16(weight.std() / 4) * (1 + data.scale))
        order = order_of(prefix)
        if order is not None:
            groups = np.random.default_rng(list(order.encode())).permutation(data.group)
            data = replace(data, group=groups)
        return gptq_tensors(data, 4, 1, prefix)

    return make_quantized_model(folder, gptq_config(sym=True, desc_act=True), quantize, family)


def make_int8_model(folder: Path) -> Path:
    """compressed-tensors' W8A8: int8 with a scale a channel, inputs int8 with a scale a token."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        numbers = np.rint(weight / scale).astype(np.int8)
        return named(prefix, weight=tensor(numbers), weight_scale=tensor(bf16(scale), "BF16"))

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": group}, "quantization_status": "compressed"}  # fmt: skip
    return make_quantized_model(folder, settings, quantize)
