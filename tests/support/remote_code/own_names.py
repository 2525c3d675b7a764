"""Models with names of their own: Qwen, ChatGLM, InternLM2, TeleChat."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.remote_code.parts import (
    Config,
    GatedMlp,
    RmsNorm,
    attend,
    rotate_halves,
    rotate_pairs,
    steps_of_length,
)


class QwenAttention(nn.Module):
    """Of a text that is run as a whole: beyond the length of training its length decides about frequencies, and
    queries grow."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, width = config["num_attention_heads"], config["num_attention_heads"] * config["kv_channels"]
        self.theta, self.trained = config["rotary_emb_base"], config["seq_length"]
        self.stretches, self.grows = config["use_dynamic_ntk"], config["use_logn_attn"]
        self.c_attn = nn.Linear(config["hidden_size"], 3 * width)
        self.c_proj = nn.Linear(width, config["hidden_size"], bias=not config["no_bias"])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.c_attn(x).chunk(3, dim=-1))
        theta, dim = self.theta, q.shape[-1]
        if self.stretches:
            theta *= steps_of_length(len(x), self.trained) ** (dim / (dim - 2))
        q, k = rotate_halves(q, theta), rotate_halves(k, theta)
        if self.grows:
            lengths = torch.arange(1, len(x) + 1).double()
            q = q * torch.clamp(lengths.log() / math.log(self.trained), min=1.0).float()[:, None, None]
        made: Tensor = self.c_proj(attend(q, k, v))
        return made


class QwenMlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner, bias = config["hidden_size"], config["intermediate_size"] // 2, not config["no_bias"]
        self.w1 = nn.Linear(hidden, inner, bias=bias)
        self.w2 = nn.Linear(hidden, inner, bias=bias)
        self.c_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.c_proj(self.w1(x) * F.silu(self.w2(x)))
        return made


class QwenBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_epsilon"]
        self.ln_1, self.attn = RmsNorm(hidden, eps), QwenAttention(config)
        self.ln_2, self.mlp = RmsNorm(hidden, eps), QwenMlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        made: Tensor = x + self.mlp(self.ln_2(x))
        return made


