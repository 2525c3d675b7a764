"""Norms over the hidden size and over heads."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.models import ops
from llmc.models.blocks.layers import Block, empty
from llmc.models.config import ModelConfig


class RmsNorm(Block):
    """weight float32 [D]."""

    def __init__(self, size: int, eps: float, act_dtype: str) -> None:
        super().__init__()
        self.weight = empty(size)
        self.eps = eps
        self.act_dtype = act_dtype

    def forward(self, x: Tensor) -> Tensor:
        """float32 [T, D] → act [T, D]."""
        return ops.rms_norm(x, self.weight, self.eps, act_dtype=self.act_dtype)


class UnpackedRmsNorm(Block):
    """weight: float32 [D]; for a result that is added and feeds no linear, if activations are not float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """float32 [T, D] → float32 [T, D]."""
        return over_root_mean_square(x, self.eps) * self.weight


class LayerNorm(Block):
    """weight, bias: float32 [D]; either may be absent."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, size: int, eps: float, act_dtype: str, *, weight: bool, bias: bool) -> None:
        super().__init__()
        self.register_parameter("weight", empty(size) if weight else None)
        self.register_parameter("bias", empty(size) if bias else None)
        self.eps = eps
        self.act_dtype = act_dtype

    def forward(self, x: Tensor) -> Tensor:
        """float32 [T, D] → act [T, D]."""
        x = centred(x, self.eps)
        if self.weight is not None:
            x = x * self.weight
        if self.bias is not None:
            x = x + self.bias
        return x.to(ops.torch_act_dtype(self.act_dtype))


class Rounded(Block):
    """Stands in for a norm where a model has none: only rounds."""

    def __init__(self, act_dtype: str) -> None:
        super().__init__()
        self.act_dtype = act_dtype

    def forward(self, x: Tensor) -> Tensor:
        """float32 [T, D] → act [T, D]."""
        return x.to(ops.torch_act_dtype(self.act_dtype))


def centred(x: Tensor, eps: float) -> Tensor:
    """x minus its mean over the last axis, divided by its standard deviation."""
    x = x - x.mean(-1, keepdim=True)
    return over_root_mean_square(x, eps)


def over_root_mean_square(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square over the last axis."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def result_norm(config: ModelConfig, act_dtype: str) -> Block:
    """The model's norm for a block's result: float32 [T, D] → float32 [T, D]. act_dtype: of activations."""
    if config.norm == "rms" and act_dtype != "f32":
        return UnpackedRmsNorm(config.hidden_size, config.norm_eps)
    return norm(config, "f32")


def rows_norm(config: ModelConfig) -> Block:
    """The model's norm for exported rows: float32 [T, D] → float32 [T, D], never packed."""
    if config.norm == "rms":
        return UnpackedRmsNorm(config.hidden_size, config.norm_eps)
    return norm(config, "f32")


def norm(config: ModelConfig, act_dtype: str) -> Block:
    """The model's norm over the hidden size. act_dtype: of its result."""
    if config.norm == "rms":
        return RmsNorm(config.hidden_size, config.norm_eps, act_dtype)
    return LayerNorm(config.hidden_size, config.norm_eps, act_dtype, weight=config.norm_weight, bias=config.norm_bias)
