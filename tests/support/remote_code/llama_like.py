"""Models with Llama's names: InternLM, Orion, MiniCPM, DeepSeek-MoE, MiMo, XVERSE, Baichuan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.remote_code.parts import Config, GatedMlp, RmsNorm, attend, rotate_halves


class Attention(nn.Module):
    def __init__(self, config: Config, *, bias: bool, out_bias: bool) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads", self.heads)
        self.theta = config.get("rope_theta", 10000.0)
        size = hidden // self.heads
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=out_bias)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        k, v = (linear(x).unflatten(-1, (self.kv_heads, -1)) for linear in (self.k_proj, self.v_proj))
        made: Tensor = self.o_proj(attend(rotate_halves(q, self.theta), rotate_halves(k, self.theta), v))
        return made


class Layer(nn.Module):
    factor = 1.0

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x)) * self.factor
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x)) * self.factor
        return made


class Llama(nn.Module):
    """forward: ids [T] → logits [T, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.model.layers = nn.ModuleList(self.layer(i) for i in range(config["num_hidden_layers"]))
        self.model.norm = self.norm()
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def layer(self, index: int) -> nn.Module:
        return Layer(self.attention(), self.mlp(index), (self.norm(), self.norm()))

    def attention(self) -> nn.Module:
        return Attention(self.config, bias=False, out_bias=False)

    def mlp(self, layer: int) -> nn.Module:
        return GatedMlp(self.config["hidden_size"], self.config["intermediate_size"])

    def norm(self) -> nn.Module:
        return RmsNorm(self.config["hidden_size"], self.config["rms_norm_eps"])

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.model.get_submodule("layers").children():
            x = layer(x)
        made: Tensor = self.model.get_submodule("norm")(x)
        return made

    def embedded(self, ids: Tensor) -> Tensor:
        made: Tensor = self.model.get_submodule("embed_tokens")(ids)
        return made

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.hidden(self.embedded(ids)))
        return logits


class InternLm(Llama):
    def attention(self) -> nn.Module:
        return Attention(self.config, bias=self.config["bias"], out_bias=self.config["bias"])


class Mimo(Llama):
    """Its last layers, which guess further tokens, are in the checkpoint too."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model.mtp_layers = nn.ModuleList(
            Layer(self.attention(), self.mlp(0), (self.norm(), self.norm()))
            for _ in range(config["num_nextn_predict_layers"])
        )

    def attention(self) -> nn.Module:
        return Attention(self.config, bias=True, out_bias=False)


class Orion(Llama):
    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.config["hidden_size"], eps=self.config["rms_norm_eps"])


class MiniCpm(Llama):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for layer in self.model.get_submodule("layers").children():
            assert isinstance(layer, Layer)
            layer.factor = config["scale_depth"] / config["num_hidden_layers"] ** 0.5

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(self.embedded(ids) * self.config["scale_emb"])
        logits: Tensor = self.lm_head(x / (self.config["hidden_size"] / self.config["dim_model_base"]))
        return logits


class DeepSeekExperts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.top_k, self.normalises = config["num_experts_per_tok"], config["norm_topk_prob"]
        self.gate = nn.Linear(hidden, config["n_routed_experts"], bias=False)
        self.experts = nn.ModuleList(GatedMlp(hidden, inner) for _ in range(config["n_routed_experts"]))
        self.shared_experts = GatedMlp(hidden, config["n_shared_experts"] * inner)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        if self.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        rows = []
        for token, of_token, ids in zip(x, weights, chosen, strict=True):
            made = [weight * self.experts[int(i)](token) for weight, i in zip(of_token, ids, strict=True)]
            rows.append(torch.stack(made).sum(0))
        shared: Tensor = self.shared_experts(x)
        return torch.stack(rows) + shared


class DeepSeek(Llama):
    def mlp(self, layer: int) -> nn.Module:
        return super().mlp(layer) if layer < self.config["first_k_dense_replace"] else DeepSeekExperts(self.config)


class PackedAttention(nn.Module):
    """Of Baichuan: rotated, or with ALiBi."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.alibi = "max_position_embeddings" not in config
        self.W_pack = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.W_pack(x).chunk(3, dim=-1))
        bias = None
        if self.alibi:
            slopes = torch.tensor(alibi_slopes(self.heads))
            bias = slopes[:, None, None] * torch.arange(len(x)).float()
        else:
            q, k = rotate_halves(q, 10000.0), rotate_halves(k, 10000.0)
        made: Tensor = self.o_proj(attend(q, k, v, bias))
        return made


def alibi_slopes(heads: int) -> list[float]:
    """Of a power of two 2^(−8 i / heads); else those of the one below, then every other one of the one above."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if power == heads:
        return [2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)]
    return alibi_slopes(power) + alibi_slopes(2 * power)[0::2][: heads - power]


class Baichuan(Llama):
    """The second generation norms rows of the output projection."""

    def attention(self) -> nn.Module:
        return PackedAttention(self.config)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(self.embedded(ids))
        second = "z_loss_weight" in self.config
        return F.linear(x, F.normalize(self.lm_head.weight) if second else self.lm_head.weight)
