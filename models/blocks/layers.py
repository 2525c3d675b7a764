"""Linear layers: weights in the activation dtype, biases float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmc.models import ops


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A frozen parameter without a value, on the default device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Block(nn.Module):
    """A module that gives one tensor, which torch's own class does not say."""

    __call__: Callable[..., Tensor]


class RepeatedBlock(Block):
    """One of many, of which a compiler traces only some of those that are alike.

    It is called with the hidden state first and makes the next one, of the same shape; it changes nothing else. The
    attribute `layer` of its modules is its number, which is the `layer` of llmc ops and is used for nothing else.
    """


class Projection(Block):
    """weight [N, K] of the activation dtype, bias float32 [N] or None."""

    bias: Tensor | None

    def __init__(self, num_out: int, num_in: int, bias: bool, act_dtype: str) -> None:
        super().__init__()
        self.weight = empty(num_out, num_in, dtype=ops.torch_act_dtype(act_dtype))
        self.register_parameter("bias", empty(num_out) if bias else None)


class Linear(Projection):
    """One matrix."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """act [T, K], residual float32 [T, N] → float32 [T, N]."""
        return ops.linear(x, self.weight, self.bias, residual)


class GatedLinear(Projection):
    """Two matrices of I rows, gate and up, one below the other."""

    def __init__(self, num_out: int, num_in: int, bias: bool, act_dtype: str) -> None:
        """num_out: I."""
        super().__init__(2 * num_out, num_in, bias, act_dtype)
        self.act_dtype = act_dtype

    def forward(self, x: Tensor) -> Tensor:
        """act [T, K] → act [T, I]: silu(gate) times up."""
        return ops.gated_linear(x, self.weight, self.bias, act_dtype=self.act_dtype)
