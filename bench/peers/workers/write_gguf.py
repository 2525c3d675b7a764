"""Writes a checkpoint of bench/make_model.py as a GGUF of bf16: `write_gguf.py MODEL OUT`. Needs numpy and gguf."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe"}
"""GGUF's names of architectures by model type, where they differ."""
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def tensors(path: Path) -> dict[str, NDArray[np.uint16]]:
    """Bits of the bf16 tensors of a safetensors file, memory-mapped."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        begin, end = entry["data_offsets"]
        found[name] = data[begin:end].view(np.uint16).reshape(entry["shape"])
    return found


def gguf_name(name: str) -> str:
    """Name in a GGUF: model.layers.3.mlp.up_proj.weight → blk.3.ffn_up.weight."""
    if name in WHOLE:
        return WHOLE[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        raise ValueError(f"no place in a GGUF for {name}")
    return f"blk.{match[1]}.{NAMES[match[2]]}.{match[3]}"


def with_experts_stacked(found: dict[str, NDArray[np.uint16]]) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """(name in a GGUF, bits) of all tensors; the experts of a layer are stacked into one."""
    stacks: dict[str, list[NDArray[np.uint16]]] = {}
    for name, bits in found.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(.+)_proj\.weight", name)
        if match is None:
            yield gguf_name(name), bits
        else:
            stacks.setdefault(f"blk.{match[1]}.ffn_{match[2]}_exps.weight", []).append(bits)
    for name, parts in stacks.items():
        yield name, np.stack(parts)


def interleaved(weight: NDArray[np.uint16], heads: int) -> NDArray[np.uint16]:
    """Rows of q or k reordered for llama.cpp's `llama`, which rotates neighbours, not rows half a head apart."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((source / "config.json").read_text())
    kind, heads, kv_heads = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(target, ARCHITECTURES.get(kind, kind))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_tokenizer(writer, json.loads((source / "tokenizer.json").read_text()), config)
    for name, bits in with_experts_stacked(tensors(source / "model.safetensors")):
        if kind == "llama" and re.search(r"attn_[qk]\.weight", name):
            bits = interleaved(bits, heads if "attn_q" in name else kv_heads)
        # A router is a float32 matrix; norms and biases are float32, too.
        if bits.ndim == 1 or "ffn_gate_inp" in name:
            widened = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(name, widened)
        else:
            rows = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, document: dict[str, Any], config: dict[str, Any]) -> None:
    """Adds the byte-level BPE of tokenizer.json."""
    vocabulary = document["model"]["vocab"]
    special = {token["content"] for token in document["added_tokens"]}
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    main()
