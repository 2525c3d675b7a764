"""The compiler's own data between phases: op sites, and the command list that a bucket replays. Imports no tvm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmc.compiler.kernel_spec import KernelSpec


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class GraphShape:
    """Everything a command list depends on; buckets of equal shape share one.

    tokens, samples: rows of the buffers, padding included.
    token_layout, sample_layout: tags by which the target names its layout of activation rows.
    segments: number of segments of the longest context if attention splits contexts, else 0.
    """

    tokens: int
    samples: int
    token_layout: int
    sample_layout: int
    segments: int


@dataclass(frozen=True)
class Site:
    """One op of the model: its name, its static attributes, and the names of its tensor arguments, in order."""

    op: str
    attributes: dict[str, Any]
    tensors: tuple[str, ...]

    @property
    def layer(self) -> int:
        """The layer of the KV cache that the op accesses; −1 for none."""
        return int(self.attributes.get("layer", -1))


@dataclass(frozen=True)
class Operand:
    """One buffer of a command.

    kind: arena, weight, input, k_pool, v_pool, output, adapters or states.
    name: of the input, weight or pool of adapters (`compiler.adapters.pool_name`).
    layer: of a KV pool.
    offset, nbytes: in bytes. nbytes is 0 for KV pools and inputs, one slot for adapters, all rows for states.
    """

    kind: str
    name: str = ""
    layer: int = -1
    offset: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Command:
    """One kernel call. layer: of the KV cache; −1 for none. barrier: all threads wait for each other after it."""

    spec: KernelSpec
    operands: tuple[Operand, ...]
    layer: int
    barrier: bool = True


@dataclass(frozen=True)
class CommandList:
    """The commands that one bucket replays, and the bytes of arena they need."""

    commands: tuple[Command, ...]
    arena_bytes: int
