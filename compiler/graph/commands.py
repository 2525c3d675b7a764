"""The compiler's own data between phases: op sites, and the command list that a bucket replays. Imports no tvm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmc.compiler.kernel_spec import KernelSpec


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class GraphShape:
    """What a command list depends on; buckets of equal shape share one.

    tokens, samples: rows that buffers hold, padding included. token_layout, sample_layout: the target's tags of how
    rows of activations lie. segments: as many as the longest context has, where attention splits contexts, else 0.
    """

    tokens: int
    samples: int
    token_layout: int
    sample_layout: int
    segments: int


@dataclass(frozen=True)
class Site:
    """One op of the model: its name, static attributes, and the names of the tensors it is called with, in order."""

    op: str
    attributes: dict[str, Any]
    tensors: tuple[str, ...]

    @property
    def layer(self) -> int:
        """Layer whose KV pool the op touches, −1 for none."""
        return int(self.attributes.get("layer", -1))


@dataclass(frozen=True)
class Operand:
    """One buffer of a command. kind: arena, weight, input, k_pool, v_pool, output, adapters or states.

    name: the input's name, or the weight's, also of a pool of adapters; layer for KV pools; offset and nbytes in bytes
    (nbytes 0 for KV pools and inputs, of a slot for adapters, of all rows for states).
    """

    kind: str
    name: str = ""
    layer: int = -1
    offset: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Command:
    """One kernel call. barrier: every thread meets after it."""

    spec: KernelSpec
    operands: tuple[Operand, ...]
    layer: int
    barrier: bool = True


@dataclass(frozen=True)
class CommandList:
    """What one bucket replays, and the bytes of arena it needs."""

    commands: tuple[Command, ...]
    arena_bytes: int
