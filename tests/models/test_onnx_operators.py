"""The same decoder in ONNX by other operators: its configuration and its weights are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from bench.onnx_bytes import HEADS, KV_HEADS, POSITIONS, small_decoder
from llmc.models import ModelError, open_source
from llmc.models.config import ModelConfig
from llmc.models.convert import Array
from llmc.models.loader import load_parameters

from support.onnx_models import export_decoder, save
from support.tiny_models import make_tiny_model

Change = Callable[[onnx.ModelProto], None]


def read(folder: Path, model: onnx.ModelProto) -> tuple[ModelConfig, dict[str, Array]]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": POSITIONS}))
    save(model, folder / "model.onnx")
    source = open_source(folder / "model.onnx")
    config = source.config()
    return config, {p.name: p.value() for p in load_parameters(config, source.checkpoint(), "f32")}


def constants(model: onnx.ModelProto) -> None:
    """Matrices are constants of nodes, as in graphs without initializers."""
    graph = model.graph
    matrices = [tensor for tensor in graph.initializer if len(tensor.dims) == 2]
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in matrices]
    others = [*nodes, *graph.node]
    for tensor in matrices:
        graph.initializer.remove(tensor)
    del graph.node[:]
    graph.node.extend(others)


def products(model: onnx.ModelProto) -> None:
    """Of transposed matrices."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMul":
            tensor = weights[node.input[1]]
            turned = onnx.numpy_helper.to_array(tensor).T
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(turned), tensor.name))
            node.op_type, node.domain = "FusedMatMul", "com.microsoft"
            node.attribute.append(helper.make_attribute("transB", 1))


def rotated(*, positions: bool) -> Change:
    """ONNX's own operator rotates heads before attention. positions: it picks the rows of the tables itself."""

    def change(model: onnx.ModelProto) -> None:
        graph, nodes = model.graph, []
        graph.input.append(helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["batch", "tokens"]))
        for node in graph.node:
            if node.op_type != "GroupQueryAttention":
                nodes.append(node)
                continue
            tables, asked = list(node.input[7:9]), ["position_ids"]
            if not positions:
                gathers = [helper.make_node("Gather", [t, "position_ids"], [f"{node.name}/{t}"]) for t in tables]
                nodes.extend(gathers)
                tables, asked = [gather.output[0] for gather in gathers], []
            for place, heads in enumerate((HEADS, KV_HEADS)):
                to = f"{node.name}/rotated/{place}"
                given = [node.input[place], *tables, *asked]
                nodes.append(helper.make_node("RotaryEmbedding", given, [to], name=to, num_heads=heads))
                node.input[place] = to
            kept = [attribute for attribute in node.attribute if attribute.name != "do_rotary"]
            del node.attribute[:], node.input[7:]
            node.attribute.extend(kept)
            nodes.append(node)
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)

    return change


@pytest.mark.parametrize(
    "change",
    [constants, products, rotated(positions=True), rotated(positions=False)],
    ids=["constants", "products", "rotated", "rotated by tables"],
)
def test_the_model_is_the_same(change: Change, tmp_path: Path) -> None:
    wanted = read(tmp_path / "plain", small_decoder(opset=23))
    model = small_decoder(opset=23)
    change(model)
    found = read(tmp_path / "changed", model)
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-6, err_msg=name)


def test_products_as_onnxruntime_fuses_them(tmp_path: Path) -> None:
    """Of queries, transposed keys and the scale of scores."""
    checkpoint = make_tiny_model(tmp_path / "checkpoint", "llama", num_hidden_layers=2)
    graph = export_decoder(checkpoint, tmp_path / "exported" / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(graph.with_name("optimised.onnx"))
    onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(graph.with_name("optimised.onnx"))
    fused = [node for node in optimised.graph.node if node.op_type == "FusedMatMul"]
    assert {attribute.f for node in fused for attribute in node.attribute if attribute.name == "alpha"} != {1.0}
    wanted = read(tmp_path / "plain", onnx.load(graph))
    found = read(tmp_path / "changed", optimised)
    assert found[0].attention_scale == pytest.approx(wanted[0].attention_scale, rel=1e-6)
    assert replace(found[0], attention_scale=wanted[0].attention_scale) == wanted[0]
    assert all(np.array_equal(found[1][name], value) for name, value in wanted[1].items())


def test_heads_without_a_number_are_refused(tmp_path: Path) -> None:
    model = small_decoder(opset=23)
    rotated(positions=True)(model)
    node = next(node for node in model.graph.node if node.op_type == "RotaryEmbedding")
    del node.attribute[:]
    with pytest.raises(ModelError, match=r"\(RotaryEmbedding\) has no number of heads, which no model of llmc does"):
        read(tmp_path / "changed", model)
