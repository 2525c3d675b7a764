"""The configuration of a model that consists of one layer of another."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from llmc.models.config import ModelConfig

T = TypeVar("T")


def last_attention(config: ModelConfig) -> int | None:
    """The last layer with attention, and with nothing in its place or beside it; None if no layer has it."""
    layers = (i for i in range(config.num_layers) if not config.has_state(i) and i not in config.mlp_only_layers)
    return max(layers, default=None)


def one_layer(config: ModelConfig, number: int) -> ModelConfig:
    """The configuration with layer `number` alone, which must have attention without a state, and keys and values of
    its own."""
    if config.has_state(number) or not config.makes_kv(number) or config.streams is not None:
        raise ValueError(f"layer {number} of {config.model_type} cannot stand alone")

    def only(values: tuple[T, ...]) -> tuple[T, ...]:
        return (values[number],) if values else ()

    def listed(layers: tuple[int, ...]) -> tuple[int, ...]:
        return (0,) if number in layers else ()

    experts = config.experts
    if experts is not None:
        experts = replace(experts, layers=(0,)) if number in experts.layers else None
    return replace(
        config,
        num_layers=1,
        layer_windows=only(config.layer_windows),
        layer_chunks=only(config.layer_chunks),
        layer_sizes=only(config.layer_sizes),
        unrotated_layers=listed(config.unrotated_layers),
        mixer_only_layers=listed(config.mixer_only_layers),
        mlp_only_layers=(),
        kv_layers=(),
        delta_net=None,
        short_conv=None,
        mamba=None,
        experts=experts,
    )
