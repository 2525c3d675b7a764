"""Checkpoints whose groups of columns lie apart (GPTQ's desc_act): numbers are kept as they are stored."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from llmc.buckets import Bucket
from llmc.cli.main import main
from llmc.compiler.bundle_apply import apply_bundle
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.notes import notes
from llmc.compiler.resolve import resolve
from llmc.compiler.resolved import Resolved
from llmc.compiler.store.bundle import create_bundle
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.store.described import described, read_described
from llmc.models.sources.registry import open_source
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact
from llmc.runtime.graph_view import op_of
from llmc.runtime.graphs_file import read_graphs

from support.compiled import assert_same_bytes, compile_tiny
from support.marks import rare
from support.new_family import targets_here
from support.quantized_checkpoints import HIDDEN, INNER, in_act_order, make_gptq_model, make_int4_model
from support.quantized_model import LADDER, assert_company_changes_no_bit, logits_error, stored_logits_error
from support.stored_checkpoints import Integers
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
QKV, DOWN, GATE_UP = "layers.1.attention.qkv.weight", "layers.1.mlp.down.weight", "layers.1.mlp.gate_up.weight"
PLAIN = "reference"  # compiles in a second


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gptq_model(tmp_path_factory.mktemp("act-order") / "model", change=in_act_order)


@pytest.fixture(scope="module")
def compiled(model: Path, kernel_cache: Path) -> Path:
    """For the reference target."""
    compile_tiny(model, model.parent / "out", kernel_cache, buckets=LADDER, dtype="f32", target=PLAIN).close()
    return model.parent / "out"


def resolved_of(model: Path, **options: Any) -> Resolved:
    return resolve(CompileConfig(model=model, output=model, dtype="f32", buckets=LADDER, target=PLAIN, **options))


def ops_of(artifact: Path) -> list[str]:
    """Of its first graph, in order."""
    tables = read_graphs(artifact)
    return [op_of(tables.kernels[c.kernel].symbol) for c in tables.commands_of(tables.graphs[0])]


def test_logits_are_those_of_the_numbers(model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    for target in targets_here():
        out = tmp_path / target
        artifact = compile_tiny(model, out, kernel_cache, buckets=LADDER, dtype="f32", target=target)
        assert stored_logits_error(model, artifact) <= 2e-5, target
        assert_company_changes_no_bit(artifact)
        artifact.close()
        # Of qkv, out and gate_up; the rows of gate and up are in the order of down.
        assert ops_of(out).count("permute_columns") == 6
        assert ops_of(out).count("linear_quant") == 8


def test_bf16(model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    artifact = compile_tiny(model, tmp_path / "out", kernel_cache, buckets=LADDER, dtype="bf16", target=PLAIN)
    assert stored_logits_error(model, artifact) <= 4e-2
    assert_company_changes_no_bit(artifact)
    artifact.close()


def test_int8_activations(tmp_path: Path, kernel_cache: Path) -> None:
    """They are rounded in the order of the weight, whose groups they are summed in."""
    model, out = make_int4_model(tmp_path / "model", in_act_order), tmp_path / "out"
    artifact = compile_tiny(model, out, kernel_cache, buckets=LADDER, dtype="f32", target=PLAIN)
    assert stored_logits_error(model, artifact) <= 2e-2
    assert_company_changes_no_bit(artifact)
    artifact.close()
    ops = ops_of(out)
    after = [b for a, b in pairwise(ops) if a == "permute_columns"]
    assert after == ["quantize_rows"] * 6
    assert ops.count("quantize_rows") == 8


def test_bytes_are_those_of_columns_sorted_by_hand(tmp_path: Path, kernel_cache: Path) -> None:
    """Where only `down` is in act-order: its columns sorted, and the rows of gate and up with them."""

    def down_of(prefix: str) -> str:
        return f"{prefix.rpartition('.')[0]}.down_proj"

    def ordered(prefix: str, data: Integers) -> Integers:
        return in_act_order(prefix, data) if prefix == down_of(prefix) else data

    def by_hand(prefix: str, data: Integers) -> Integers:
        down = in_act_order(down_of(prefix), Integers.random(HIDDEN, INNER, 4, 32, symmetric=False))
        columns = np.argsort(down.group, kind="stable")
        if prefix == down_of(prefix):
            return replace(data, numbers=data.numbers[:, columns])
        if prefix.endswith(("gate_proj", "up_proj")):
            return replace(data, numbers=data.numbers[columns], zero=data.zero[columns], scale=data.scale[columns])
        return data

    for name, change in (("ordered", ordered), ("by_hand", by_hand)):
        made = make_gptq_model(tmp_path / name, change=change)
        artifact = compile_tiny(made, tmp_path / f"{name}-out", kernel_cache, buckets=LADDER, dtype="f32", target=PLAIN)
        assert stored_logits_error(made, artifact) <= 2e-5
        artifact.close()
    for name in ("weights.safetensors", "graphs.bin", "kernels.so"):
        assert (tmp_path / "ordered-out" / name).read_bytes() == (tmp_path / "by_hand-out" / name).read_bytes(), name
    assert "permute_columns" not in ops_of(tmp_path / "ordered-out")
    orders = [resolved_of(tmp_path / name).recipe.describe() for name in ("ordered", "by_hand")]
    assert orders[0].startswith(orders[1])
    assert orders[0] != orders[1]


def test_the_artifact_says_so(model: Path, compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = json.loads((compiled / "manifest.json").read_text())["weights"]
    assert weights[QKV]["act_order"] is weights[DOWN]["act_order"] is True
    assert weights[GATE_UP]["rows_of"] == DOWN
    assert not {"act_order", "rows_of"} & weights["lm_head.weight"].keys()
    recipe = resolved_of(model).recipe
    assert read_described(compiled).resolved.recipe == recipe
    assert QKV in recipe.permuted
    assert DOWN not in recipe.permuted
    tables = read_graphs(compiled)
    assert [w.name for w in tables.weights if w.name.endswith("columns") and w.name.startswith("layers.1.")] == [
        f"layers.1.{name}.weight.columns" for name in ("attention.qkv", "attention.out", "mlp.gate_up")
    ]
    with safe_open(compiled / "weights.safetensors", "np") as file:
        columns = file.get_tensor(f"{QKV}.columns")
    order = in_act_order("model.layers.1.self_attn.k_proj", Integers.random(32, 64, 4, 32, symmetric=False))
    assert columns.dtype == np.int32
    assert np.array_equal(columns, np.argsort(order.group, kind="stable"))
    assert main(["inspect", str(compiled), "--verify", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {weight["name"]: weight for weight in found["weights"]}
    assert by_name[QKV]["act_order"] is by_name[f"{QKV}.columns"]["act_order"] is True
    assert by_name["lm_head.weight"]["act_order"] is False
    assert by_name[f"{QKV}.columns"]["scheme"] == "w4a16"
    groups = {one["class"]: one["groups"] for one in found["weights_by_class"] if one["scheme"] == "w4a16"}
    assert set(groups.values()) == {"asymmetric groups of 32, act-order"}
    assert main(["inspect", str(compiled)]) == 0
    assert "act-order" in capsys.readouterr().out
    (note,) = notes(resolved_of(model), open_source(model).checkpoint())
    assert note.endswith(": kept as stored, w4a16 in asymmetric groups of 32, act-order")


def test_parts_in_different_orders_are_dequantized(tmp_path: Path) -> None:
    def change(prefix: str, data: Integers) -> Integers:
        return in_act_order(prefix, data) if prefix.endswith("k_proj") else data

    model = make_gptq_model(tmp_path / "model", change=change)
    resolved = resolved_of(model)
    assert {name for name in resolved.recipe.schemes if "qkv" in name} == set()
    assert not resolved.recipe.act_order
    assert notes(resolved, open_source(model).checkpoint())[0] == (
        "attention.qkv (GPTQ): dequantized to f32, for the columns of its parts lie in different orders; "
        "--quant SCHEME rounds them anew"
    )


EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


OTHERS = [target for target in targets_here() if target != PLAIN]


@pytest.mark.parametrize(("dtype", "targets"), [("f32", [PLAIN]), rare("f32", OTHERS), rare("bf16", [PLAIN, *OTHERS])])
def test_experts_have_an_order_each(dtype: str, targets: list[str], tmp_path: Path, kernel_cache: Path) -> None:
    """Tokens are copied to each expert in its order; the rows of its gate and up are in that of its down."""
    model = make_gptq_model(tmp_path / "model", change=in_act_order, **EXPERTS)
    recipe = resolved_of(model).recipe
    gate_up, down = "layers.1.mlp.experts.gate_up.weight", "layers.1.mlp.experts.down.weight"
    assert {gate_up, down} <= recipe.act_order
    assert gate_up in recipe.permuted
    assert recipe.rows_of[gate_up] == down
    for target in targets:
        out = tmp_path / target
        artifact = compile_tiny(model, out, kernel_cache, buckets=LADDER, dtype=dtype, target=target)
        assert stored_logits_error(model, artifact) <= (2e-5 if dtype == "f32" else 4e-2), target
        assert_company_changes_no_bit(artifact)
        artifact.close()
        assert read_described(out).resolved.recipe == recipe
    with safe_open(tmp_path / targets[0] / "weights.safetensors", "np") as file:
        columns = file.get_tensor(f"{gate_up}.columns").reshape(3, HIDDEN)
    assert (np.sort(columns) == np.arange(HIDDEN)).all()
    assert not np.array_equal(columns[0], columns[1])


@pytest.mark.parametrize("ordered", ["gate_proj", "down_proj"])
def test_experts_take_no_adapters(ordered: str, tmp_path: Path) -> None:
    """Also where only one of their two layers is in act-order; not if they are rounded anew."""

    def change(prefix: str, data: Integers) -> Integers:
        of = "gate_proj" if prefix.endswith("up_proj") else prefix.rpartition(".")[2]
        return in_act_order(prefix, data) if of == ordered else data

    model = make_gptq_model(tmp_path / "model", change=change, **EXPERTS)
    options: dict[str, Any] = {"lora_slots": 2, "lora_experts": True}
    with pytest.raises(CompileError, match=r"not for experts in act-order, as layers\.0\.mlp\.experts\.\w+\.weight is"):
        resolved_of(model, **options)
    assert resolved_of(model, **options, quant=QuantConfig("w4a16", group_size=32)).adapters is not None


def test_rounding_anew_is_in_the_order_of_the_model(model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    """Also in the format that is stored, and over an artifact that has it."""
    config = QuantConfig("w4a16", group_size=32, asymmetric=True, skip=("lm_head",))
    resolved = resolved_of(model, quant=config)
    assert not resolved.recipe.order()
    assert "rounded anew" in notes(resolved, open_source(model).checkpoint())[0]
    options: dict[str, Any] = {"buckets": LADDER, "dtype": "f32", "target": PLAIN, "overwrite": True}
    compile_tiny(model, tmp_path / "out", kernel_cache, **options).close()
    artifact = compile_tiny(model, tmp_path / "out", kernel_cache, **options, quant=config)
    assert logits_error(model, config, artifact) <= 1e-4
    artifact.close()


def test_bundles_and_added_buckets(model: Path, compiled: Path, tmp_path: Path, kernel_cache: Path) -> None:
    bundle = create_bundle([compiled], tmp_path / "bundle")
    options: dict[str, Any] = {"buckets": LADDER, "dtype": "f32", "target": PLAIN}

    def other(prefix: str, data: Integers) -> Integers:
        return in_act_order(prefix.replace("layers", "others"), replace(data, numbers=15 - data.numbers))

    tuned = make_gptq_model(tmp_path / "tuned", change=other)
    apply_bundle(bundle, tuned, tmp_path / "applied", target=PLAIN)
    compile_tiny(tuned, tmp_path / "compiled", kernel_cache, **options).close()
    assert_same_bytes(tmp_path / "applied", tmp_path / "compiled")
    # A model that has no order of its own is in the order that it has.
    plain = make_tiny_model(tmp_path / "plain", "llama", hidden_size=HIDDEN, intermediate_size=INNER, head_dim=32,
                            num_attention_heads=2, num_hidden_layers=2)  # fmt: skip
    apply_bundle(bundle, plain, tmp_path / "of-plain", target=PLAIN)
    with Artifact(tmp_path / "of-plain") as artifact:
        config = QuantConfig("w4a16", group_size=32, asymmetric=True, skip=("lm_head",))
        assert logits_error(plain, config, artifact) <= 1e-4
    add_buckets(compiled, [Bucket.parse("decode:2x64")], tmp_path / "added", cache_dir=kernel_cache, jobs=1)
    with Artifact(tmp_path / "added") as artifact:
        assert len(artifact.graphs()) == 5
        assert stored_logits_error(model, artifact) <= 2e-5
    for name in ("weights.safetensors", "kernels.so"):
        assert (tmp_path / "added" / name).read_bytes() == (compiled / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "entry", "why"),
    [
        ("lm_head.weight", {"act_order": True}, "'lm_head.weight' is in act-order and has no scheme"),
        (GATE_UP, {"rows_of": QKV}, "are not columns of 'layers.1.attention.qkv.weight'"),
        (QKV, {"rows_of": DOWN}, "rows of 'layers.1.attention.qkv.weight' are not columns of"),
        (DOWN, {"act_order": None}, "rows of 'layers.1.mlp.gate_up.weight' are not columns of"),
    ],
)
def test_a_manifest_of_orders_that_none_has(name: str, entry: dict[str, Any], why: str, compiled: Path) -> None:
    manifest = json.loads((compiled / "manifest.json").read_text())
    manifest["weights"][name] |= entry
    with pytest.raises(CompileError, match=re.escape(why)):
        described(manifest, "manifest.json")


@pytest.mark.parametrize("makes", ["layers.0.mlp.down.weight", "layers.1.attention.out.weight"])
def test_a_weight_map_that_is_wrong_of_what_is_made(makes: str, model: Path, kernel_cache: Path) -> None:
    resolved = resolved_of(model)
    recipe = replace(resolved.recipe, rows_of={**resolved.recipe.rows_of, GATE_UP: makes})
    tracer = Tracer(replace(resolved, recipe=recipe), GraphCache(kernel_cache))
    with pytest.raises(CompileError, match="mend `makes` of the family"):
        _ = tracer.lowered
