"""`llmc inspect` on a small hand-made artifact."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from llmc.cli import inspect as cli
from llmc.cli.render.artifact_data import artifact_data
from llmc.cli.render.artifact_text import artifact_text
from llmc.cli.render.graph_formats import InspectError
from llmc.compiler.store import graphs_writer as w
from llmc.graphs_format import FAMILIES
from llmc.graphs_records import KernelRecord, KvLayerRecord, ModelRecord, OperandRecord, TargetRecord, WeightRecord
from llmc.manifest import ManifestError
from llmc.output_path import OutputError
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.llm import LLM

VOCAB, DIM = 100, 32
F = {name: i for i, name in enumerate(FAMILIES)}
NAMES = ("embed", "norm", "qkv", "cos_sin", "o_proj", "head")
SHAPES = ((VOCAB, DIM), (DIM,), (6, 16, 16, 2), (64, 8), (2, 16, 16, 2), (7, 16, 16, 2))
DTYPES = (0, 0, 1, 0, 1, 1)


def _weights() -> list[WeightRecord]:
    records, offset = [], 64
    for name, shape, dtype in zip(NAMES, SHAPES, DTYPES, strict=True):
        size = 2 if dtype else 4
        for dim in shape:
            size *= dim
        records.append(WeightRecord(name, dtype, shape, offset, size, zlib.crc32(bytes(size)), "panels16"))
        offset += -(-size // 64) * 64
    return records


WEIGHTS = _weights()
CODE = bytes(range(256)) * 4
KERNELS = [
    KernelRecord(f"{op}_{'0' * 11}{i}", buffers, F[family])
    for i, (op, family, buffers) in enumerate(
        (
            ("embedding", "embedding", 3),
            ("rms_norm", "norm", 3),
            ("linear", "linear", 3),
            ("rope_kv_write", "rope", 7),
            ("paged_attention", "attention", 4),
            ("linear", "linear", 4),
            ("gather_rows", "gather", 3),
        )
    )
]


def arena(offset: int, size: int) -> OperandRecord:
    return OperandRecord(0, 0, offset, size)


def weight(name: str) -> OperandRecord:
    index = NAMES.index(name)
    return OperandRecord(1, index, 0, WEIGHTS[index].bytes)


def rows(index: int, count: int) -> OperandRecord:
    """An int32 input."""
    return OperandRecord(2, index, 0, 4 * count)


K_POOL, V_POOL = OperandRecord(3, 0, 0, 2 * 16 * 8 * 2), OperandRecord(4, 0, 0, 2 * 16 * 16 * 2)


def graph(phase: int, batch: int, seq: int, tokens: int, row_unit: int) -> w.GraphRecord:
    x, act, qkv = tokens * DIM * 4, tokens * DIM * 2, tokens * 96 * 4
    a, b, c = 0, x, x + qkv
    sampled = arena(b, batch * DIM * 4)
    commands = (
        (0, (rows(0, tokens), weight("embed"), arena(a, x)), -1),
        (1, (arena(a, x), weight("norm"), arena(c, act)), 0),
        (2, (arena(c, act), weight("qkv"), arena(b, qkv)), 0),
        (3, (arena(b, qkv), weight("cos_sin"), rows(1, tokens), rows(2, tokens), K_POOL, V_POOL, arena(c, x)), 0),
        (4, (arena(c, x), K_POOL, V_POOL, arena(b, act)), 0),
        (5, (arena(b, act), weight("o_proj"), arena(a, x), arena(a, x)), 0),
        (6, (arena(a, x), rows(6, batch), sampled), -1),
        (1, (sampled, weight("norm"), arena(c, batch * DIM * 2)), -1),
        (2, (arena(c, batch * DIM * 2), weight("head"), OperandRecord(5, 0, 0, batch * VOCAB * 4)), -1),
    )
    records = tuple(w.CommandRecord(k, o, True, layer, KERNELS[k].family) for k, o, layer in commands)
    return w.GraphRecord(phase, batch, seq, tokens, batch, batch, 4, row_unit, x + qkv + x, records)


GRAPHS = [graph(0, 1, 16, 16, 8), graph(0, 2, 16, 32, 8), graph(1, 4, 64, 4, 4)]
MODEL = ModelRecord(1, 2, 8, 16, 1, VOCAB, 64, 4, 1, 0, (2,), 1, 2 * 16 * 8 * 2, 2 * 16 * 16 * 2)
TARGET = TargetRecord("cpu", "cooperlake", 4, "tiles")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = tmp_path / "artifact"
    folder.mkdir()
    size = WEIGHTS[-1].file_offset + WEIGHTS[-1].bytes + 32
    files = w.FileSums.of({"kernels.so": CODE}, bytes(8), size)
    (folder / "graphs.bin").write_bytes(w.write_graphs(TARGET, MODEL, KERNELS, WEIGHTS, GRAPHS, files))
    (folder / "weights.safetensors").write_bytes(bytes(size))
    (folder / "kernels.so").write_bytes(CODE)
    sources = {"qkv": ["q_proj.weight", "k_proj.weight", "v_proj.weight"], "embed": ["embed_tokens.weight"]}
    known = {name: {"sources": listed} for name, listed in sources.items()}
    (folder / "manifest.json").write_text(json.dumps({"fingerprint": "f00d", "weights": known}))
    return folder


def invoke(*args: str | Path) -> tuple[int, str]:
    app = typer.Typer()
    cli.register(app)
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["inspect", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_artifact_as_text(artifact: Path) -> None:
    code, text = invoke(artifact)
    assert code == 0
    for part in ("f00d", "decode:4x64", "rms_norm_000000000001", "q_proj.weight, k_proj.weight", "6x16x16x2", "bf16"):
        assert part in text


def test_artifact_as_json(artifact: Path) -> None:
    data = json.loads(invoke(artifact, "--format", "json")[1])
    assert [b["bucket"] for b in data["buckets"]] == ["prefill:1x16", "prefill:2x16", "decode:4x64"]
    assert {s["dtype"]: s["count"] for s in data["weights_by_scheme"]} == {"f32": 3, "bf16": 3}
    assert sum(s["bytes"] for s in data["weights_by_scheme"]) == sum(x.bytes for x in WEIGHTS)
    assert data["weights"][2]["sources"] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert {k["op"]: k["calls"] for k in data["kernels"] if k["op"] != "linear"} == {
        "embedding": 3, "rms_norm": 6, "rope_kv_write": 3, "paged_attention": 3, "gather_rows": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("bucket", "tokens", "samples"), [("prefill:2x16", 32, 2), ("decode:4x64", 4, 4)])
def test_bucket_as_json(artifact: Path, bucket: str, tokens: int, samples: int) -> None:
    data = json.loads(invoke(artifact, "--bucket", bucket, "--format", "json")[1])
    commands = data["commands"]
    types = [[(o["dtype"], o["shape"]) for o in c["operands"]] for c in commands]
    assert types[0] == [("i32", [tokens]), ("f32", [VOCAB, DIM]), ("f32", [tokens, DIM])]
    assert types[1] == [("f32", [tokens, DIM]), ("f32", [DIM]), ("bf16", [tokens, DIM])]
    assert types[3][4:6] == [("bf16", ["num_blocks", 2, 4, 16, 2]), ("bf16", ["num_blocks", 2, 8, 16, 2])]
    assert types[5][2:] == [("f32", [tokens, DIM]), ("f32", [tokens, DIM])]
    assert types[6] == [("f32", [tokens, DIM]), ("i32", [samples]), ("f32", [samples, DIM])]
    assert types[8] == [("bf16", [samples, DIM]), ("bf16", [7, 16, 16, 2]), ("f32", [samples, VOCAB])]
    plan = {v["name"]: v for v in data["memory_plan"]}
    assert plan["arena_0.1"]["first_command"] == 0
    assert plan["arena_0.1"]["last_command"] == 5
    assert all(v["offset"] + v["bytes"] <= data["arena_bytes"] for v in plan.values())


def test_bucket_as_text(artifact: Path) -> None:
    code, text = invoke(artifact, "--bucket", "DECODE:4x64")
    assert code == 0
    for part in ("paged_attention_000000000004  layer 0", "bf16[4, 32]", "memory plan", "512 bytes a block"):
        assert part in text


def test_onnx_passes_the_checker(artifact: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    target = tmp_path / "g.onnx"
    assert invoke(artifact, "--bucket", "prefill:2x16", "--format", "onnx", "-o", target)[0] == 0
    model = onnx.load(target)
    onnx.checker.check_model(model, full_check=True)
    nodes = model.graph.node
    assert [n.op_type for n in nodes][:3] == ["embedding", "rms_norm", "linear"]
    assert {n.domain for n in nodes} == {"llmc"}
    assert len(nodes) == 9
    layers = {n.name: next(a.i for a in n.attribute if a.name == "layer") for n in nodes}
    assert all(layer == 0 for name, layer in layers.items() if name.startswith("layers.0."))
    assert sum(layer == 0 for layer in layers.values()) == 5
    facts = [{fact.key: fact.value for fact in n.metadata_props} for n in nodes]
    known = {"Layer", "Attention", "Transform", "Normalization", "Activation", "Tensor"}
    assert {fact["category"] for fact in facts} <= known
    for node, fact in zip(nodes, facts, strict=True):
        names = ast.literal_eval(fact["input_names"])
        assert len(names) == len(node.input), node.name
        assert all(names), node.name
    inputs = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input}
    assert inputs == {"input_ids": (32,), "positions": (32,), "slot_mapping": (32,), "sample_index": (2,)}
    assert "For viewers" in model.doc_string
    constants = {c.values.name: tuple(c.dims) for c in model.graph.sparse_initializer}
    assert {name: constants[name] for name in NAMES} == dict(zip(NAMES, SHAPES, strict=True))
    defaults = {i.name: tuple(i.dims) for i in model.graph.initializer}
    assert defaults == {name: shape for name, shape in inputs.items() if name != "input_ids"}
    assert sum(len(c.values.raw_data) for c in model.graph.sparse_initializer) == 0
    assert {o.name for o in model.graph.output} == {"logits", "k_pool_0.1", "v_pool_0.1"}
    made = {name for n in nodes for name in n.output}
    assert {v.name for v in model.graph.value_info} == made - {o.name for o in model.graph.output}


def times_of(artifact: Path, bucket: str) -> dict[str, Any]:
    """What llmc profile --json prints, as far as it is read: command n takes n + 1 µs."""
    commands = json.loads(invoke(artifact, "--bucket", bucket, "--json")[1])["commands"]
    return {
        "bucket": bucket,
        "threads": 2,
        "commands": [{"symbol": one["kernel"], "us": one["index"] + 1} for one in commands],
    }


def test_html_holds_what_json_prints(artifact: Path, tmp_path: Path) -> None:
    file, times = tmp_path / "graph.html", tmp_path / "profile.json"
    times.write_text(json.dumps(times_of(artifact, "prefill:2x16")))
    code, printed = invoke(artifact, "--bucket", "prefill:2x16", "--html", file, "--profile", times, "--json")
    assert code == 0
    (held,) = re.findall(r'id="report-data">(.*?)</script>', file.read_text())
    data = json.loads(held)
    assert data == json.loads(printed)
    assert [one["us"] for one in data["commands"]] == list(range(1, 10))
    # 32 tokens: 32 rows of 32 floats are read, and written as bfloat16, beside 32 floats of weights.
    norm = data["commands"][1]
    assert (norm["read_bytes"], norm["written_bytes"]) == (32 * DIM * 4 + DIM * 4, 32 * DIM * 2)
    assert max(one["arena_live_bytes"] for one in data["commands"]) <= data["arena_bytes"]


def test_html_shows_a_decode_bucket_unless_told(artifact: Path, tmp_path: Path) -> None:
    code, text = invoke(artifact, "--html", tmp_path / "graph.html")
    assert (code, text) == (0, f"wrote {tmp_path / 'graph.html'}, the graph of decode:4x64\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bucket": "decode:4x64"}, "is of decode:4x64, not of prefill:2x16"),
        ({"commands": [{"symbol": "linear_0", "us": 1}]}, "of another artifact"),
        ({"commands": [{"symbol": "linear_0"}]}, "is not an output of llmc profile: write it with --json"),
        ({"commands": None}, "is not an output of llmc profile"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    change: dict[str, Any], says: str, artifact: Path, tmp_path: Path
) -> None:
    times = tmp_path / "profile.json"
    times.write_text(json.dumps(times_of(artifact, "prefill:2x16") | change))
    with pytest.raises(InspectError, match=says):
        invoke(artifact, "--bucket", "prefill:2x16", "--html", tmp_path / "graph.html", "--profile", times)
    assert not (tmp_path / "graph.html").exists()


def test_dot(artifact: Path, tmp_path: Path) -> None:
    target = tmp_path / "g.dot"
    assert invoke(artifact, "--bucket", "decode:4x64", "--format", "dot", "-o", target)[0] == 0
    text = target.read_text()
    assert text.startswith('digraph "decode:4x64" {')
    assert text.count("{") == text.count("}")
    assert all(line.rstrip().endswith((";", "{", "}")) for line in text.splitlines())
    assert "c0 -> c1" in text
    declared = set(re.findall(r"^  (\w+) \[", text, re.MULTILINE)) - {"edge"}
    edges = re.findall(r"(\w+) -> (\w+)", text)
    assert {node for edge in edges for node in edge} == declared
    # Weights and inputs stand in the box that reads them, with their shapes.
    assert r"2: layers.0.linear\nlinear_000000000002\nqkv  bf16[6, 16, 16, 2]" in text
    assert r"positions  i32[4]\nslot_mapping  i32[4]" in text
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg", "-o", tmp_path / "g.svg", target], check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bucket", "decode:9x9"],
        ["--format", "dot"],
        ["--format", "onnx", "--bucket", "decode:4x64"],
        ["--format", "png"],
        ["--profile", "profile.json"],
        ["--html", "x.html", "--format", "dot"],
        ["--html", "x.html", "-o", "x.json"],
    ],
)
def test_usage_errors_exit_with_2(artifact: Path, arguments: list[str]) -> None:
    assert invoke(artifact, *arguments)[0] == 2


def test_bad_artifacts_are_named(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read"):
        invoke(tmp_path / "nothing")
    with pytest.raises(OutputError, match="cannot write --output"):
        invoke(artifact, "-o", tmp_path / "no" / "file")
    for text in ("[]", "{", "\xff", "[" * 100_000):
        (artifact / "manifest.json").write_text(text)
        with pytest.raises(ManifestError, match=r"manifest\.json"):
            invoke(artifact)
    (artifact / "manifest.json").write_text('{"weights": {"embed": 3}}')
    with pytest.raises(ManifestError, match=r"manifest\.json does not describe .* \(weights\.embed is 3: "):
        invoke(artifact)
    (artifact / "manifest.json").write_text('{"weights": {"qkv": {"scheme": "awq", "sources": ["a"]}}}')
    assert "awq" in invoke(artifact)[1]
    (artifact / "weights.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="has 0 bytes"):
        invoke(artifact)


def test_verify_reads_every_byte(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = invoke(artifact, "--verify")
    assert code == 0
    assert "verified: 6 weights" in text
    offset = WEIGHTS[2].file_offset
    for name, at, message in (
        ("weights.safetensors", offset + 5, rf"weight 'qkv' at byte {offset} of weights.safetensors"),
        ("weights.safetensors", 20, "padding at byte 8"),
        ("weights.safetensors", -1, "padding at byte"),
        ("weights.safetensors", 7, "the header at byte 0|damaged header"),
        ("kernels.so", 100, "the code at byte 0 of kernels.so"),
    ):
        good = (artifact / name).read_bytes()
        data = bytearray(good)
        data[at] ^= 1
        (artifact / name).write_bytes(data)
        with pytest.raises(FormatError, match=message):
            invoke(artifact, "--verify")
        assert invoke(artifact)[0] == 0  # only asked for
        (artifact / name).write_bytes(good)
    (artifact / "kernels.so").unlink()
    with pytest.raises(FormatError, match="cannot read"):
        invoke(artifact, "--verify")


def test_verify_lists_a_few_and_counts_the_rest(artifact: Path) -> None:
    (artifact / "weights.safetensors").write_bytes(
        bytes(8) + b"\1" * (WEIGHTS[-1].file_offset + WEIGHTS[-1].bytes + 24)
    )
    with pytest.raises(FormatError, match=r"'embed'.*; .*, and [0-9]+ more: compile") as caught:
        invoke(artifact, "--verify")
    assert "\n" not in str(caught.value)


def test_inspect_tells_layers_with_a_state_from_those_whose_heads_differ(chat_artifact: Path) -> None:
    tables, manifest = read_graphs(chat_artifact), json.loads((chat_artifact / "manifest.json").read_text())
    layers, heads = tables.model.num_layers, f"{tables.model.num_kv_heads} KV heads of {tables.model.head_dim}"
    assert f"model: {layers} layers, {heads}," in artifact_text(tables, manifest)
    of_layers = (KvLayerRecord(4096, 96), *[tables.kv_layer(0)] * (layers - 1))
    unlike = replace(tables, kv_layers=of_layers)
    assert f"model: {layers} layers, KV heads that differ by layer," in artifact_text(unlike, manifest)
    one = replace(unlike, state_layers=(0,))
    assert f"model: {layers} layers, 1 of them with a state, {heads}," in artifact_text(one, manifest)


def test_inspect_tells_what_a_pool_needs(chat_artifact: Path) -> None:
    tables, manifest = read_graphs(chat_artifact), json.loads((chat_artifact / "manifest.json").read_text())
    pool = artifact_data(tables, manifest)["kv_pool"]
    with LLM(chat_artifact, num_threads=1) as llm:
        info = llm.artifact.info
        assert pool["block_bytes"] == info.kv_block_bytes
        assert pool["full_context_bytes"] == llm.limit.kv_bytes
        assert pool["default_max_request_tokens"] == llm.max_model_len == 64
    assert "KV pool:" in artifact_text(tables, manifest)
    assert "--kv-bytes" not in artifact_text(tables, manifest)
    large = KvLayerRecord(1 << 29, 1 << 29)  # a block takes a GiB
    layers = (large, *[tables.kv_layer(0)] * (tables.model.num_layers - 1))
    alike = replace(tables.model, key_block_bytes=1 << 29, value_block_bytes=1 << 29)
    text = artifact_text(replace(tables, model=alike, kv_layers=layers), manifest)
    assert f"the default pool holds {info.block_size}: see --kv-bytes" in text
    states = replace(tables, model=alike, kv_layers=(KvLayerRecord(1 << 27, 0), *layers[1:]), state_layers=(0,))
    assert "a sequence's states take 128.0 MiB, and the default pool has 3 slots for them" in artifact_text(
        states, manifest
    )
