"""Activations without parameters, by transformers' names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def activated(x: Tensor, activation: str) -> Tensor:
    """float32, elementwise. Raises ValueError for an unknown activation, and for one with parameters."""
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
    raise ValueError(f"{activation!r} is no activation without parameters")
