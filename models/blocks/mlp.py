"""The feed-forward block; gate and up, if gated, are one fused projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.models import ops
from llmc.models.blocks.layers import Block, GatedLinear, Linear, empty
from llmc.models.config import Activation, ModelConfig


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


def activated(x: Tensor, activation: Activation) -> Tensor:
    """Parameter-free activations by transformers' names: float32, elementwise."""
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x) * F.relu(x)
        case "xielu":
            raise ValueError("xielu has parameters: call Xielu")


class Mlp(Block):
    """gate_up [2 I, D], gate first, or up [I, D]; then down [D, I]."""

    def __init__(self, config: ModelConfig, act_dtype: str) -> None:
        super().__init__()
        self.activation, self.gated = config.activation, config.gated
        self.act_dtype = act_dtype
        inner, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        if not config.gated:
            self.up: Block = Linear(inner, hidden, bias, act_dtype)
        elif config.activation == "silu":
            self.gate_up: Block = GatedLinear(inner, hidden, bias, act_dtype)
        else:
            self.gate_up = Linear(2 * inner, hidden, bias, act_dtype)
        self.xielu = Xielu() if config.activation == "xielu" else None
        self.down = Linear(hidden, inner, bias or config.down_bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        return self.down(self._inner(x), residual)

    def _activated(self, x: Tensor) -> Tensor:
        return activated(x, self.activation) if self.xielu is None else self.xielu(x)

    def _inner(self, x: Tensor) -> Tensor:
        """act [T, D] → act [T, I]."""
        if not self.gated:
            inner = self._activated(self.up(x))
        elif self.activation == "silu":
            return self.gate_up(x)
        else:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            inner = self._activated(gate) * up
        return inner.to(ops.torch_act_dtype(self.act_dtype))
