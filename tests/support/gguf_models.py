"""GGUF files made as llama.cpp's converter makes them, by the gguf package, and what it reads in them."""

from __future__ import annotations

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

Array = NDArray[Any]
QUANTIZED = tuple(type.name for type in READ.values() if type.scales)
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert found is not None
    return f"blk.{found[1]}.{NAMES[found[2]]}.{found[3]}"


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
    writer.add_rope_freq_base(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    if fields["model_type"] == "mistral" and fields.get("sliding_window"):
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
    kind = {"mistral": "llama"}.get(fields["model_type"], fields["model_type"])
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=split)
    add_config(writer, fields, model)
    if tokenizer is not None:
        tokenizer(writer)
    rng = np.random.default_rng(0)
    values: dict[str, Array] = {}
    for name, tensor in tensors.items():
        theirs, rows = gguf_name(name), tensor.astype(np.float32)
        if name == "lm_head.weight" and fields["tie_word_embeddings"]:
            continue
        heads = 0
        if kind == "llama" and re.search(r"self_attn\.[qk]_proj\.", name):
            heads = fields["num_attention_heads"] if ".q_proj." in name else fields["num_key_value_heads"]
            rows = paired(rows, heads)
        of = "F32" if rows.ndim == 1 else type if isinstance(type, str) else type(theirs)
        data, code = stored(rows, of, rng) if rows.ndim > 1 else (rows, Type.F32)
        writer.add_tensor(theirs, data, raw_dtype=code)
        found = gguf.quants.dequantize(data, code)
        if heads:
            found = found.reshape(heads, -1, 2, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
        values[name] = np.ascontiguousarray(found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if dequantized is not None:
        dequantized.mkdir()
        (dequantized / "config.json").write_text(json.dumps({**fields, "dtype": "float32", "torch_dtype": "float32"}))
        save_file(values, dequantized / "model.safetensors", metadata={"format": "pt"})
    return path
