"""MiniMax-Text-01 of softmax attention alone, with its authors' names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.remote_code.llama_like import Llama
from support.remote_code.parts import Config, attend, rotate_halves


class Attention(nn.Module):
    """The first elements of each head are rotated."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, size = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.rotated, self.theta = config["rotary_dim"], float(config["rope_theta"])
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)

    def turned(self, x: Tensor) -> Tensor:
        return torch.cat((rotate_halves(x[..., : self.rotated], self.theta), x[..., self.rotated :]), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        k, v = (linear(x).unflatten(-1, (self.kv_heads, -1)) for linear in (self.k_proj, self.v_proj))
        made: Tensor = self.o_proj(attend(self.turned(q), self.turned(k), v))
        return made


class Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(hidden, inner, bias=False),
            nn.Linear(inner, hidden, bias=False),
            nn.Linear(hidden, inner, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return made


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.top_k = config["hidden_size"], config["num_experts_per_tok"]
        self.gate = nn.Linear(hidden, config["num_local_experts"], bias=False)
        self.experts = nn.ModuleList(
            Expert(hidden, config["intermediate_size"]) for _ in range(config["num_local_experts"])
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        rows = []
        for token, of_token, ids in zip(x, weights, chosen, strict=True):
            rows.append(sum(weight * self.experts[int(i)](token) for weight, i in zip(of_token, ids, strict=True)))
        return torch.stack(rows)


class Layer(nn.Module):
    """The residual is what a norm makes of it."""

    def __init__(self, config: Config, norms: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.self_attn, self.block_sparse_moe = Attention(config), Experts(config)
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: Tensor) -> Tensor:
        blocks = (
            (self.input_layernorm, self.self_attn, "layernorm_full_attention"),
            (self.post_attention_layernorm, self.block_sparse_moe, "layernorm_mlp"),
        )
        for norm, block, factors in blocks:
            x = norm(x)
            x = x * self.config[f"{factors}_alpha"] + block(x) * self.config[f"{factors}_beta"]
        return x


class MiniMax(Llama):
    def layer(self, index: int) -> nn.Module:
        assert self.config["attn_type_list"][index] == 1
        return Layer(self.config, (self.norm(), self.norm()))
