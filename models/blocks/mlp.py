"""The feed-forward block, with one fused projection of gate and up where it is gated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.models import ops
from llmc.models.blocks.layers import Block, GatedLinear, Linear
from llmc.models.config import Activation, ModelConfig


def activated(x: Tensor, activation: Activation) -> Tensor:
    """float32, elementwise, as transformers names them."""
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


class Mlp(Block):
    """gate_up [2 I, D], gate first, or up [I, D]; and down [D, I]."""

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
        self.down = Linear(hidden, inner, bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        return self.down(self._inner(x), residual)

    def _inner(self, x: Tensor) -> Tensor:
        """act [T, D] → act [T, I]."""
        if not self.gated:
            inner = activated(self.up(x), self.activation)
        elif self.activation == "silu":
            return self.gate_up(x)
        else:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            inner = activated(gate, self.activation) * up
        return inner.to(ops.torch_act_dtype(self.act_dtype))
