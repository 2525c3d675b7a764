"""GGUF files made as llama.cpp's converter makes them, by the gguf package, and what it reads in them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmc.models.read_config import load_config
from llmc.models.rope import checked_frequencies
from llmc.models.sources.gguf.types import READ

from support.tiny_models import FAMILIES, ModelFields

Array = NDArray[Any]
QUANTIZED = tuple(type.name for type in READ.values() if type.scales)
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""By model_type, where llama.cpp calls it otherwise."""
SIZES: ModelFields = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "mixtral": ("mixtral", {**_EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "sliding_window": 9, "query_pre_attn_scalar": 64}),
    "gemma3_text": (
        "gemma3_text",
        {"tie_word_embeddings": True, "sliding_window": 9, "num_hidden_layers": 7, "query_pre_attn_scalar": 64},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.625,
            "attention_multiplier": 0.3125,
            "logits_scaling": 0.5,
        },
    ),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "llama-odd": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "hidden_size": 60}),
}
"""Of what a file may be of: (model_type, fields beside SIZES)."""
PERMUTED = ("llama", "granite")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_PRECISE = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


@functools.cache
def gguf_names(architecture: str) -> gguf.TensorNameMap:
    """The gguf package's map of names, which takes long to make: it has those of every layer."""
    kind = next(kind for kind, called in gguf.MODEL_ARCH_NAMES.items() if called == architecture)
    return gguf.get_tensor_name_map(kind, 64)


def gguf_name(name: str, architecture: str = "llama") -> str:
    """As the gguf package has it."""
    found = gguf_names(architecture).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def paired(rows: Array, heads: int) -> Array:
    """Rows of q or k as the converter permutes them for llama."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def random_blocks(rows: int, columns: int, type: str, rng: np.random.Generator) -> Array:
    """uint8 [rows, bytes]: of random numbers and scales, whose values are about as large as those of a model."""
    stored = READ[Type[type].value]
    blocks = rng.integers(0, 256, (rows * columns // stored.elements, stored.nbytes), dtype=np.uint8)
    sizes = {"Q8_0": 73, "Q6_K": 1300, "Q5_K": 290, "Q4_K": 145, "Q3_K": 37, "Q2_K": 12, "IQ4_XS": 1300, "IQ4_NL": 70,
             "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2}  # fmt: skip
    middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(type, 0.0)
    scale = rng.uniform(0.5, 1.5, len(blocks)) * columns**-0.5 / sizes[type]
    for at, value in zip(stored.scales, (scale, middle * scale), strict=False):
        blocks[:, at : at + 2] = value.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def stored(values: Array, type: str, rng: np.random.Generator) -> tuple[Array, Type]:
    """What a file has of a matrix: rounded where the package can, else random blocks."""
    kind = Type[type]
    try:
        return gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind), kind
    except NotImplementedError:
        return random_blocks(values.shape[0], values.shape[1], type, rng), kind


def add_config(writer: gguf.GGUFWriter, fields: dict[str, Any], model: Path) -> None:
    heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // heads
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = fields.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    if "norm_epsilon" in fields:
        writer.add_layer_norm_eps(fields["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    _add_own(writer, fields)
    windowed = ("mistral", "mixtral", "gemma2", "gemma3_text")
    if fields["model_type"] in windowed and fields.get("sliding_window"):
        writer.add_sliding_window(fields["sliding_window"])
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        config = load_config(model)
        scaled, _ = checked_frequencies(config.rope, config.max_position_embeddings)
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_own(writer: gguf.GGUFWriter, fields: dict[str, Any]) -> None:
    """What not all architectures have."""
    added: dict[str, Callable[[Any], None]] = {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }
    for name, add in added.items():
        if fields.get(name) is not None:
            add(fields[name])


def _merged(tensors: dict[str, Array]) -> dict[str, tuple[list[str], Array]]:
    """What becomes a tensor of the file, by the name that the converter gives it before it maps names: the tensors of
    all experts become one."""
    merged: dict[str, tuple[list[str], Array]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")]):
        found = _EXPERT.fullmatch(name)
        if found is None:
            merged[name] = [name], tensors[name]
            continue
        own = "mlp.experts" if found[3].endswith("_proj") else "feed_forward.experts"
        prefix = "model." if own == "mlp.experts" else ""
        names, stack = merged.get(f"{prefix}layers.{found[1]}.{own}.{found[3]}.weight", ([], np.empty((0,))))
        matrix = tensors[name][None]
        merged[f"{prefix}layers.{found[1]}.{own}.{found[3]}.weight"] = (
            [*names, name],
            np.concatenate((stack, matrix)) if names else matrix,
        )
    return merged


def write_gguf(
    model: Path,
    path: Path,
    type: str | Callable[[str], str] = "F32",
    *,
    dequantized: Path | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    split: int = 0,
) -> Path:
    """The checkpoint `model` as a GGUF. type: of matrices, by the file's name of each. split: tensors of a file.

    dequantized: a directory that becomes the checkpoint that has the values of the GGUF, in f32.
    """
    fields = json.loads((model / "config.json").read_text())
    tensors: dict[str, Array] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    kind = ARCHITECTURES.get(fields["model_type"], fields["model_type"])
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=split)
    add_config(writer, fields, model)
    if tokenizer is not None:
        tokenizer(writer)
    rng = np.random.default_rng(0)
    values: dict[str, Array] = {}
    for called, (names, tensor) in _merged(tensors).items():
        theirs, rows = gguf_name(called, kind), tensor.astype(np.float32)
        if called == "lm_head.weight" and fields["tie_word_embeddings"]:
            continue
        heads = 0
        if kind in PERMUTED and re.search(r"self_attn\.[qk]_proj\.", called):
            heads = fields["num_attention_heads"] if ".q_proj." in called else fields["num_key_value_heads"]
            rows = paired(rows, heads)
        plus = np.float32(kind.startswith("gemma") and called.endswith("norm.weight"))
        rows = rows.squeeze() + plus
        of = "F32" if rows.ndim == 1 or theirs.endswith(_PRECISE) else type if isinstance(type, str) else type(theirs)
        data, code = stored(rows, of, rng) if rows.ndim > 1 else (rows, Type.F32)
        writer.add_tensor(theirs, data, raw_dtype=code)
        found = gguf.quants.dequantize(data, code)
        if heads:
            found = found.reshape(heads, -1, 2, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
        for name, value in zip(names, found if len(names) > 1 else [found - plus], strict=True):
            values[name] = np.ascontiguousarray(value.reshape(tensors[name].shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if dequantized is not None:
        dequantized.mkdir()
        (dequantized / "config.json").write_text(json.dumps({**fields, "dtype": "float32", "torch_dtype": "float32"}))
        save_file(values, dequantized / "model.safetensors", metadata={"format": "pt"})
    return path
