"""Whole tiny models that are quantized as published tools do it, written as checkpoint directories."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from safetensors.numpy import load_file

from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.checkpoints.floats import TABLES

from support.stored_checkpoints import (
    Integers,
    bf16,
    gemm_tensors,
    gptq_config,
    gptq_tensors,
    named,
    packed_rows,
    tensor,
    text_tensor,
)
from support.tiny_models import ModelFields, make_tiny_model

Tensors = Mapping[str, StoredTensor]
Change = Callable[[str, Integers], Integers]
"""From the prefix of a layer and its numbers to those that are stored."""
HIDDEN, INNER, VOCABULARY = 64, 160, 528
_BLOCK = 128
_LINEARS = ("_proj.weight", "_proj_with_mqa.weight")


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
    folder: Path, settings: Mapping[str, Any], quantize: Callable[[str, np.ndarray], Tensors], family: str = "llama",
    also: str | None = None, **fields: Unpack[ModelFields],
) -> Path:  # fmt: skip
    """A model whose linear layers but the output projection are what `quantize` makes of their prefix and weight.

    also: the prefix of another matrix that is.
    """
    fields = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": 32, "num_attention_heads": 2,
              "num_hidden_layers": 2, **fields}  # fmt: skip
    make_tiny_model(folder, family, **fields)
    found: dict[str, StoredTensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith(_LINEARS) or name == f"{also}.weight":
            found |= quantize(name.removesuffix(".weight"), value)
        else:
            found[name] = tensor(value)
    save_tensors(folder / "model.safetensors", found)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": dict(settings)}))
    return folder


def _as_it_is(prefix: str, data: Integers) -> Integers:
    return data


def make_gptq_model(
    folder: Path, bits: int = 4, group_size: int = 32, *, symmetric: bool = False, change: Change = _as_it_is,
    family: str = "llama", **fields: Any,
) -> Path:  # fmt: skip
    """Random numbers: what they stand for is all that counts. Zero points are stored less 1."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        n, k = weight.shape
        data = Integers.random(n, k, bits, group_size, symmetric=symmetric, least_zero=1)
        return gptq_tensors(change(prefix, data), bits, 1, prefix)

    settings = gptq_config(bits=bits, group_size=group_size, sym=symmetric)
    return make_quantized_model(folder, settings, quantize, family, **fields)


def in_act_order(prefix: str, data: Integers) -> Integers:
    """The same numbers with groups of columns that lie apart; those of layers that read one input lie alike."""
    layer, _, name = prefix.rpartition(".")
    first = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(name, name)
    rng = np.random.default_rng(list(f"{layer}.{first}".encode()))
    return replace(data, group=rng.permutation(data.group))


def make_int4_model(folder: Path, change: Change = _as_it_is) -> Path:
    """compressed-tensors' W4A8: int4 in groups of 32, inputs int8 with a scale a token."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        n, k = weight.shape
        data = change(prefix, Integers.random(n, k, 4, 32, symmetric=True))
        packed, shape = packed_rows(data.numbers, 4), np.array([n, k])
        return named(prefix, weight_packed=tensor(packed), weight_scale=tensor(data.scale), weight_shape=tensor(shape),
                     weight_g_idx=tensor(data.group.astype(np.int32)))  # fmt: skip

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
               "dynamic": False, "actorder": "group"}  # fmt: skip
    return make_quantized_model(folder, _compressed_tensors(weights, "pack-quantized"), quantize)


def make_gptq_head_model(folder: Path) -> Path:
    """GPTQ of 8 bits whose output projection is rounded, too."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        rows, columns = weight.shape
        return gptq_tensors(Integers.random(rows, columns, 8, 32, symmetric=False, least_zero=1), 8, 1, prefix)

    settings = gptq_config(bits=8, lm_head=True)
    return make_quantized_model(folder, settings, quantize, also="lm_head", vocab_size=VOCABULARY)


def make_awq_head_model(folder: Path) -> Path:
    """AWQ that leaves nothing as it is."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        rows, columns = weight.shape
        return gemm_tensors(Integers.random(rows, columns, 4, 32, symmetric=False), prefix)

    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return make_quantized_model(folder, settings, quantize, also="lm_head", vocab_size=VOCABULARY)


def make_tied_model(folder: Path) -> Path:
    """compressed-tensors: linear layers of 4 bits in groups, and one matrix of 8 bits that embeds and projects."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        (n, k), bits = weight.shape, 8 if prefix.endswith("embed_tokens") else 4
        data = Integers.random(n, k, bits, 32, symmetric=False)
        zeros = packed_rows(data.zero.T, bits).T
        return named(prefix, weight_packed=tensor(packed_rows(data.numbers, bits)), weight_scale=tensor(data.scale),
                     weight_zero_point=tensor(zeros), weight_shape=tensor(np.array([n, k])))  # fmt: skip

    def group(target: str, bits: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
        return {"targets": [target], "weights": weights}

    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group("Linear", 4), "group_1": group("Embedding", 8)},
    }  # fmt: skip
    return make_quantized_model(
        folder, settings, quantize, also="model.embed_tokens", vocab_size=VOCABULARY, tie_word_embeddings=True
    )


