"""Encoders whose authors publish code of their own: nomic-embed-text, Jina's XLM-RoBERTa."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.remote_code.parts import Config


def _attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, H, d] → [T, H d]: every token sees all."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
    made: Tensor = (weights @ v).transpose(0, 1).flatten(1)
    return made


class _Mixer(nn.Module):
    """Wqkv has all heads of q, then of k, then of v."""

    def __init__(self, hidden: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.out_proj = nn.Linear(hidden, hidden, bias=bias)

    def rotated(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.Wqkv(x).chunk(3, dim=-1))
        made: Tensor = self.out_proj(_attend_all(self.rotated(q), self.rotated(k), v))
        return made


class NomicMixer(_Mixer):
    """The rotary base grows with the text, where the config has a factor, beyond the length of training."""

    def __init__(self, config: Config) -> None:
        super().__init__(config["n_embd"], config["n_head"], bias=config["qkv_proj_bias"])
        self.base, self.factor = float(config["rotary_emb_base"]), config.get("rotary_scaling_factor")
        self.trained = config["max_trained_positions"]

    def rotated(self, x: Tensor) -> Tensor:
        length, dim, base = len(x), x.shape[-1], self.base
        if self.factor and length > self.trained:
            base *= (self.factor * length / self.trained - (self.factor - 1)) ** (dim / (dim - 2))
        frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)[:, None]
        cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), -1) * sin


class NomicMlp(nn.Module):
    """fc12 is the gate. Its inner size is a multiple of 256."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config["n_embd"], -(-config["n_inner"] // 256) * 256
        self.fc11 = nn.Linear(hidden, inner, bias=config["mlp_fc1_bias"])
        self.fc12 = nn.Linear(hidden, inner, bias=config["mlp_fc1_bias"])
        self.fc2 = nn.Linear(inner, hidden, bias=config["mlp_fc2_bias"])

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc2(self.fc11(x) * F.silu(self.fc12(x)))
        return made


class NomicBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps = config["n_embd"], config["layer_norm_epsilon"]
        self.attn, self.mlp = NomicMixer(config), NomicMlp(config)
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps=eps), nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.attn(x) + x)
        made: Tensor = self.norm2(self.mlp(x) + x)
        return made


class NomicBert(nn.Module):
    """forward: ids [T], all of the first kind → hidden states [T, D]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["n_embd"]
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config["vocab_size"], hidden),
                "token_type_embeddings": nn.Embedding(config["type_vocab_size"], hidden),
            }
        )
        self.emb_ln = nn.LayerNorm(hidden, eps=config["layer_norm_epsilon"])
        blocks = (NomicBlock(config) for _ in range(config["n_layer"]))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(blocks)})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings["word_embeddings"](ids) + self.embeddings["token_type_embeddings"](torch.zeros_like(ids))
        x = self.emb_ln(x)
        for block in self.encoder["layers"].children():
            x = block(x)
        made: Tensor = x
        return made


class FlashBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.mixer = _Mixer(hidden, config["num_attention_heads"], bias=True)
        inner = config["intermediate_size"]
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(hidden, inner), "fc2": nn.Linear(inner, hidden)})
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps=eps), nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.mixer(x) + x)
        made: Tensor = self.norm2(self.mlp["fc2"](F.gelu(self.mlp["fc1"](x))) + x)
        return made


class FlashRoberta(nn.Module):
    """forward: ids [T] → hidden states [T, D]. Positions are counted from behind the padding's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.padding = config["hidden_size"], config["pad_token_id"]
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config["vocab_size"], hidden),
                "position_embeddings": nn.Embedding(config["max_position_embeddings"], hidden),
                "token_type_embeddings": nn.Embedding(config["type_vocab_size"], hidden),
            }
        )
        self.emb_ln = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])
        blocks = (FlashBlock(config) for _ in range(config["num_hidden_layers"]))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(blocks)})

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(len(ids)) + self.padding + 1
        x = self.embeddings["word_embeddings"](ids) + self.embeddings["position_embeddings"](positions)
        x = self.emb_ln(x + self.embeddings["token_type_embeddings"](torch.zeros_like(ids)))
        for block in self.encoder["layers"].children():
            x = block(x)
        made: Tensor = x
        return made


class FlashRobertaClassifier(nn.Module):
    """forward: ids [T] → scores [labels] of the first token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.roberta = FlashRoberta(config)
        self.classifier = nn.ModuleDict(
            {"dense": nn.Linear(hidden, hidden), "out_proj": nn.Linear(hidden, config["num_labels"])}
        )

    def forward(self, ids: Tensor) -> Tensor:
        first = self.roberta(ids)[0]
        made: Tensor = self.classifier["out_proj"](torch.tanh(self.classifier["dense"](first)))
        return made
