"""Judges an op that is new to llmc: its kernels called directly, for every target here, with guard bytes around every
buffer. Its tensors of rows are float32 and plain."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmc.compiler.graph.commands import Site, round_up
from llmc.compiler.ops.definition import NUM_TOKENS, BufferSource, GraphParams, OpDef
from llmc.compiler.ops.eager import define_ops
from llmc.compiler.targets.registry import resolve_target
from llmc.models.blocks.decoder import Decoder, Embedding
from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.llama import LLAMA
from llmc.models.registry import FAMILIES

from support.kernel_harness import Guarded
from support.new_family import check_compiled, targets_here
from support.quirky_model import eager_logits
from support.tiny_models import make_tiny_model

Array = NDArray[Any]
_BOUND = 1e-6


class _Site:
    """One call of an op, compiled for a target. rows: of its tensors of tokens, all of the same number."""

    def __init__(
        self,
        op: OpDef,
        target: str,
        rows: Mapping[str, Array],
        weights: Mapping[str, Array],
        values: object,
        path: Path,
    ) -> None:
        found, self._rows, self._weights = resolve_target(target), rows, weights
        count = len(next(iter(rows.values())))
        shape = found.graph_shape(count, count, 64, 64, 16)
        self._held = round_up(shape.tokens, found.row_unit(shape.token_layout))
        attributes = {
            **dict(values or {}),  # type: ignore[call-overload]
            "widths": {name: array.shape[-1] for name, array in {**rows, **weights}.items()},
            "weight_shapes": {name: array.shape for name, array in weights.items()},
            "on_samples": False,
        }
        site = Site(op.name, attributes, (*rows, *weights))
        params = GraphParams(found, shape, 64, "f32", "f32", 16)
        self._calls, self._scratch_bytes = op.kernels(site, params), op.scratch_bytes(site, params)
        found.link([found.compile(call.spec, None) for call in self._calls], path)
        self._library = ctypes.CDLL(str(path))

    def run(self, width: int, order: Array, num_tasks: int) -> Array:
        """The result of the rows of `order`, which lie at the front; what lies behind them is not a number."""
        inputs = {name: array.copy() for name, array in self._weights.items()}
        for name, array in self._rows.items():
            inputs[name] = np.full((self._held, array.shape[1]), np.nan, np.float32)
            inputs[name][: len(order)] = array[order]
        buffers = {name: Guarded(array) for name, array in inputs.items()}
        buffers["out"] = Guarded(np.full((self._held, width), np.nan, np.float32))
        buffers[BufferSource.SCRATCH] = Guarded(np.zeros(self._scratch_bytes, np.uint8))
        scalars = (ctypes.c_int64 * 8)()
        scalars[NUM_TOKENS] = len(order)
        for call in self._calls:
            function = self._library[call.spec.symbol()]
            function.restype = None
            for task in reversed(range(num_tasks)):
                places = [ctypes.c_void_p(buffers[name].address) for name in call.buffers]
                function(*places, scalars, ctypes.c_int32(task), ctypes.c_int32(num_tasks))
        for name, buffer in buffers.items():
            buffer.check(name)
            if name in inputs:
                assert buffer.array.tobytes() == inputs[name].tobytes(), f"{name}: an input was written"
        return buffers["out"].array[: len(order)].copy()


def check_op(
    op: OpDef,
    rows: Mapping[str, Array],
    expected: Array,
    folder: Path,
    *,
    weights: Mapping[str, Array] | None = None,
    values: object = None,
) -> None:
    """Kernels of every target have the numbers of `expected`, of float64, to float32's precision; a row has the same
    bits among any others and for any number of tasks, and nothing else is written. values: of the op's other arguments.
    """
    count, rng = len(expected), np.random.default_rng(1)
    assert expected.dtype == np.float64
    for target in targets_here():
        site = _Site(op, target, rows, weights or {}, values, folder / f"{target}.so")
        whole = site.run(expected.shape[1], np.arange(count), 1)
        assert np.abs(whole - expected).max() <= _BOUND * np.abs(expected).max(), target
        for num_tasks in (1, 2, 3, 2 * count):
            order = rng.permutation(count)[: rng.integers(1, count + 1)]
            assert site.run(expected.shape[1], order, num_tasks).tobytes() == whole[order].tobytes(), target
        for row in range(count):
            assert site.run(expected.shape[1], np.array([row]), 1).tobytes() == whole[[row]].tobytes(), target


def check_in_a_model(op: OpDef, folder: Path) -> None:
    """A Llama that adds what the op, of one tensor of rows, makes of its embeddings to them: every bucket of every
    target has the logits of the eager module, and a request its bits in any company."""

    class Embedded(Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = super().forward(ids)
            made: torch.Tensor = getattr(torch.ops.llmc, op.name)(x)
            return x + made

    def build(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
        model = Decoder(config, act_dtype, max_len)
        model.embed = Embedded(config.vocab_size, config.hidden_size, act_dtype)
        return model

    define_ops()
    model, model_type = make_tiny_model(folder / "model", "llama", num_hidden_layers=2), f"with_{op.name}"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, model_type, Family(model_type, LLAMA.read_config, LLAMA.weight_map, build))
        check_compiled(model, folder, lambda tokens: eager_logits(model, tokens, "f32"))
