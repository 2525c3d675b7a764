"""A small decoder in ONNX, written operator by operator: the valid model that fuzzing mutates."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, POSITIONS = 70, 32, 4, 2, 16, 48, 2, 64
_F32, _I64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


class Graph:
    """Builder of one model: nodes and initializers in the order in which they are added."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(seed)

    def add(self, op: str, *inputs: str, outputs: tuple[str, ...] = (), domain: str = "", **attributes: Any) -> str:
        """Adds a node and returns the name of its first output. outputs: names of all outputs, if they matter."""
        made = list(outputs) or [f"{op}_{len(self.nodes)}"]
        name = f"/{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), made, name=name, domain=domain, **attributes))
        return made[0]

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers[name] = np.asarray(value, dtype)
        return name

    def weight(self, name: str, *shape: int) -> str:
        scale = shape[0] ** -0.5 if len(shape) > 1 else 0.2
        offset = 1.0 if len(shape) == 1 else 0.0
        self.initializers[name] = (offset + self.rng.normal(scale=scale, size=shape)).astype(np.float32)
        return name

    def model(
        self,
        inputs: list[onnx.ValueInfoProto],
        outputs: list[onnx.ValueInfoProto],
        opset: int = 17,
        dtype: Any = np.float32,
    ) -> onnx.ModelProto:
        """The finished model. dtype: type to which float32 initializers are converted."""
        tensors = [
            onnx.numpy_helper.from_array(array.astype(dtype) if array.dtype == np.float32 else array, name)
            for name, array in self.initializers.items()
        ]
        graph = helper.make_graph(self.nodes, "model", inputs, outputs, tensors)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def decoder_values(dtype: int = _F32) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    """(inputs, outputs) of a decoder, named as Optimum does."""
    inputs = [
        helper.make_tensor_value_info("input_ids", _I64, ["batch", "tokens"]),
        helper.make_tensor_value_info("attention_mask", _I64, ["batch", "keys"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", dtype, ["batch", "tokens", VOCAB])]
    for name in (f"{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")):
        past: list[str | int | None] = ["batch", KV_HEADS, "past", HEAD_DIM]
        inputs.append(helper.make_tensor_value_info(f"past_key_values.{name}", dtype, past))
        outputs.append(helper.make_tensor_value_info(f"present.{name}", dtype, ["batch", KV_HEADS, "keys", HEAD_DIM]))
    return inputs, outputs


def small_decoder(opset: int = 17, **changes: Any) -> onnx.ModelProto:
    """A Llama of two layers with fused operators, as onnxruntime-genai's builder writes it.

    changes: attributes of GroupQueryAttention.
    """
    graph = Graph()
    frequencies = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.arange(POSITIONS)[:, None] * frequencies.astype(np.float32)
    cos, sin = graph.constant(np.cos(angles)), graph.constant(np.sin(angles))
    ones = graph.constant([1], np.int64)
    total = graph.add("ReduceSum", "attention_mask", ones, keepdims=0)
    lengths = graph.add("Cast", graph.add("Sub", total, ones), to=onnx.TensorProto.INT32)
    width = graph.add("Gather", graph.add("Shape", "attention_mask"), graph.constant(1, np.int64), axis=0)
    keys = graph.add("Cast", width, to=onnx.TensorProto.INT32)
    stream = graph.add("Gather", graph.weight("embed.weight", VOCAB, HIDDEN), "input_ids")
    normed = graph.add("SimplifiedLayerNormalization", stream, graph.weight("norm.0", HIDDEN), epsilon=1e-6, axis=-1)
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        q, k, v = (
            graph.add("MatMul", normed, graph.weight(f"{name}.{part}", HIDDEN, size))
            for part, size in zip("qkv", sizes, strict=True)
        )
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        outputs = (f"attended.{layer}", f"present.{layer}.key", f"present.{layer}.value")
        attended = graph.add(
            "GroupQueryAttention", q, k, v, *past, lengths, keys, cos, sin, outputs=outputs, domain="com.microsoft",
            **{"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1, **changes},
        )  # fmt: skip
        out = graph.add("MatMul", attended, graph.weight(f"{name}.o", HEADS * HEAD_DIM, HIDDEN))
        normed, stream = _skip_norm(graph, stream, out, f"{name}.mlp_norm")
        gate = graph.add("MatMul", normed, graph.weight(f"{name}.gate", HIDDEN, INNER))
        up = graph.add("MatMul", normed, graph.weight(f"{name}.up", HIDDEN, INNER))
        inner = graph.add("Mul", graph.add("Mul", gate, graph.add("Sigmoid", gate)), up)
        down = graph.add("MatMul", inner, graph.weight(f"{name}.down", INNER, HIDDEN))
        normed, stream = _skip_norm(graph, stream, down, f"{name}.next_norm")
    graph.add("MatMul", normed, graph.weight("lm_head", HIDDEN, VOCAB), outputs=("logits",))
    return graph.model(*decoder_values(), opset=opset)


def _skip_norm(graph: Graph, stream: str, block: str, name: str) -> tuple[str, str]:
    """Adds SkipSimplifiedLayerNormalization; returns (norm of the sum, sum)."""
    total = f"{name}.sum"
    normed = graph.add(
        "SkipSimplifiedLayerNormalization", stream, block, graph.weight(name, HIDDEN),
        outputs=(f"{name}.out", "", "", total), domain="com.microsoft", epsilon=1e-6,
    )  # fmt: skip
    return normed, total
