"""KV cache and hidden states for the eager ops; only tests use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise

import torch

from llmc.models.config import ModelConfig


@dataclass(frozen=True)
class StateTokens:
    """A sequence's tokens of a step, for a layer with a state. rows: at least one. position: of the first.

    slot: of the state, which is read before the first row and written behind the last one. keep_row: behind it, the
    state is also written to keep_slot; none of `rows` if it is not to be.
    """

    rows: range
    position: int
    slot: int
    keep_row: int
    keep_slot: int


def state_tokens(
    state_slots: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor
) -> Iterator[StateTokens]:
    """The sequences of a step that have tokens in it. state_slots: see `delta_ops`."""
    bounds = pairwise(query_start.tolist())
    for (slot, keep_tokens, keep_slot), (first, end) in zip(state_slots.tolist(), bounds, strict=True):
        if first < end:
            position = int(positions[first])
            yield StateTokens(range(first, end), position, slot, first + keep_tokens - 1 - position, keep_slot)


class ReferenceCache:
    """Paged K and V of every layer, each [num_blocks * block_size, num_kv_heads, head_dim] in `dtype`.

    layers: (num_kv_heads, head_dim) of each. states: of layers with a state, by kind, layer and slot.
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

    def state(self, kind: str, layer: int, tokens: StateTokens, shape: tuple[int, ...]) -> torch.Tensor:
        """A layer's state before a sequence's tokens of a step: float32 of `shape`, zeros before the first token."""
        return torch.zeros(shape) if tokens.position == 0 else self.states[kind, layer, tokens.slot]

    def put_state(self, kind: str, layer: int, tokens: StateTokens, row: int, state: torch.Tensor) -> None:
        """Stores the state behind a row, if it is to stay."""
        if row == tokens.rows[-1]:
            self.states[kind, layer, tokens.slot] = state.clone()
        if row == tokens.keep_row:
            self.states[kind, layer, tokens.keep_slot] = state.clone()


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
