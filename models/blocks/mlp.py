"""The feed-forward block; gate and up, if gated, are one fused projection."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.models import ops
from llmc.models.activations import activated
from llmc.models.blocks.layers import ActivatedLinear, Block, GatedLinear, Linear, empty
from llmc.models.config import ModelConfig


class Xielu(Block):
    """alpha_p · x² + βx for x > 0, else alpha_n · (eˣ − 1 − x) + βx; alpha_p, alpha_n: float32 [1], positive."""

    BETA, MOST = 0.5, -1e-6
    """MOST: upper clamp of the argument of eˣ."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = empty(1), empty(1)

    def forward(self, x: Tensor) -> Tensor:
        """float32, elementwise."""
        negative = torch.exp(torch.clamp(x, max=self.MOST)) - 1.0 - x
        return torch.where(x > 0, self.alpha_p * x * x, self.alpha_n * negative) + self.BETA * x


class Mlp(Block):
    """gate_up [2 I, D], gate first, or up [I, D]; then down [D, I]."""

    fuses = True
    """Whether the first layer may apply the activation; a subclass that overrides `_activated` says False."""

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__()
        inner = config.inner_size(layer)
        self.activation, self.gated = config.activation, config.gated
        self.act_dtype = act_dtype
        self.xielu = Xielu() if config.activation == "xielu" else None
        self.fused = self.fuses and self.xielu is None
        first = self._first(config, inner)
        if config.gated:
            self.gate_up = first
        else:
            self.up = first
        self.down = Linear(config.hidden_size, inner, config.mlp_bias or config.down_bias, act_dtype)

    def _first(self, config: ModelConfig, inner: int) -> Block:
        hidden, bias = config.hidden_size, config.mlp_bias
        if not self.fused:
            return Linear(2 * inner if config.gated else inner, hidden, bias, self.act_dtype)
        layer = GatedLinear if config.gated else ActivatedLinear
        return layer(inner, hidden, bias, self.act_dtype, config.activation)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        return self.down(self._inner(x), residual)

    def _activated(self, x: Tensor) -> Tensor:
        return activated(x, self.activation) if self.xielu is None else self.xielu(x)

    def _inner(self, x: Tensor) -> Tensor:
        """act [T, D] → act [T, I]."""
        first: Tensor = self.gate_up(x) if self.gated else self.up(x)
        if self.fused:
            return first
        if self.gated:
            gate, up = first.chunk(2, dim=-1)
            inner = self._activated(gate) * up
        else:
            inner = self._activated(first)
        return inner.to(ops.torch_act_dtype(self.act_dtype))
