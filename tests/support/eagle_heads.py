"""Tiny random EAGLE heads as they are published, and what such a head computes, in torch alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

_LAYER = "layers.0."


def make_head(path: Path, model: Path, *, seed: int = 0, **fields: object) -> Path:
    """A head for the tiny Llama at `model`, saved to `path`. fields: of its config.json."""
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "bias": True, **fields}
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values

    tensors = {
        "fc.weight": random(hidden, 2 * hidden),
        f"{_LAYER}self_attn.q_proj.weight": random(queries, hidden) * 2,
        f"{_LAYER}self_attn.k_proj.weight": random(keys, hidden) * 2,
        f"{_LAYER}self_attn.v_proj.weight": random(keys, hidden),
        f"{_LAYER}self_attn.o_proj.weight": random(hidden, queries),
        f"{_LAYER}post_attention_layernorm.weight": 1 + random(hidden),
        f"{_LAYER}mlp.gate_proj.weight": random(inner, hidden),
        f"{_LAYER}mlp.up_proj.weight": random(inner, hidden),
        f"{_LAYER}mlp.down_proj.weight": random(hidden, inner),
        # Published heads have a copy, which is not read.
        "embed_tokens.weight": random(config["vocab_size"], hidden),
    }
    if config["bias"]:
        tensors["fc.bias"] = random(hidden)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


class ReferenceHead:
    """The head at `path` for the model at `model`, float32."""

    def __init__(self, path: Path, model: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = load_file(path / "model.safetensors")
        of_model = load_file(model / "model.safetensors")
        self.embedding, self.output = of_model["model.embed_tokens.weight"], of_model["lm_head.weight"]

    def states(self, tokens: list[int], states: Tensor) -> Tensor:
        """What the head guesses of each of `tokens`, the first at position 0; states: [tokens, D], each of the token
        before. float32 [tokens, D]."""
        c, w, count = self.config, self.weights, len(tokens)
        bias = w.get("fc.bias")
        x = F.linear(torch.cat((self.embedding[torch.tensor(tokens)], states), -1), w["fc.weight"], bias)
        dim = c["head_dim"]

        def heads(name: str) -> Tensor:
            made: Tensor = F.linear(x, w[f"{_LAYER}self_attn.{name}_proj.weight"]).view(count, -1, dim).transpose(0, 1)
            return made

        frequencies: Tensor = c["rope_parameters"]["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(count)[:, None] * frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def rotated(head: Tensor) -> Tensor:
            left, right = head.chunk(2, -1)
            return head * cos + torch.cat((-right, left), -1) * sin

        q, k, v = rotated(heads("q")), rotated(heads("k")), heads("v")
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) * dim**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        x = x + F.linear(attended, w[f"{_LAYER}self_attn.o_proj.weight"])
        squares = x.pow(2).mean(-1, keepdim=True)
        normed = x * torch.rsqrt(squares + c["rms_norm_eps"]) * w[f"{_LAYER}post_attention_layernorm.weight"]
        gate, up = (F.linear(normed, w[f"{_LAYER}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        guessed: Tensor = x + F.linear(F.silu(gate) * up, w[f"{_LAYER}mlp.down_proj.weight"])
        return guessed

    def logits(self, states: Tensor) -> Tensor:
        """float32 [..., V]."""
        return F.linear(states, self.output)


def hidden_states(model: Path, tokens: list[int]) -> Tensor:
    """What transformers gives behind the last norm, float32 [tokens, D]."""
    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states: Tensor = found.model(torch.tensor([tokens])).last_hidden_state[0]
    return states
