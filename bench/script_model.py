"""A model that outputs a script given in its prompt, with all the work of a model of its shape.

Texts of a random model do not repeat their prompts, so they cannot show the gain from speculation. This one copies: at
each position its first attention looks back by exactly `reach` tokens, and the head outputs the token found there. With
a prompt of `reach` + 1 tokens that begins with a script, it outputs the script. The prompt writes the script in second
names of its tokens, so that prompt lookup finds nothing there. Other weights are random, or zero where the result must
not change.

A draft that misreads third names of tokens guesses wrong where a script uses these, which sets its acceptance rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.make_model import END, save, tokenizer
from bench.shapes import SHAPES, named

HEAD_DIM = 64
_STRENGTH = math.sqrt(400.0)  # of queries and of keys
QUARTER: dict[str, object] = {
    **SHAPES["qwen2.5-0.5b"],
    **{"hidden_size": 448, "intermediate_size": 2432, "num_hidden_layers": 24},
    **{"num_attention_heads": 7, "num_key_value_heads": 1},
}
"""Shape of the draft: a quarter of the weights of a layer."""
STATES: dict[str, object] = {**SHAPES["lfm2-1.2b"], "vocab_size": SHAPES["qwen2.5-0.5b"]["vocab_size"]}
"""Shape with gated short convolutions, and a vocabulary of which a third holds texts."""
ALL_SHAPES = {"qwen2.5-0.5b": SHAPES["qwen2.5-0.5b"], "quarter": QUARTER, "lfm2-1.2b": STATES}


def names_of(shape: dict[str, object]) -> int:
    """Number of tokens that have three names: t, t + names and t + 2 · names."""
    return _size(shape, "vocab_size") // 3


def script_prompt(
    script: Sequence[int], text: Sequence[int], reach: int, names: int, wrong: float, seed: int
) -> list[int]:
    """A prompt of `reach` + 1 tokens: the script in other names, a filler that nothing repeats, and the visible text.

    wrong: share of the script's tokens written in third names. Raises ValueError if it does not fit.
    """
    rng = np.random.default_rng(seed)
    hidden = [token + names * (1 + int(rng.random() < wrong)) for token in script]
    fill = reach + 1 - len(script) - len(text)
    if fill < 0:
        raise ValueError(f"{len(script)} tokens of script and {len(text)} of text do not fit {reach + 1}")
    middle = rng.choice(np.arange(names // 2, names), fill, replace=False)
    return hidden + [int(token) for token in middle] + list(text)


def write(name: str, output: Path, reach: int, seed: int = 0, draft: bool = False) -> None:
    """Writes the checkpoint. draft: it reads a third name as that of another token."""
    shape = {**ALL_SHAPES[name], "tie_word_embeddings": False}
    output.mkdir(parents=True, exist_ok=True)
    tokenizer(_size(shape, "vocab_size")).save(str(output / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (output / "tokenizer_config.json").write_text(json.dumps(described) + "\n")
    save(_tensors(shape, reach, seed, draft), output, None)
    config = {"hidden_act": "silu", **shape, "torch_dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 1}
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _tensors(shape: dict[str, object], reach: int, seed: int, draft: bool) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = _size(shape, "num_attention_heads"), _size(shape, "num_key_value_heads")
    width, names = kv_heads * HEAD_DIM, names_of(shape)
    # Codes depend on the seed, not on the shape, which takes the first `width` signs of each.
    codes = (
        torch.randint(0, 2, (names, max(width, 2 * HEAD_DIM)), generator=torch.Generator().manual_seed(seed)) * 2.0
        - 1.0
    )
    codes = codes[:, :width]
    kinds, theta = shape.get("layer_types"), shape.get("rope_theta")
    looking = kinds.index("full_attention") if isinstance(kinds, list) else 0
    biased = shape["model_type"] == "qwen2"
    if theta is None:
        rope = shape["rope_parameters"]
        assert isinstance(rope, dict)
        theta = rope["rope_theta"]
    theta = float(str(theta))
    for tensor, size in named(shape):
        value = torch.randn(size, generator=generator) * 0.02
        looks = f".layers.{looking}." in tensor
        if tensor.endswith("norm.weight"):
            value = torch.ones(size)
        elif tensor == "model.embed_tokens.weight":
            value = torch.zeros(size)
            third = codes.roll(1, 0) if draft else codes
            for place, known in enumerate((codes, codes, third)):
                value[place * names : (place + 1) * names, :width] = known
            if not biased:
                value[:, 2 * width] = 1
        elif tensor == "lm_head.weight":
            value = torch.zeros(size)
            value[:names, width : 2 * width] = codes
        elif tensor.endswith(("down_proj.weight", "w2.weight", "o_proj.weight", "out_proj.weight", ".bias")) or (
            looks and tensor.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        ):
            value = torch.zeros(size)
        if looks:
            _look_back(tensor, value, reach, heads, kv_heads, theta, None if biased else 2 * width)
        yield tensor, value.to(torch.bfloat16)


def _look_back(
    tensor: str, value: torch.Tensor, reach: int, heads: int, kv_heads: int, theta: float, constant: int | None
) -> None:
    """Sets weights of the layer that looks back: constant queries and keys whose rotated product is highest `reach`
    tokens back, and codes as values. Without biases, what is constant comes of a column of the embedding, and norms
    of heads give the strength."""
    half, width = HEAD_DIM // 2, kv_heads * HEAD_DIM
    if tensor.endswith("v_proj.weight"):
        value[:, :width] = torch.eye(width)
    elif tensor.endswith(("o_proj.weight", "out_proj.weight")):
        for kv in range(kv_heads):
            head = kv * (heads // kv_heads)
            rows = slice(width + kv * HEAD_DIM, width + (kv + 1) * HEAD_DIM)
            value[rows, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 4 * torch.eye(HEAD_DIM)
    elif tensor.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        value[:] = _STRENGTH * math.sqrt(half / HEAD_DIM)
    elif ".q_proj." in tensor or ".k_proj." in tensor:
        angles = reach * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        whole = torch.cat((torch.ones(half), torch.zeros(half)))
        if ".q_proj." in tensor:
            whole = torch.cat((torch.cos(angles), -torch.sin(angles)))
        repeated = whole.float().repeat(len(value) // HEAD_DIM)
        if tensor.endswith(".bias"):
            value[:] = _STRENGTH * repeated
        elif constant is not None:
            value[:, constant] = repeated


def _size(shape: dict[str, object], name: str) -> int:
    value = shape[name]
    assert isinstance(value, int)
    return value
