"""The end of a model that returns vectors: pooling, then linear layers over the pooled rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from llmc.models import ops
from llmc.models.activations import activated
from llmc.models.blocks.layers import Block, Linear
from llmc.models.blocks.norms import result_norm
from llmc.models.config import ModelConfig
from llmc.models.pooled import Dense

_LEAST_LENGTH = 1e-12
"""Lower bound of a vector's length when normalising, as in torch."""


class DenseLayer(Block):
    """linear [size, columns], optionally an activation and a norm."""

    def __init__(self, config: ModelConfig, dense: Dense, columns: int, act_dtype: str) -> None:
        super().__init__()
        self.activation, self.act_dtype = dense.activation, act_dtype
        self.linear = Linear(dense.size, columns, dense.bias, act_dtype)
        self.norm = result_norm(config, act_dtype) if dense.norm else None

    def forward(self, x: Tensor) -> Tensor:
        """float32 [S, columns] → float32 [S, size]."""
        x = self.linear(x.to(ops.torch_act_dtype(self.act_dtype)))
        if self.activation is not None:
            x = torch.tanh(x) if self.activation == "tanh" else activated(x, self.activation)
        return x if self.norm is None else self.norm(x)


class PooledHead(Block):
    """The last layer's norm, if any, and the layers of `dense`."""

    def __init__(self, config: ModelConfig, act_dtype: str) -> None:
        super().__init__()
        assert config.pooled is not None
        self.config, self.merged = config.pooled, 1 if config.tower is None else config.tower.merged
        columns = self.merged * config.hidden_size
        if config.pooled.norm_eps is not None:
            config = replace(config, norm_eps=config.pooled.norm_eps)
        if self.config.norm_merged:
            config = replace(config, hidden_size=columns)
        self.norm = result_norm(config, act_dtype) if config.final_norm else None
        self.dense = nn.ModuleList()
        for dense in self.config.dense:
            self.dense.append(DenseLayer(config, dense, columns, act_dtype))
            columns = dense.size

    def forward(self, x: Tensor, query_start: Tensor, token_seq: Tensor, sample_index: Tensor) -> Tensor:
        """float32 [T, D] → float32 [S, size of the last layer, or D]."""
        pooling = self.config.pooling
        of_all = pooling in ("mean", "merged") and not self.config.norm_merged
        if of_all and self.norm is not None:
            x = self.norm(x)
        if pooling in ("last", "merged"):
            x = ops.gather_rows(x, sample_index, self.merged)
        else:
            x = ops.pool_rows(x, query_start, token_seq, sample_index, pooling == "mean")
        if not of_all and self.norm is not None:
            x = self.norm(x)
        for dense in self.dense:
            x = dense(x)
        if not self.config.normalised:
            return x
        return x / torch.clamp(torch.sqrt((x * x).sum(-1, keepdim=True)), min=_LEAST_LENGTH)
