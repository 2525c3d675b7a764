"""Weights of an ONNX graph in integers, as onnxruntime's quantizer stores them for MatMulNBits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray


def rounded(
    weight: NDArray[np.float32], bits: int, block: int, *, zeros: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8] | None]:
    """(numbers [n, blocks, bytes], scales [n · blocks], packed zero points) of a weight [n, k]."""
    n, k = weight.shape
    parts = weight.reshape(n, k // block, block)
    top = (1 << bits) - 1
    if zeros:
        low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
        scale = (high - low) / top
        zero = np.rint(-low / scale)
    else:
        scale = np.abs(parts).max(-1) / (top // 2)
        zero = np.full(scale.shape, 1 << (bits - 1))
    numbers = np.clip(np.rint(parts / scale[..., None]) + zero[..., None], 0, top).astype(np.uint8)
    return _packed(numbers, bits), scale.astype(np.float32).reshape(-1), _packed(zero, bits) if zeros else None


def _packed(numbers: NDArray[np.generic], bits: int) -> NDArray[np.uint8]:
    whole = numbers.astype(np.uint8)
    if bits == 8:
        return whole
    if whole.shape[-1] % 2:
        whole = np.concatenate([whole, np.zeros((*whole.shape[:-1], 1), np.uint8)], -1)
    return np.asarray(whole[..., 0::2] | whole[..., 1::2] << 4, np.uint8)


def quantize_products(model: onnx.ModelProto, bits: int, block: int, *, zeros: bool) -> int:
    """Every product with a matrix of whole blocks becomes one of MatMulNBits, with the bias added to it; returns how
    many."""
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer if len(tensor.dims) == 2}
    turned = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights
    }
    vectors = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 1}
    added = {  # what is added to a product
        name: (node, bias)
        for node in graph.node
        if node.op_type == "Add"
        for name, bias in (tuple(node.input), tuple(node.input)[::-1])
        if bias in vectors
    }
    made = 0
    for node in list(graph.node):
        if node.op_type != "MatMul" or turned.get(node.input[1], node.input[1]) not in weights:
            continue
        name = turned.get(node.input[1], node.input[1])
        weight = onnx.numpy_helper.to_array(weights[name])
        weight = weight if node.input[1] in turned else weight.T
        n, k = weight.shape
        if k % block:
            continue
        numbers, scales, points = rounded(weight, bits, block, zeros=zeros)
        parts: dict[str, NDArray[Any]] = {
            "B": numbers,
            "scales": scales,
            **({} if points is None else {"zeros": points.reshape(-1)}),
        }
        own = f"{node.name or node.output[0]}/{made}"
        graph.initializer.extend(onnx.numpy_helper.from_array(a, f"{own}.{part}") for part, a in parts.items())
        inputs, outputs = [node.input[0], *(f"{own}.{part}" for part in parts)], list(node.output)
        if outputs[0] in added:
            sum_, bias = added[outputs[0]]
            outputs = list(sum_.output)
            inputs += [""] * (5 - len(inputs)) + [bias]
            graph.node.remove(sum_)
        node.CopyFrom(
            onnx.helper.make_node(
                "MatMulNBits", inputs, outputs, name=node.name, domain="com.microsoft",
                K=k, N=n, bits=bits, block_size=block,
            )
        )  # fmt: skip
        made += 1
    if all(entry.domain != "com.microsoft" for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return made
