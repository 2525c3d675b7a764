"""ONNX files that are damaged, or built as no model of llmc: refused in one sentence that names what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from bench.fuzz_onnx import read_onnx
from bench.onnx_bytes import POSITIONS, small_decoder
from llmc.models import ModelError, open_source
from llmc.models.loader import Parameter, load_parameters
from llmc.models.sources.folder_checkpoint import FolderCheckpoint
from llmc.models.sources.onnx.quantized import REFUSED

from support.failing import fails
from support.onnx_blocks import quantize_products
from support.onnx_models import save

PAGE = Path(__file__).resolve().parents[2] / "docs" / "onnx.md"


def node_of(model: onnx.ModelProto, op: str) -> onnx.NodeProto:
    found: onnx.NodeProto = next(node for node in model.graph.node if node.op_type == op)
    return found


def tensor_of(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    found: onnx.TensorProto = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    return found


def attribute(model: onnx.ModelProto, name: str, value: object) -> None:
    node = node_of(model, "GroupQueryAttention")
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def renamed_input(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "input_ids":
                node.input[i] = "pixel_values"
    model.graph.input[0].name = "pixel_values"


def other_scale(model: onnx.ModelProto) -> None:
    """The second layer's attention is another one."""
    second = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"][1]
    second.attribute.append(helper.make_attribute("scale", 0.5))


def rounded(model: onnx.ModelProto) -> None:
    """The gate is whole numbers."""
    gate = node_of(model, "Sigmoid")
    place, name = list(model.graph.node).index(gate), gate.output[0]
    gate.output[0] = "before"
    model.graph.node.insert(place + 1, helper.make_node("Cast", ["before"], ["whole"], to=6, name="/rounds"))
    model.graph.node.insert(place + 2, helper.make_node("Cast", ["whole"], [name], to=1, name="/back"))


def mixed(model: onnx.ModelProto) -> None:
    """The embedding of each token is a mean over the text."""
    embedded = next(node for node in model.graph.node if node.input[0] == "embed.weight")
    name = embedded.output[0]
    embedded.output[0] = "embedded"
    place = list(model.graph.node).index(embedded)
    mean = helper.make_node("ReduceMean", ["embedded"], [name], name="/mixes", axes=[1])
    model.graph.node.insert(place + 1, mean)


def of_integers(change: Callable[[onnx.ModelProto, onnx.NodeProto], object]) -> Callable[[onnx.ModelProto], None]:
    """Weights are rounded to 4 bits; the change is of the first product."""

    def changed(model: onnx.ModelProto) -> None:
        quantize_products(model, 4, 32, zeros=True)
        change(model, node_of(model, "MatMulNBits"))

    return changed


