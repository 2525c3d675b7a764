"""Runs decoder layers one at a time over the calibration text, and records the inputs of their linear layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmc.compiler.calibration.threads import Workers
from llmc.compiler.config import CompileError
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.decoder import DecoderLayer
from llmc.models.blocks.experts import ExpertMlp
from llmc.models.blocks.mlp import Mlp
from llmc.models.config import ModelConfig
from llmc.models.eager import as_tensor
from llmc.models.loader import Parameter
from llmc.models.reference import ReferenceCache, use_cache
from llmc.models.registry import build_model
from llmc.models.tables import tables

Floats = NDArray[np.float32]
Values = dict[str, Floats]
"""Parameters of a decoder layer, by their names in it."""
_BLOCK = 16
# Sums are formed over pieces of these sizes, for any number of threads.
_WINDOWS, _GRAM_ROWS, _ROWS = 8, 512, 4096
_EXPERTS, _ROUTED, _CHOSEN = "mlp.experts", "inputs of experts", "chosen experts"


@dataclass
class Moments:
    """Statistics of a linear layer's inputs.

    gram: mean of x xᵀ, float32 [K, K], if requested. mean, largest: of their magnitudes, [K].
    """

    gram: Tensor | None
    mean: Floats
    largest: Floats

    def scale_down(self, scales: Floats) -> None:
        """Makes them those of inputs that are divided by `scales` [K]."""
        self.mean /= scales
        self.largest /= scales
        if self.gram is not None:
            self.gram.numpy()[...] /= np.outer(scales, scales)


@dataclass
class Routed:
    """Inputs of a layer's experts. inputs: float32 [T, D]. chosen: int32 [T, 2 k], as from `choose_experts`."""

    inputs: Floats
    chosen: NDArray[np.int32]


