"""Whole quantized models: logits against torch on the same dequantized weights, bits, keys, bytes, and bad requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.cache_root import cache_root
from llmc.cli.main import main
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.wanted import wanted_entries
from llmc.models import open_source
from llmc.models.registry import get_family
from llmc.quantize import QuantConfig, QuantizeError, Recipe, Scheme, layer_kind
from llmc.runtime.binding import Artifact
from llmc.runtime.graph_view import op_of
from llmc.runtime.graphs_file import read_graphs

from support.compiled import compile_tiny
from support.families import CASES
from support.marks import rare
from support.quantized_model import LADDER, REQUESTS, assert_company_changes_no_bit, logits_error, make_model
from support.tiny_encoders import make_encoder
from support.tiny_models import make_tiny_model
from support.verified import Claim, verifies

pytestmark = pytest.mark.native

SMALL_LADDER = "prefill=[4]x[12],decode=[4]x[64]"  # one row tile, so few kernels


@pytest.fixture(scope="module", params=list(REQUESTS))
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> tuple[str, Path, Artifact]:
    name = request.param
    root = tmp_path_factory.mktemp(name)
    model = make_model(root / "model", name)
    artifact = compile_tiny(model, root / "out", kernel_cache, buckets=LADDER, dtype="f32", quant=REQUESTS[name])
    return name, model, artifact


@verifies(lambda quantized: [Claim("qwen2", scheme=REQUESTS[quantized].scheme)])
def test_logits_match_the_dequantized_model(quantized: tuple[str, Path, Artifact]) -> None:
    name, model, artifact = quantized
    # Int8 activations that lie between two numbers may round either way.
    assert logits_error(model, REQUESTS[name], artifact) <= (2e-2 if "a8" in name else 1e-4)


# bf16 keeps 8 bits of mantissa, float16 11: weights round before they are quantized, activations that are not int8.
# Where those are int8, that moves some numbers by one.
@verifies(lambda name, dtype: [Claim("qwen2", dtype=dtype, scheme=REQUESTS[name].scheme)])
@pytest.mark.parametrize(
    ("name", "dtype", "target", "bound"),
    [
        ("w8a8", "bf16", "native", 4e-2),
        rare("w4a16-asymmetric", "bf16", "native", 4e-2),
        rare("w8a8", "f32", "x86-64-v3", 2e-2),
        ("w4a8", "bf16", "x86-64-v3", 4e-2),
        ("w4a16-asymmetric", "f16", "native", 5e-3),
        rare("w8a8", "f16", "native", 4e-2),
    ],
)
def test_other_dtypes_and_levels(
    name: str, dtype: str, target: str, bound: float, tmp_path: Path, kernel_cache: Path
) -> None:
    model, config = make_model(tmp_path / "model", name), REQUESTS[name]
    artifact = compile_tiny(
        model, tmp_path / "out", kernel_cache, buckets=LADDER, dtype=dtype, quant=config, target=target
    )
    assert logits_error(model, config, artifact) <= bound
    assert_company_changes_no_bit(artifact)


def test_activations_become_int8_where_they_are_made(quantized: tuple[str, Path, Artifact]) -> None:
    name, model, _ = quantized
    tables = read_graphs(model.parent / "out")
    for graph in tables.graphs:
        ops = [op_of(tables.kernels[c.kernel].symbol) for c in tables.commands_of(graph)]
        # Norms write int8 themselves; behind attention and behind gates a kernel of its own does.
        assert ops.count("quantize_rows") == (4 if "a8" in name else 0)
        assert ops.count("embedding_quant") == (1 if name.endswith("tied") else 0)


def test_bits_do_not_depend_on_company(quantized: tuple[str, Path, Artifact]) -> None:
    assert_company_changes_no_bit(quantized[2])


def test_inspect_tells_schemes_and_bits(
    quantized: tuple[str, Path, Artifact], capsys: pytest.CaptureFixture[str]
) -> None:
    name, model, _ = quantized
    assert main(["inspect", str(model.parent / "out"), "--verify", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scheme = REQUESTS[name].scheme
    bits = found["bits_per_weight"]
    # 60 or 100 elements a row, padded to a line, and 100 or more rows, gate's and up's each, to a panel.
    low, high = (8, 12) if scheme.startswith("w8") else (5, 9)
    assert low < bits[scheme] < high
    assert ("f32" in bits) == (name == "w4a16-skip" or not name.endswith("tied"))
    schemes = {w["name"]: w["scheme"] for w in found["weights"]}
    assert schemes["layers.0.mlp.down.weight"] == schemes["layers.0.mlp.down.weight.scale"] == scheme
    assert ("layers.0.mlp.down.weight.zero" in schemes) == name.endswith("asymmetric")
    assert ("layers.0.mlp.down.weight.step" in schemes) == (scheme == "w4a8")
    assert schemes["layers.1.attention.out.weight"] == ("f32" if name == "w4a16-skip" else scheme)


# --- keys ------------------------------------------------------------------------------------------------------------


def kernel_keys(config: CompileConfig) -> dict[str, str]:
    found = wanted_entries(config, GraphCache(cache_root(config.cache_dir)))
    return {w.key: w.components["op"] for w in found if w.components["kind"] == "kernel"}


def test_keys_change_where_the_scheme_matters(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_model(tmp_path / "model", "plain")
    plain = CompileConfig(
        model=model, output=tmp_path / "plain", cache_dir=kernel_cache, buckets=SMALL_LADDER, dtype="f32"
    )
    skipping = replace(plain, quant=QuantConfig("w8a16", skip=("mlp.down",)), output=tmp_path / "skip")
    for config in (plain, skipping):
        compile_model(config)
    before, after = kernel_keys(plain), kernel_keys(skipping)
    # What is not quantized keeps its kernels; only the linears that are have others.
    assert {op for key, op in before.items() if key not in after} == {"linear"}
    assert {op for key, op in after.items() if key not in before} == {"linear_quant"}
    assert "linear" in {op for key, op in after.items() if key in before}
    again = compile_model(replace(skipping, output=tmp_path / "again"))
    assert again.kernels_compiled == 0
    assert (tmp_path / "again" / "graphs.bin").read_bytes() == (skipping.output / "graphs.bin").read_bytes()


def test_weights_are_shared_by_schemes_that_differ_in_activations(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_model(tmp_path / "model", "plain")
    config = CompileConfig(
        model=model, output=tmp_path / "out", cache_dir=kernel_cache, buckets=SMALL_LADDER, dtype="f32", overwrite=True
    )
    compile_model(replace(config, quant=QuantConfig("w8a16")))
    packed = (tmp_path / "out" / "weights.safetensors").stat()
    compile_model(replace(config, quant=QuantConfig("w8a8")))
    assert (tmp_path / "out" / "weights.safetensors").stat().st_ino == packed.st_ino
    compile_model(replace(config, quant=QuantConfig("w4a8")))
    assert (tmp_path / "out" / "weights.safetensors").stat().st_ino != packed.st_ino


# --- what cannot be done ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--quant", "w3a16"], "quantization scheme 'w3a16' is unknown: use w8a16, w8a8, w4a16, w4a8, fp8, mxfp4"),
        (["--quant", "w4a16", "--group-size", "48"], "group size 48 is not one of 32, 64, 128, -1"),
        (["--quant", "w8a8", "--group-size", "64"], "--group-size cannot be combined with w8a8"),
        (["--quant", "w8a8", "--asymmetric"], "cannot be combined with w8a8"),
        (["--group-size", "64"], "--group-size says how to quantize; add --quant"),
        (["--skip", "lm_head"], "--skip says how to quantize; add --quant"),
    ],
)
def test_flags_that_make_no_sense(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", str(tmp_path), "-o", str(tmp_path / "out"), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_layer_that_does_not_exist_cannot_be_skipped(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "plain")
    config = CompileConfig(model=model, output=tmp_path / "out", quant=QuantConfig("w8a8", skip=("mlp",)))
    with pytest.raises(QuantizeError, match=r"'mlp' is not a linear layer .*mlp\.down.*lm_head.*layers\.0\.attention"):
        compile_model(config)
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_no_number_is_named(tmp_path: Path, kernel_cache: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_model(tmp_path / "model", "plain")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = CompileConfig(model, tmp_path / "out", SMALL_LADDER, quant=QuantConfig("w8a16"), cache_dir=kernel_cache)
    with pytest.raises(CompileError, match=r"cannot quantize layers\.1\.mlp\.down\.weight: .*not a number"):
        compile_model(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "tables"),
    [
        ("opt", {"embed", "positions"}),
        ("gemma3n_text", {"inputs.table"}),
        ("gemma4_text", {"inputs.table"}),
        ("bert", {"embed", "positions", "types"}),
    ],
)
def test_tables_are_not_quantized(family: str, tables: set[str], tmp_path: Path) -> None:
    """Unless they are the output projection, too."""
    if family == "bert":
        model = make_encoder(tmp_path / "model", family, labels=1)
    else:
        model = make_tiny_model(tmp_path / "model", family, **CASES[family][1])

    def resolved(quant: QuantConfig) -> Recipe:
        return resolve(CompileConfig(model=model, output=tmp_path / "out", quant=quant)).recipe

    config = open_source(model).config()
    found = {target.name for target in get_family(config.model_type).weight_map(config).targets if target.table}
    assert tables <= {layer_kind(name) for name in found}
    rounded = resolved(QuantConfig("w4a16")).schemes
    head = {"embed.weight"} if config.tie_word_embeddings and config.pooled is None else set()
    assert found & rounded.keys() == head
    assert any(name.startswith("layers.") for name in rounded)
    with pytest.raises(QuantizeError, match="is not a linear layer of this model"):
        resolved(QuantConfig("w4a16", skip=(max(tables),)))


def test_recipes() -> None:
    names = ["layers.0.mlp.down.weight", "layers.1.mlp.down.weight", "lm_head.weight"]

    def schemes(skip: tuple[str, ...]) -> dict[str, str]:
        recipe = Recipe.of(QuantConfig("w4a8", skip=skip), names, head="lm_head.weight")
        return {name: scheme.name for name, scheme in recipe.schemes.items()}

    assert schemes(()) == {names[0]: "w4a8", names[1]: "w4a8", names[2]: "w8a8"}
    assert schemes(("lm_head", names[1])) == {names[0]: "w4a8"}
    assert schemes(("mlp.down",)) == {names[2]: "w8a8"}
    described = Recipe.of(QuantConfig("w4a8", group_size=32), names, head=names[2]).describe()
    both = "layers.0.mlp.down.weight layers.1.mlp.down.weight"
    assert f"w4a8 in symmetric groups of 32 (steps 32 False): {both}" in described
    assert isinstance(QuantConfig("w4a8").head, Scheme)