def whole(name: str, value: int) -> Callable[[onnx.ModelProto], None]:
    """With another attribute."""

    def change(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        next(a for a in node.attribute if a.name == name).i = value

    return of_integers(change)


def part(place: int, change: Callable[[onnx.TensorProto], object]) -> Callable[[onnx.ModelProto], None]:
    """With another tensor as an input."""
    return of_integers(lambda model, node: change(tensor_of(model, node.input[place])))


def scaled(tensor: onnx.TensorProto, value: float) -> None:
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[-1] = value
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


CASES: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "old opset": (
        lambda m: setattr(m.opset_import[0], "version", 9),
        r"uses opset 9 of ONNX, and llmc reads 13 to \d+; export",
    ),
    "opset of tomorrow": (lambda m: setattr(m.opset_import[0], "version", 999), "uses opset 999 of ONNX"),
    "no opset": (lambda m: m.ClearField("opset_import"), "does not say which opset"),
    "no graph": (lambda m: m.ClearField("graph"), r"is not an ONNX model, or a truncated one \(it holds 0 graphs\)"),
    "unknown operator": (
        lambda m: setattr(node_of(m, "Sigmoid"), "op_type", "Sigmoidal"),
        r"node /Sigmoid_\d+ \(Sigmoidal\) is not supported",
    ),
    "a branch": (
        lambda m: setattr(node_of(m, "Sigmoid"), "op_type", "If"),
        r"node /Sigmoid_\d+ \(If\) is not supported",
    ),
    "value that nothing makes": (
        lambda m: node_of(m, "Sigmoid").input.__setitem__(0, "nowhere"),
        "nothing makes the value nowhere",
    ),
    "images": (renamed_input, "has an input pixel_values; llmc knows input_ids, attention_mask"),
    "two models in one": (
        lambda m: m.graph.input.append(helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])),
        r"has two models in one \(input use_cache_branch\)",
    ),
    "rows are mixed": (mixed, r"node /mixes \(ReduceMean\) takes a mean over several tokens, which no model"),
    "another function": (
        lambda m: setattr(node_of(m, "Sigmoid"), "op_type", "Cos"),
        r"node /Sigmoid_\d+ \(Cos\) computes cos of rows of tokens",
    ),
    "rounded to integers": (rounded, r"node /rounds \(Cast\) "),
    "another activation": (
        lambda m: setattr(node_of(m, "Sigmoid"), "op_type", "Tanh"),
        "has a feed-forward block with a gate that llmc does not know",
    ),
    "window of the operator": (
        lambda m: attribute(m, "local_window_size", 8),
        r"\(com\.microsoft\.GroupQueryAttention\) has the attribute local_window_size",
    ),
    "other heads": (lambda m: attribute(m, "num_heads", 3), r"\(com\.microsoft\.GroupQueryAttention\) "),
    "layers that differ": (other_scale, "has layers of different scales of scores: 0.25, 0.5"),
    "tensor twice": (
        lambda m: setattr(tensor_of(m, "layers.0.q"), "name", "lm_head"),
        "two tensors",
    ),
    "doubles": (
        lambda m: tensor_of(m, "layers.0.q").CopyFrom(
            onnx.numpy_helper.from_array(np.zeros((32, 64), np.float64), "layers.0.q")
        ),
        r"tensor layers\.0\.q is of type float64; export the model in float32",
    ),
    "shape of other bytes": (
        lambda m: tensor_of(m, "layers.0.q").dims.__setitem__(0, 31),
        r"has 8192 bytes of tensor layers\.0\.q, whose shape \[31, 64\] takes 7936",
    ),
    "quantized on the way": (
        lambda m: setattr(node_of(m, "Sigmoid"), "op_type", "DynamicQuantizeLinear"),
        r"node /Sigmoid_\d+ \(DynamicQuantizeLinear\) has quantized numbers that llmc does not read: give the float",
    ),
    "integers of 3 bits": (
        whole("bits", 3),
        r"\(MatMulNBits\) has weights of 3 bits, and llmc reads those of 4 and 8; quantize",
    ),
    "integers in small blocks": (
        whole("block_size", 16),
        r"has rows of \d+ numbers in blocks of 16; llmc reads blocks of a multiple of 32",
    ),
    "integers of no rows": (whole("N", 0), "has the attribute N = 0, not a positive number"),
    "integers of more rows": (
        whole("N", 4096),
        r"has weights of shape \[.*\], and its sizes ask for \d+ elements",
    ),
    "scales of integers": (
        part(2, lambda t: t.CopyFrom(onnx.numpy_helper.from_array(np.zeros(4, np.int32), t.name))),
        r"has scales of type int32, and llmc reads bfloat16 or float16 or float32; quantize",
    ),
    "zero points of floats": (
        part(3, lambda t: t.CopyFrom(onnx.numpy_helper.from_array(np.zeros(4, np.float32), t.name))),
        r"has zero points of type float32, and llmc reads uint8; quantize",
    ),
    "scale that is no number": (part(2, lambda t: scaled(t, np.nan)), r"tensor .*B has a scale of nan; export"),
    "integers in act-order": (
        of_integers(lambda _, node: node.input.append(node.input[2])),
        r"has columns in an order of their own \(g_idx\); quantize",
    ),
    "integers that nobody stores": (
        of_integers(lambda _, node: node.input.__setitem__(1, "nowhere")),
        r"has no weights in the file; export the model with its weights as initializers",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": POSITIONS}))
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_bad_graphs(name: str, folder: Path) -> None:
    change, message = CASES[name]
    model = small_decoder()
    change(model)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=message) as caught:
        read_onnx(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_page_has_all_quantized_operators() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.endswith("| refused |")]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines]
    told = {("" if of == "ONNX" else of, name) for names, of in rows for name in names.split(", ")}
    assert told == REFUSED