class QwenBody(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.h = nn.ModuleList(QwenBlock(config) for _ in range(config["num_hidden_layers"]))
        self.ln_f = RmsNorm(config["hidden_size"], config["layer_norm_epsilon"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        made: Tensor = self.ln_f(x)
        return made


class Qwen(nn.Module):
    """forward: ids [T] → logits [T, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.transformer = QwenBody(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer(ids))
        return logits


class GlmAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.size = config["num_attention_heads"], config["kv_channels"]
        self.groups = config["multi_query_group_num"] if config["multi_query_attention"] else None
        self.theta = 10000.0 * config.get("rope_ratio", 1)
        width, hidden = self.heads * self.size, config["hidden_size"]
        out = 3 * width if self.groups is None else width + 2 * self.groups * self.size
        bias = config["add_bias_linear"]
        self.query_key_value = nn.Linear(hidden, out, bias=bias or config["add_qkv_bias"])
        self.dense = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.query_key_value(x)
        if self.groups is None:
            q, k, v = mixed.unflatten(-1, (self.heads, 3 * self.size)).chunk(3, dim=-1)
        else:
            shared = self.groups * self.size
            parts = mixed.split((self.heads * self.size, shared, shared), dim=-1)
            q, k, v = (part.unflatten(-1, (-1, self.size)) for part in parts)
        q, k = (rotate_pairs(part, self.theta, self.size // 2) for part in (q, k))
        made: Tensor = self.dense(attend(q, k, v))
        return made


class GlmMlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner, bias = config["hidden_size"], config["ffn_hidden_size"], config["add_bias_linear"]
        self.dense_h_to_4h = nn.Linear(hidden, 2 * inner, bias=bias)
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, dim=-1)
        made: Tensor = self.dense_4h_to_h(F.silu(gate) * up)
        return made


class GlmBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layernorm_epsilon"]
        self.input_layernorm, self.self_attention = RmsNorm(hidden, eps), GlmAttention(config)
        self.post_attention_layernorm, self.mlp = RmsNorm(hidden, eps), GlmMlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class GlmEncoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GlmBlock(config) for _ in range(config["num_layers"]))
        self.final_layernorm = RmsNorm(config["hidden_size"], config["layernorm_epsilon"])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.final_layernorm(x)
        return made


class ChatGlm(nn.Module):
    """forward: ids [T] → logits [T, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, vocab = config["hidden_size"], config["padded_vocab_size"]
        self.transformer = nn.Module()
        self.transformer.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(vocab, hidden)})
        self.transformer.rotary_pos_emb = nn.Module()
        self.transformer.rotary_pos_emb.register_buffer("inv_freq", torch.ones(config["kv_channels"] // 4))
        self.transformer.encoder = GlmEncoder(config)
        self.transformer.output_layer = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer.get_submodule("embedding.word_embeddings")(ids)
        x = self.transformer.get_submodule("encoder")(x)
        logits: Tensor = self.transformer.get_submodule("output_layer")(x)
        return logits


class InternLm2Block(nn.Module):
    """wqkv has, for each head of k, its heads of q, then k, then v."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.size, self.theta, bias = hidden // heads, config["rope_theta"], config["bias"]
        self.attention_norm, self.ffn_norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        wqkv = nn.Linear(hidden, (heads + 2 * self.groups) * self.size, bias=bias)
        self.attention = nn.ModuleDict({"wqkv": wqkv, "wo": nn.Linear(heads * self.size, hidden, bias=bias)})
        self.feed_forward = nn.ModuleDict(
            {
                "w1": nn.Linear(hidden, inner, bias=False),
                "w3": nn.Linear(hidden, inner, bias=False),
                "w2": nn.Linear(inner, hidden, bias=False),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention["wqkv"](self.attention_norm(x)).unflatten(-1, (self.groups, -1, self.size))
        q, k, v = mixed[:, :, :-2].flatten(1, 2), mixed[:, :, -2], mixed[:, :, -1]
        x = x + self.attention["wo"](attend(rotate_halves(q, self.theta), rotate_halves(k, self.theta), v))
        normed, ffn = self.ffn_norm(x), self.feed_forward
        made: Tensor = x + ffn["w2"](F.silu(ffn["w1"](normed)) * ffn["w3"](normed))
        return made


class InternLm2(nn.Module):
    """forward: ids [T] → logits [T, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.model = nn.ModuleDict(
            {
                "tok_embeddings": nn.Embedding(config["vocab_size"], hidden),
                "layers": nn.ModuleList(InternLm2Block(config) for _ in range(config["num_hidden_layers"])),
                "norm": RmsNorm(hidden, config["rms_norm_eps"]),
            }
        )
        self.output = nn.Linear(hidden, config["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model["tok_embeddings"](ids)
        for layer in self.model["layers"].children():
            x = layer(x)
        logits: Tensor = self.output(self.model["norm"](x))
        return logits


class TeleChatBlock(nn.Module):
    """key_value has k and v of one head after the other."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.heads, eps = config["hidden_size"], config["n_head"], config["layer_norm_epsilon"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.size = hidden // self.heads
        self.base, self.trained = config["base_seqlen"], config["training_seqlen"]
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.self_attention = nn.ModuleDict(
            {
                "query": nn.Linear(hidden, hidden, bias=False),
                "key_value": nn.Linear(hidden, 2 * self.kv_heads * self.size, bias=False),
                "dense": nn.Linear(hidden, hidden),
            }
        )
        self.mlp = GatedMlp(hidden, config["ffn_hidden_size"], down_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        normed, attention = self.input_layernorm(x), self.self_attention
        q = attention["query"](normed).unflatten(-1, (self.heads, self.size))
        k, v = attention["key_value"](normed).unflatten(-1, (self.kv_heads, 2 * self.size)).chunk(2, dim=-1)
        length = max(len(x), self.trained)
        theta = 10000.0 * steps_of_length(length, self.base) ** (self.size / (self.size - 2))
        scale = 1.0 if length <= self.trained else 0.1 * math.log(length / self.trained) + 1.0
        q, k = rotate_halves(q, theta) * scale, rotate_halves(k, theta) * scale
        x = x + attention["dense"](attend(q, k, v))
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class TeleChat(nn.Module):
    """forward: ids [T] → logits [T, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.transformer = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config["vocab_size"], hidden),
                "h": nn.ModuleList(TeleChatBlock(config) for _ in range(config["n_layer"])),
                "ln_f": RmsNorm(hidden, config["layer_norm_epsilon"]),
            }
        )
        self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["word_embeddings"](ids)
        for block in self.transformer["h"].children():
            x = block(x)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits
