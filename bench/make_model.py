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

from bench.shapes import SHAPES, is_norm, named, of_layers


def tensors(shape: dict[str, object], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """bf16 tensors under Hugging Face names. Values are small, so that activations stay finite through all layers."""
    generator = torch.Generator().manual_seed(seed)
    for name, size in named(shape):
        if is_norm(name, size):
            # Norms of Gemma 3 and Qwen3.5 multiply by 1 + factor, but for those inside delta nets.
            plus_one = shape["model_type"] in ("gemma3_text", "qwen3_5_text") and "linear_attn" not in name
            factor = 0.0 if plus_one else 1.0
            yield name, torch.full(size, factor, dtype=torch.bfloat16)
        else:
            yield name, (torch.randn(size, generator=generator) * 0.02).to(torch.bfloat16)


def save(made: Iterable[tuple[str, torch.Tensor]], output: Path, shard_bytes: int | None) -> None:
    """Writes one file, or shards of at least shard_bytes, of which one is in memory at a time."""
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
    """Byte-level BPE of exactly vocab_size tokens: END, BEGIN, bytes, pairs of letters, and words never merged to.

    Every id decodes to a different text, so that detokenizing a random model's output costs as much as real output.
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


def config_of(shape: dict[str, object]) -> dict[str, object]:
    """The content of config.json."""
    activation = {} if {"hidden_activation", "mlp_hidden_act"} & shape.keys() else {"hidden_act": "silu"}
    return {**activation, **shape, "torch_dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 1}


def write(name: str, output: Path, seed: int = 0, shard_bytes: int | None = None, layers: int | None = None) -> None:
    """Writes the model `name` of SHAPES into the directory `output`; the weights are a function of name and seed.

    layers: instead of the shape's own number.
    """
    shape = SHAPES[name] if layers is None else of_layers(SHAPES[name], layers)
    output.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    vocab_size = shape["vocab_size"]
    assert isinstance(vocab_size, int)
    tokenizer(vocab_size).save(str(output / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": BEGIN}
    (output / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
    save(tensors(shape, seed), output, shard_bytes)
    # Written last: a directory with config.json is complete.
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