@pytest.mark.parametrize("kept", [0, 1, 100, 20000])
def test_truncated_files(kept: int, folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(small_decoder().SerializeToString()[:kept])
    with pytest.raises(ModelError, match=r"is empty|is not an ONNX model, or a truncated one"):
        open_source(path).config()


def test_external_data(folder: Path) -> None:
    path = folder / "model.onnx"
    save(small_decoder(), path)
    plain = {p.name: p.value() for p in parameters(path)}
    save(small_decoder(), path, external=True)
    assert path.stat().st_size < 20000
    outside = {p.name: p.value() for p in parameters(path)}
    assert plain.keys() == outside.keys()
    assert all(np.array_equal(plain[name], outside[name]) for name in plain)
    data = folder / "model.onnx_data"
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=rf"{re.escape(str(data))} has \d+ bytes, but tensor .* it is truncated"):
        open_source(path).config()
    data.unlink()
    with pytest.raises(ModelError, match=rf"keeps its weights in {re.escape(str(data))}, which does not exist"):
        open_source(path).config()


@pytest.mark.parametrize("location", ["../elsewhere", "/etc/passwd", "", "a/../../b"])
def test_external_data_elsewhere(location: str, folder: Path) -> None:
    model = small_decoder()
    tensor = tensor_of(model, "lm_head")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.append(onnx.StringStringEntryProto(key="location", value=location))
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"tensor lm_head lies in .*, which is not a file beside the model"):
        open_source(path).config()


def parameters(path: Path) -> list[Parameter]:
    source = open_source(path)
    return list(load_parameters(source.config(), source.checkpoint(), "f32"))


def test_no_length(tmp_path: Path) -> None:
    save(small_decoder(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"no config\.json beside it says how long .*; put one there with max_pos.*s$"):
        open_source(tmp_path / "model.onnx").config()


def test_fixed_sizes(folder: Path) -> None:
    """Constants of a graph that was exported for one size hold indices of that size."""
    model = small_decoder()
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, (2, 6), strict=True):
        dim.dim_value = size
    save(model, folder / "model.onnx")
    assert open_source(folder / "model.onnx").config().num_layers == 2
    node = node_of(model, "GroupQueryAttention")
    node.op_type = "Unheard"
    save(model, folder / "model.onnx")
    with pytest.raises(ModelError, match=r"input_ids has the fixed shape \[2, 6\].*export the model with dynamic axes"):
        open_source(folder / "model.onnx").config()


def test_layouts_of_folders(tmp_path: Path) -> None:
    """Optimum's, and the hub's, where other files lie above the graph."""
    hub, plain = tmp_path / "hub", tmp_path / "plain"
    for place in (hub / "onnx", plain):
        place.mkdir(parents=True)
        save(small_decoder(), place / "model.onnx")
    for place in (hub, plain):
        fields = {"max_position_embeddings": POSITIONS, "eos_token_id": 7}
        (place / "config.json").write_text(json.dumps(fields))
    for path in (hub, hub / "onnx" / "model.onnx", plain, plain / "model.onnx"):
        assert open_source(path).config().eos_token_ids == (7,)


def test_a_folder_with_a_config_and_graphs_of_other_names(tmp_path: Path) -> None:
    """As of transformers.js."""
    (tmp_path / "onnx").mkdir()
    save(small_decoder(), tmp_path / "onnx" / "model_fp16.onnx")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no weights .* ONNX files: give one of them, .*/model_fp16\.onnx"):
        FolderCheckpoint(tmp_path)


def test_no_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(small_decoder(), folder / "model.onnx")
    fails(capsys, 1, ["compile", folder / "model.onnx", "-o", folder / "out"], "tokenizer.json")


def test_another_task(folder: Path) -> None:
    save(small_decoder(), folder / "model.onnx")
    with pytest.raises(ModelError, match="was exported to generate, not to embed"):
        open_source(folder / "model.onnx", task="embed").config()


def test_weights_are_given_back(folder: Path) -> None:
    """What the model's file holds of a matrix is not read before it is packed."""
    save(small_decoder(), folder / "model.onnx")
    source = open_source(folder / "model.onnx")
    checkpoint = source.checkpoint()
    before = checkpoint.tensor("lm_head.weight")
    values = np.empty(before.shape, np.float32)
    before.read(0, values)
    checkpoint.release()
    again = np.empty_like(values)
    before.read(0, again)
    assert np.array_equal(values, again)
    assert np.abs(values).sum() > 0
