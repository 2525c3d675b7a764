"""Tiny random EAGLE-3 heads as they are published, and what such a head computes, in torch alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor


def make_eagle3(
    path: Path, model: Path, *, tokens: int | None = 200, hidden: int = 0, layer: str = "midlayer", layers: int = 3,
    seed: int = 0, **fields: object,
) -> Path:  # fmt: skip
    """A head for the tiny Llama at `model`, saved to `path`.

    tokens: of its vocabulary, None for all of the model's. hidden: its size; 0 for the model's, and its embedding.
    layer: prefix of its layer's tensors. layers: of the model, whose rows it reads. fields: of its config.json.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    of_model, vocab = config["hidden_size"], config["vocab_size"]
    config |= {"num_hidden_layers": 1, **({} if tokens is None else {"draft_vocab_size": tokens})}
    config |= {"hidden_size": hidden, "target_hidden_size": of_model} if hidden else {}
    config |= fields
    size, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values

    tensors = {
        "fc.weight": random(size, layers * of_model),
        f"{layer}.input_layernorm.weight": 1 + random(size),
        f"{layer}.hidden_norm.weight": 1 + random(size),
        f"{layer}.self_attn.q_proj.weight": random(queries, 2 * size) * 2,
        f"{layer}.self_attn.k_proj.weight": random(keys, 2 * size) * 2,
        f"{layer}.self_attn.v_proj.weight": random(keys, 2 * size),
        f"{layer}.self_attn.o_proj.weight": random(size, queries),
        f"{layer}.post_attention_layernorm.weight": 1 + random(size),
        f"{layer}.mlp.gate_proj.weight": random(inner, size),
        f"{layer}.mlp.up_proj.weight": random(inner, size),
        f"{layer}.mlp.down_proj.weight": random(size, inner),
        "norm.weight": 1 + random(size),
        "lm_head.weight": random(vocab if tokens is None else tokens, size),
        **({"embed_tokens.weight": random(vocab, size)} if hidden else {}),
    }
    if tokens is not None:
        chosen = torch.randperm(vocab, generator=generator)[:tokens].sort().values
        tensors["d2t"] = chosen - torch.arange(tokens)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


class ReferenceEagle3:
    """The head at `path` for the model at `model`, float32. read: the model's layers whose inputs it reads."""

    def __init__(self, path: Path, model: Path, read: Sequence[int]) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = load_file(path / "model.safetensors")
        self.layer = "midlayer." if "midlayer.hidden_norm.weight" in self.weights else "layers.0."
        self.model, self.read = model, read
        if "embed_tokens.weight" not in self.weights:
            self.weights["embed_tokens.weight"] = load_file(model / "model.safetensors")["model.embed_tokens.weight"]

    def joined(self, tokens: list[int]) -> Tensor:
        """What the head takes of the model's layers after each token, float32 [tokens, D]."""
        found = transformers.AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float32, attn_implementation="eager"
        )
        rows: list[Tensor] = []
        found.model.layers[0].register_forward_pre_hook(lambda _, given: rows.append(given[0][0]))
        for layer in found.model.layers:
            layer.register_forward_hook(lambda _, given, made: rows.append(made[0]))
        with torch.no_grad():
            found.model(torch.tensor([tokens]))
        return F.linear(torch.cat([rows[number] for number in self.read], -1), self.weights["fc.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{self.layer}{name}.weight"])

    def states(self, tokens: list[int], states: Tensor) -> Tensor:
        """The head's rows for `tokens`, the first at position 0; states: [tokens, D], each of the token before.
        float32 [tokens, D]."""
        c, count, dim = self.config, len(tokens), self.config["head_dim"]
        embedded = self.weights["embed_tokens.weight"][torch.tensor(tokens)]
        normed = self._norm(f"{self.layer}hidden_norm", states)
        beside = torch.cat((self._norm(f"{self.layer}input_layernorm", embedded), normed), -1)
        q, k, v = (
            self._linear(f"self_attn.{name}_proj", beside).view(count, -1, dim).transpose(0, 1) for name in "qkv"
        )
        frequencies: Tensor = c["rope_parameters"]["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(count)[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles)

        def rotated(head: Tensor) -> Tensor:
            turned = torch.complex(*head.chunk(2, -1)) * turn
            return torch.cat((turned.real, turned.imag), -1)

        groups = q.shape[0] // k.shape[0]
        k, v = rotated(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        attended = F.scaled_dot_product_attention(rotated(q)[None], k[None], v[None], is_causal=True)[0]
        residual = normed if c.get("norm_before_residual") else states
        x = residual + self._linear("self_attn.o_proj", attended.transpose(0, 1).reshape(count, -1))
        inner = self._norm(f"{self.layer}post_attention_layernorm", x)
        gated = F.silu(self._linear("mlp.gate_proj", inner)) * self._linear("mlp.up_proj", inner)
        return x + self._linear("mlp.down_proj", gated)

    def logits(self, states: Tensor) -> Tensor:
        """float32 [..., V], of the model's tokens."""
        found = F.linear(self._norm("norm", states), self.weights["lm_head.weight"])
        if "d2t" not in self.weights:
            return found
        tokens = torch.arange(found.shape[-1]) + self.weights["d2t"]
        spread = torch.full((*found.shape[:-1], self.config["vocab_size"]), -1e30)
        spread[..., tokens] = found
        return spread
