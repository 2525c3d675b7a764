"""A decoder in plain torch, the reference for an artifact's results and speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shapes import named


def read_weights(shape: dict[str, Any], folder: Path, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors by name of a checkpoint that `write_random_model` wrote, which fixes their order."""
    data = np.fromfile(folder / "model.safetensors", np.uint8)
    at = 8 + int(data[:8].view(np.uint64)[0])
    weights = {}
    for name, size in named(shape):
        count = 2 * int(np.prod(size))
        bits = torch.from_numpy(data[at : at + count].view(np.int16).copy())
        weights[name] = bits.view(torch.bfloat16).reshape(size).to(device, dtype)
        at += count
    return weights


class TorchModel:
    """Llama and Qwen2: RMS norms, rotary positions, grouped heads, gated MLPs."""

    def __init__(self, shape: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self._shape, self._weights = shape, weights
        self._heads, self._kv_heads = int(shape["num_attention_heads"]), int(shape["num_key_value_heads"])
        self._head_dim = int(shape.get("head_dim") or shape["hidden_size"] // self._heads)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + float(self._shape["rms_norm_eps"]))
        return y.to(x.dtype) * self._weights[f"{name}.weight"]

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [..., tokens, head_dim]. positions: of the tokens."""
        half = self._head_dim // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angles = positions[:, None] * float(self._shape["rope_theta"]) ** -steps
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half].float(), x[..., half:].float()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self._linear(x, f"{name}.mlp.gate_proj"), self._linear(x, f"{name}.mlp.up_proj")
        return self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")

    def _head(self, x: Tensor) -> Tensor:
        head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        return F.linear(self._norm(x, "model.norm"), head)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[tokens, vocab], float32."""
        device = self._weights["model.embed_tokens.weight"].device
        x = self._weights["model.embed_tokens.weight"][torch.tensor(tokens, device=device)]
        positions = torch.arange(len(tokens), device=device)
        for layer in range(int(self._shape["num_hidden_layers"])):
            name = f"model.layers.{layer}"
            y = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self._linear(y, f"{name}.self_attn.{part}_proj").view(len(tokens), -1, self._head_dim).transpose(0, 1)
                for part in "qkv"
            )
            groups = self._heads // self._kv_heads
            q, k = self._rotated(q, positions), self._rotated(k, positions).repeat_interleave(groups, 0)
            v = v.repeat_interleave(groups, 0)
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            x = x + self._linear(y.transpose(0, 1).reshape(len(tokens), -1), f"{name}.self_attn.o_proj")
            x = x + self._mlp(self._norm(x, f"{name}.post_attention_layernorm"), name)
        return self._head(x).float()