def _compressed_tensors(weights: Mapping[str, Any], format: str) -> dict[str, Any]:
    """Settings of layers whose inputs are int8 with a scale a token."""
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
            "config_groups": {"group_0": group}, "quantization_status": "compressed"}  # fmt: skip


def make_int8_model(folder: Path) -> Path:
    """compressed-tensors' W8A8: int8 with a scale a channel, inputs int8 with a scale a token."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        numbers = np.rint(weight / scale).astype(np.int8)
        return named(prefix, weight=tensor(numbers), weight_scale=tensor(bf16(scale), "BF16"))

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return make_quantized_model(folder, _compressed_tensors(weights, "int-quantized"), quantize)


def _fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> StoredTensor:
    """All numbers but NaN, alike often."""
    numbers = rng.integers(0, 256, shape).astype(np.uint8)
    return tensor(np.where(numbers & 127 == 127, 0, numbers).astype(np.uint8), "F8_E4M3")


def _scales(rng: np.random.Generator, *shape: int) -> StoredTensor:
    """For such numbers."""
    return tensor(bf16(rng.uniform(0.0003, 0.001, shape).astype(np.float32)), "BF16")


def make_blocks_model(folder: Path, family: str = "llama", **fields: Any) -> Path:
    """As DeepSeek and Qwen publish FP8: blocks of 128 x 128, the last ones cut."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        rng = np.random.default_rng(len(prefix))
        scale = _scales(rng, *(-(-size // _BLOCK) for size in weight.shape))
        return named(prefix, weight=_fp8(rng, weight.shape), weight_scale_inv=scale)

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK] * 2}
    return make_quantized_model(folder, settings, quantize, family, **fields)


def make_mixed_floats_model(folder: Path) -> Path:
    """Of compressed-tensors: FP8 of a scale a tensor and of one a channel, NVFP4 and MXFP4."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        rng, (n, k) = np.random.default_rng(len(prefix)), weight.shape
        if prefix.endswith("q_proj"):
            return named(prefix, weight=_fp8(rng, weight.shape), weight_scale=_scales(rng, 1))
        if prefix.endswith(("k_proj", "v_proj")):
            return named(prefix, weight=_fp8(rng, weight.shape), weight_scale=_scales(rng, n, 1))
        packed = tensor(rng.integers(0, 256, (n, k // 2)).astype(np.uint8))
        if prefix.endswith("o_proj"):
            scale = tensor(rng.integers(30, 62, (n, k // 16)).astype(np.uint8), "F8_E4M3")
            overall = tensor(np.array([20], np.float32))
            return named(prefix, weight_packed=packed, weight_scale=scale, weight_global_scale=overall)
        powers = rng.integers(120, 124, (n, k // 32)).astype(np.uint8)
        return named(prefix, weight_packed=packed, weight_scale=tensor(powers))

    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    nvfp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    mxfp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
             "scale_dtype": "torch.uint8"}  # fmt: skip
    groups = {
        "tensors": ("float-quantized", r"re:.*q_proj$", {**fp8, "strategy": "tensor"}),
        "channels": ("float-quantized", r"re:.*[kv]_proj$", {**fp8, "strategy": "channel"}),
        "nv": ("nvfp4-pack-quantized", r"re:.*o_proj$", nvfp4),
        "mx": ("mxfp4-pack-quantized", r"re:.*mlp.*", mxfp4),
    }
    settings = {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {name: {"format": format, "targets": [target], "weights": weights, "input_activations": None}
                          for name, (format, target, weights) in groups.items()},
    }  # fmt: skip
    return make_quantized_model(folder, settings, quantize)


def make_nf4_model(folder: Path) -> Path:
    """Of bitsandbytes, in groups of 32."""

    def quantize(prefix: str, weight: np.ndarray) -> Tensors:
        rng, (n, k) = np.random.default_rng(len(prefix)), weight.shape
        state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [n, k]}
        parts = {
            "": tensor(rng.integers(0, 256, (n * k // 2, 1)).astype(np.uint8)),
            ".absmax": tensor(rng.uniform(0.1, 0.2, n * k // 32).astype(np.float32)),
            ".quant_map": tensor(TABLES["nf4"]),
            ".quant_state.bitsandbytes__nf4": text_tensor(state),
        }
        return {f"{prefix}.weight{leaf}": part for leaf, part in parts.items()}

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                "bnb_4bit_quant_type": "nf4"}  # fmt: skip
    return make_quantized_model(folder, settings, quantize)