class _OneLayerCache(ReferenceCache):
    """Keys and values of the layer being run."""

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        super().write(0, slots, keys, values)

    def read(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return super().read(0, blocks, length)


def _is_plain(config: ModelConfig) -> bool:
    """Whether the model has Llama's structure, so that scale producers and first-layer inputs are known."""
    return (
        config.residual == "pre"
        and config.norm == "rms"
        and config.gated
        and config.activation == "silu"
        and config.qk_norm in ("none", "head", "whole", "unit")
        and not (config.attention_gate or config.full_heads or config.layer_sizes)
        and not config.has_states
        and not (config.learned_positions or config.embedding_norm or config.head_bias or config.logit_cap)
    )


class LayerRunner:
    """length: tokens per window."""

    def __init__(self, config: ModelConfig, length: int, workers: Workers) -> None:
        self._config, self._length, self._workers = config, length, workers
        with torch.device("meta"):
            self._layers = build_model(config, "f32", length).layers
        for layer in self._layers:
            if type(layer) is not DecoderLayer or type(layer.mlp) not in (Mlp, ExpertMlp) or not _is_plain(config):
                raise CompileError(
                    f"layers of {config.model_type} are of a kind that llmc quantize -o does not know; llmc compile "
                    "--quant rounds their weights"
                )
        blocks = -(-length // _BLOCK)

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        rows = torch.arange(length, dtype=torch.int32)
        made = {name: as_tensor(value) for name, value in tables(config, length)}
        self._step = StepInputs(
            positions=rows,
            slot_mapping=rows,
            block_tables=torch.arange(blocks, dtype=torch.int32)[None],
            context_lens=ints(length),
            query_start=ints(0, length),
            token_seq=torch.zeros_like(rows),
            cos_sin=tuple(made[name] for name in config.rope_tables),
            slopes=made.get("slopes"),
        )
        self._caught = threading.local()

    def embed(self, windows: NDArray[np.int32], embedding: Parameter) -> Floats:
        """Inputs of the first layer, float32 [windows, T, D]."""
        rows, width = embedding.shape
        out = np.empty((*windows.shape, width), np.float32)
        for first in range(0, rows, _ROWS):
            some = np.empty((min(_ROWS, rows - first), width), np.float32)
            embedding.read(first, some)
            here = (windows >= first) & (windows < first + len(some))
            out[here] = some[windows[here] - first]
        if self._config.embedding_multiplier != 1.0:
            out *= np.float32(self._config.embedding_multiplier)
        return out

    @contextmanager
    def loaded(self, index: int, values: Mapping[str, Floats]) -> Iterator[DecoderLayer]:
        """The layer with its parameters, which share memory with `values`."""
        layer = self._layers[index]
        assert isinstance(layer, DecoderLayer)
        layer.load_state_dict({name: as_tensor(value) for name, value in values.items()}, strict=True, assign=True)
        try:
            yield layer
        finally:
            layer.to_empty(device="meta")

    def _forward(self, layer: DecoderLayer, x: Floats) -> Tensor:
        config = self._config
        blocks = self._step.block_tables.shape[1]
        cache = _OneLayerCache([config.kv_heads(layer.attention.layer)], blocks, _BLOCK)
        with torch.no_grad(), use_cache(cache):
            return layer(torch.from_numpy(x), self._step)

    def run(self, layer: DecoderLayer, stream: Floats) -> None:
        """Replaces the stream by the layer's output."""

        def work(index: int) -> None:
            stream[index] = self._forward(layer, stream[index]).numpy()

        self._workers.map(work, range(len(stream)))

    def _catch(self, layer: DecoderLayer, x: Floats) -> dict[str, Tensor]:
        self._caught.inputs = {}
        self._forward(layer, x)
        inputs: dict[str, Tensor] = self._caught.inputs
        return inputs

    def moments(
        self, layer: DecoderLayer, stream: Floats, kinds: Sequence[str], grams: bool, *, routed: bool = False
    ) -> tuple[dict[str, Moments], Routed | None]:
        """Moments of the inputs of linear layers of these kinds; without `grams`, magnitudes only.

        routed: also return the experts' inputs, for every token.
        """

        def catcher(kind: str) -> Any:
            return lambda module, inputs: self._caught.inputs.__setitem__(kind, inputs[0])

        def experts(module: Any, inputs: tuple[Tensor, ...]) -> None:
            self._caught.inputs[_ROUTED], self._caught.inputs[_CHOSEN] = inputs[:2]

        hooks = [layer.get_submodule(kind).register_forward_pre_hook(catcher(kind)) for kind in kinds]
        if routed:
            hooks.append(layer.get_submodule(_EXPERTS).register_forward_pre_hook(experts))
        found: dict[str, Moments] = {}
        kept: dict[str, list[NDArray[Any]]] = {_ROUTED: [], _CHOSEN: []}
        try:
            for first in range(0, len(stream), _WINDOWS):
                batch = self._workers.map(lambda x: self._catch(layer, x), stream[first : first + _WINDOWS])
                for kind in kinds:
                    self._add(found, kind, torch.cat([inputs.pop(kind) for inputs in batch]).float(), grams)
                for name, arrays in kept.items() if routed else ():
                    arrays.extend(inputs.pop(name).numpy() for inputs in batch)
        finally:
            for hook in hooks:
                hook.remove()
        tokens = stream.shape[0] * stream.shape[1]
        for moments in found.values():
            moments.mean /= np.float32(tokens)
            if moments.gram is not None:
                moments.gram /= tokens
        return found, Routed(*map(np.concatenate, kept.values())) if routed else None

    def moments_of(self, x: Floats, weights: Floats) -> Moments:
        """Moments of inputs [T, K] weighted by `weights` [T]."""
        found: dict[str, Moments] = {}
        share = np.sqrt(weights / weights.sum())[:, None]
        self._add(found, "", torch.from_numpy(x * share), grams=True)
        # A mean of magnitudes, in which each weight counts once.
        magnitudes = np.abs(x)
        return Moments(found[""].gram, (magnitudes * share**2).sum(0), magnitudes.max(0))

    def _add(self, found: dict[str, Moments], kind: str, x: Tensor, grams: bool) -> None:
        k = x.shape[1]
        if kind not in found:
            gram = torch.zeros(k, k) if grams else None
            found[kind] = Moments(gram, np.zeros(k, np.float32), np.zeros(k, np.float32))
        moments = found[kind]
        magnitude = x.abs()
        moments.mean += magnitude.sum(0).numpy()
        np.maximum(moments.largest, magnitude.amax(0).numpy(), out=moments.largest)
        gram = moments.gram
        if gram is None:
            return

        def work(row: int) -> None:
            rows = slice(row, row + _GRAM_ROWS)
            gram[rows].addmm_(x[:, rows].T, x)

        self._workers.map(work, range(0, k, _GRAM_ROWS))
