"""Mutations of ONNX files as a faulty writer might make: wrong operators, attributes, shapes and names."""

from __future__ import annotations

import random
from pathlib import Path

import onnx

from llmc.models import load_parameters
from llmc.models.sources.onnx.source import OnnxSource

_OPS = ("Add", "Mul", "MatMul", "Softmax", "Transpose", "Concat", "Nothing", "Identity", "Gather", "Loop")


def read_onnx(path: Path) -> None:
    """Reads a file as a compilation does, down to every weight. config.json beside it gives the longest context."""
    (path.parent / "config.json").write_text('{"max_position_embeddings": 64}')
    source = OnnxSource(path)
    config = source.config()
    for parameter in load_parameters(config, source.checkpoint(), "f32"):
        parameter.value()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The model with one item replaced, missing or doubled."""
    model = onnx.load_from_string(data)
    graph = model.graph
    node = rng.choice(graph.node)
    tensor = rng.choice(graph.initializer)
    match rng.randrange(9):
        case 0:
            node.op_type = rng.choice(_OPS)
        case 1 if node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice((*node.output, "", "nowhere", tensor.name))
        case 2 if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice((0, 1, 3, -1, 1 << 40))
        case 3:
            tensor.data_type = rng.choice((0, 2, 7, 10, 11, 16, 99))
        case 4:
            tensor.name = rng.choice(("", "x", graph.initializer[0].name))
        case 5:
            graph.node.remove(node)
        case 6:
            del graph.initializer[rng.randrange(len(graph.initializer))]
        case 7:
            model.opset_import[0].version = rng.choice((0, 9, 13, 18, 99))
        case _:
            value = rng.choice(graph.input)
            value.type.tensor_type.shape.dim[rng.randrange(2)].dim_value = rng.choice((1, 7, -3))
    changed: bytes = model.SerializeToString()
    return changed
