"""Layers of experts with random weights, and their kernels, called directly as a graph calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from llmc.compiler.graph.commands import Site
from llmc.compiler.ops.definition import NUM_TOKENS, GraphParams
from llmc.compiler.ops.experts import EXPERTS, QUANTIZED
from llmc.compiler.targets.cpu.backend import CpuTarget
from llmc.compiler.targets.cpu.packing import pack_activation
from llmc.compiler.targets.cpu.quant_packing import quantize_activation
from llmc.compiler.targets.registry import resolve_target
from llmc.compiler.weight_request import WeightRequest
from llmc.models import expert_ops
from llmc.models.convert import DTYPES
from llmc.models.loader import Parameter
from llmc.quantize.rtn import quantize
from llmc.quantize.scheme import get_scheme

from support.kernel_harness import Guarded

Array = NDArray[Any]
EXPERT_COUNT, TOP_K = 9, 3
LIMIT, GAIN = 1.5, 1.702


class Layer:
    """Experts of random weights, chosen by tokens of random rows. scheme: of the weights, None for floats of `act`.
    limited: the gate is, as of gpt-oss. gelu: the gate's activation is, as of Gemma 4. gated: else the squared ReLU, as
    of Nemotron 3."""

    def __init__(
        self, rows: int, width: int, inner: int, act: str, *, biased: bool = False, scheme: str | None = None,
        limited: bool = False, gelu: bool = False, gated: bool = True,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(width)
        self.width, self.inner, self.act, self.limited = width, inner, act, limited
        self.gelu, self.parts = gelu, 2 if gated else 1
        self.scheme = None if scheme is None else get_scheme(scheme)

        def floats(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32)

        self.x = floats(rows, width).astype(DTYPES[act])
        self.residual = floats(rows, width)
        self.weights = {
            "gate_up": (floats(EXPERT_COUNT * self.parts * inner, width) / width**0.5).astype(DTYPES[act]),
            "down": (floats(EXPERT_COUNT * width, inner) / inner**0.5).astype(DTYPES[act]),
        }
        self.biases = {
            "gate_up_bias": floats(EXPERT_COUNT * self.parts * inner),
            "down_bias": floats(EXPERT_COUNT * width),
        }
        if not biased:
            self.biases = {}
        # The first expert is nearly everybody's, the last but one nobody's.
        liking = floats(rows, EXPERT_COUNT) - np.arange(EXPERT_COUNT, dtype=np.float32)
        liking[:, -2] = -100
        scores = torch.from_numpy(liking).softmax(-1)
        self.chosen = expert_ops.choose_experts(torch.from_numpy(liking), scores, TOP_K).numpy()

    def _rows(self, x: Array) -> Array:
        """Activations as a linear layer reads them."""
        x = x.astype(DTYPES[self.act]).astype(np.float32)
        if self.scheme is None or self.scheme.act_bits == 16:
            return x
        numbers, scale = quantize_activation(x)
        rounded: Array = numbers * scale[:, None]
        return rounded

    def _linear(self, x: Array, weight: str, expert: int) -> Array:
        stored = self.weights[weight].astype(np.float32)
        value = stored if self.scheme is None else quantize(stored, self.scheme.weight).value()
        bias = self.biases.get(f"{weight}_bias")
        found: Array = self._rows(x).astype(np.float64) @ value.reshape(EXPERT_COUNT, -1, value.shape[1])[expert].T
        return found if bias is None else found + bias.reshape(EXPERT_COUNT, -1)[expert]

    def _activated(self, gate: Array) -> Array:
        if not self.gelu:
            return np.asarray(gate / (1 + np.exp(-gate)))
        return F.gelu(torch.from_numpy(gate), approximate="tanh").numpy()

    @cached_property
    def expected(self) -> Array:
        """float64."""
        out = self.residual.astype(np.float64)
        ids, weights = self.chosen[:, :TOP_K], np.ascontiguousarray(self.chosen[:, TOP_K:]).view(np.float32)
        for expert in range(EXPERT_COUNT):
            rows, places = np.nonzero(ids == expert)
            if len(rows):
                gate, *of_gate = np.split(self._linear(self.x[rows], "gate_up", expert), self.parts, axis=-1)
                if not of_gate:
                    inner = np.square(np.maximum(gate, 0)).astype(np.float32)
                    out[rows] += self._linear(inner, "down", expert) * weights[rows, places][:, None]
                    continue
                (up,) = of_gate
                if self.limited:
                    gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
                    inner = (gate / (1 + np.exp(-GAIN * gate)) * (up + 1)).astype(np.float32)
                else:
                    inner = (self._activated(gate) * up).astype(np.float32)
                out[rows] += self._linear(inner, "down", expert) * weights[rows, places][:, None]
        return out


class Compiled:
    """The op for a graph of at most so many tokens."""

    def __init__(self, layer: Layer, target: str, tokens: int, path: Path) -> None:
        self.layer, found = layer, resolve_target(target)
        self.shape = found.graph_shape(tokens, tokens, 64, 64, 16)
        tensors = {"x": layer.x, "chosen": layer.chosen, **layer.weights, **layer.biases, "residual": layer.residual}
        attributes = {
            "num_experts": EXPERT_COUNT,
            "widths": {name: array.shape[-1] for name, array in tensors.items()},
            "weight_shapes": {name: array.shape for name, array in layer.weights.items()},
            "on_samples": False,
            **({"gate_limit": LIMIT, "gate_gain": GAIN} if layer.limited else {}),
            **({"activation": "gelu_tanh"} if layer.gelu else {}),
            **({"activation": "relu2", "gated": False} if layer.parts == 1 else {}),
        }
        if layer.scheme is not None:
            int8 = layer.scheme.act_bits == 8
            record = {"format": layer.scheme.weight.record(), "int8": int8}
            attributes[QUANTIZED] = dict.fromkeys(layer.weights, record)
        site, params = (
            Site(EXPERTS.name, attributes, tuple(tensors)),
            GraphParams(found, self.shape, 64, layer.act, "f32", 16),
        )
        self.calls, (self.scratch, _) = EXPERTS.kernels(site, params), EXPERTS.scratch(site, params)
        found.link([found.compile(spec, None) for spec in dict.fromkeys(call.spec for call in self.calls)], path)
        self._library, self._cpu = ctypes.CDLL(str(path)), isinstance(found, CpuTarget)
        self.stored: dict[str, Array] = {}
        for name, array in layer.weights.items():
            parts = EXPERT_COUNT * (layer.parts if name == "gate_up" else 1)
            format = None if layer.scheme is None else layer.scheme.weight
            request = WeightRequest(name, array.shape, layer.act if format is None else "u8", True, format, parts)
            tensors_of = [tensor.name for tensor in found.weight_tensors(request)]
            pieces = [
                [bytes(piece) for piece in pieces]
                for pieces in found.weight_pieces(request, Parameter.of(name, layer.act, array))
            ]
            for tensor, parts_of in zip(tensors_of, zip(*pieces, strict=True), strict=True):
                self.stored[tensor] = np.frombuffer(b"".join(parts_of), np.uint8)

    def run(
        self, order: Array, num_tasks: int, elsewhere: Mapping[str, int] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> Array:  # fmt: skip
        """The results of some rows, which lie at the front of buffers for all tokens; what is behind is no number.

        elsewhere: addresses of weights that are not to be copied. begin: called before each task of a kernel.
        """
        layer, held = self.layer, self.shape.tokens
        x = np.full((held, layer.width), np.nan, layer.x.dtype)
        chosen, residual = (
            np.full((held, 2 * TOP_K), 1 << 30, np.int32),
            np.full((held, layer.width), np.nan, np.float32),
        )
        x[: len(order)], chosen[: len(order)], residual[: len(order)] = (
            rows[order] for rows in (layer.x, layer.chosen, layer.residual)
        )
        per_word = 4 // layer.x.dtype.itemsize
        padded = np.pad(x, ((0, 0), (0, -layer.width % per_word)))
        inputs = {
            "x": pack_activation(x, self.shape.token_layout) if self._cpu else padded,
            "chosen": chosen,
            "residual": residual,
            **self.stored,
            **layer.biases,
        }
        given = elsewhere or {}
        buffers = {name: Guarded(array) for name, array in inputs.items() if name not in given}
        buffers["out"] = Guarded(np.full((held, layer.width), np.nan, np.float32))
        for name, (_, nbytes) in self.scratch.items():
            buffers[name] = Guarded(np.full(nbytes, 0xFF, np.uint8))
        scalars = (ctypes.c_int64 * 8)()
        scalars[NUM_TOKENS] = len(order)
        for call in self.calls:
            function = self._library[call.spec.symbol()]
            function.restype = None
            addresses = (given[name] if name in given else buffers[name].address for name in call.buffers)
            places = [ctypes.c_void_p(address) for address in addresses]
            for task in reversed(range(num_tasks)):
                begin()
                function(*places, scalars, ctypes.c_int32(task), ctypes.c_int32(num_tasks))
        for name, buffer in buffers.items():
            buffer.check(name)
            if name in inputs:
                assert buffer.array.tobytes() == inputs[name].tobytes(), f"{name}: an input was written"
        out = buffers["out"].array
        assert np.isnan(out[len(order) :]).all(), "a row of padding was written"
        return out[: len(order)].copy()
