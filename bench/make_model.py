"""Writes a random-weight checkpoint of a known model's shape, with a tokenizer: `make_model.py qwen2.5-0.5b OUT`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SHAPES: dict[str, dict[str, object]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}


def tensors(shape: dict[str, object], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """bf16 tensors with Hugging Face names; values small enough that activations stay finite through all layers."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.bfloat16)

    def size(name: str) -> int:
        value = shape[name]
        assert isinstance(value, int)
        return value

    hidden, inter = size("hidden_size"), size("intermediate_size")
    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    head_dim = hidden // heads if "head_dim" not in shape else size("head_dim")
    yield "model.embed_tokens.weight", matrix(size("vocab_size"), hidden)
    for i in range(size("num_hidden_layers")):
        prefix = f"model.layers.{i}."
        for name, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            yield f"{prefix}self_attn.{name}_proj.weight", matrix(rows, hidden)
            if shape["model_type"] == "qwen2":
                yield f"{prefix}self_attn.{name}_proj.bias", matrix(1, rows)[0]
        yield f"{prefix}self_attn.o_proj.weight", matrix(hidden, heads * head_dim)
        yield f"{prefix}mlp.gate_proj.weight", matrix(inter, hidden)
        yield f"{prefix}mlp.up_proj.weight", matrix(inter, hidden)
        yield f"{prefix}mlp.down_proj.weight", matrix(hidden, inter)
        yield f"{prefix}input_layernorm.weight", torch.ones(hidden, dtype=torch.bfloat16)
        yield f"{prefix}post_attention_layernorm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def save(made: Iterable[tuple[str, torch.Tensor]], output: Path, shard_bytes: int | None) -> None:
    """One file, or shards of at least so many bytes, of which one is in memory at a time."""
    if shard_bytes is None:
        save_file(dict(made), output / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write_shard() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, output / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in made:
        shard[name] = tensor
        if sum(one.nbytes for one in shard.values()) >= shard_bytes:
            write_shard()
    if shard:
        write_shard()
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}) + "\n")


END, BEGIN = "<|end|>", "<|begin|>"


def tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly vocab_size tokens: END, BEGIN, the bytes, pairs of letters, and words never merged to.

    Every id decodes to a text of its own, so that servers detokenize what a random model says as they do real output.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [(a, b) for a in letters for b in letters]
    words = [END, BEGIN, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    words += [f"Ġw{i}" for i in range(vocab_size - len(words))]
    found = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (END, BEGIN)])
    return found


def write(name: str, output: Path, seed: int = 0, shard_bytes: int | None = None) -> None:
    """Writes the model `name` of SHAPES into the directory `output`; the weights are a function of name and seed."""
    shape = SHAPES[name]
    output.mkdir(parents=True, exist_ok=True)
    config = {**shape, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 1}
    vocab_size = shape["vocab_size"]
    assert isinstance(vocab_size, int)
    tokenizer(vocab_size).save(str(output / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": BEGIN}
    (output / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
    save(tensors(shape, seed), output, shard_bytes)
    # Last: a directory with a config is complete.
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-mib", type=int, help="shards of so many MiB at least; without it one file")
    arguments = parser.parse_args()
    shard_bytes = None if arguments.shard_mib is None else arguments.shard_mib << 20
    write(arguments.shape, arguments.output, arguments.seed, shard_bytes)


if __name__ == "__main__":
    main()
