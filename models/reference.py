"""KV cache and hidden states for the eager ops; only tests use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from llmc.models.config import ModelConfig


class ReferenceCache:
    """Paged K and V of every layer, each [num_blocks * block_size, num_kv_heads, head_dim] in `dtype`.

    layers: (num_kv_heads, head_dim) of each. states: of layers with a state, by kind, layer and KV block.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.block_size = block_size
        self.keys, self.values = (
            [torch.zeros((num_blocks * block_size, *heads), dtype=dtype) for heads in layers] for _ in range(2)
        )
        self.states: dict[tuple[str, int, int], torch.Tensor] = {}

    @classmethod
    def of(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32
    ) -> ReferenceCache:
        """The cache of a whole model."""
        return cls([config.kv_heads(layer) for layer in range(config.num_kv_layers)], num_blocks, block_size, dtype)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores float32 [T, num_kv_heads, head_dim] at `slots` [T], rounded to the cache's dtype."""
        index = slots.long()
        self.keys[layer][index] = keys.to(self.keys[layer].dtype)
        self.values[layer][index] = values.to(self.values[layer].dtype)

    def read(self, layer: int, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, float32 [length, num_kv_heads, head_dim], of positions 0 … length−1 of a sequence."""
        positions = torch.arange(length)
        slots = blocks.long()[positions // self.block_size] * self.block_size + positions % self.block_size
        return self.keys[layer][slots].float(), self.values[layer][slots].float()

    def state(self, kind: str, layer: int, blocks: torch.Tensor, position: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A layer's state of a sequence before a position: float32 of `shape`, zeros before the first one."""
        if position == 0:
            return torch.zeros(shape)
        return self.states[kind, layer, int(blocks[(position - 1) // self.block_size])]

    def put_state(self, kind: str, layer: int, blocks: torch.Tensor, position: int, state: torch.Tensor) -> None:
        """Stores the state behind the token at a position."""
        self.states[kind, layer, int(blocks[position // self.block_size])] = state.clone()


_active: ContextVar[ReferenceCache | None] = ContextVar("llmc_reference_cache", default=None)


@contextmanager
def use_cache(cache: ReferenceCache) -> Iterator[ReferenceCache]:
    """Lets eager ops called inside the block read and write `cache`."""
    token = _active.set(cache)
    try:
        yield cache
    finally:
        _active.reset(token)


def active_cache() -> ReferenceCache:
    """The cache of the enclosing `use_cache` block. Raises RuntimeError outside of one."""
    cache = _active.get()
    if cache is None:
        raise RuntimeError("llmc attention ops run eagerly only inside `with use_cache(ReferenceCache(...))`")
    return cache


class ReferenceStates:
    """A graph's buffer of hidden states. rows: float32 [T, D]."""

    def __init__(self) -> None:
        self.rows = torch.zeros((0, 0))


_states: ContextVar[ReferenceStates | None] = ContextVar("llmc_reference_states", default=None)


@contextmanager
def use_states(states: ReferenceStates) -> Iterator[ReferenceStates]:
    """Lets eager ops called inside the block read rows of `states` and leave others there."""
    token = _states.set(states)
    try:
        yield states
    finally:
        _states.reset(token)


def active_states() -> ReferenceStates:
    """The states of the enclosing `use_states` block. Raises RuntimeError outside of one."""
    states = _states.get()
    if states is None:
        raise RuntimeError("llmc ops of hidden states run eagerly only inside `with use_states(ReferenceStates())`")
    return states
