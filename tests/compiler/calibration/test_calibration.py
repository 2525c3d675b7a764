"""`llmc quantize -o`: what is written, that it is what the methods promise, and that it is always the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, disable_quantization
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from llmc.cli.main import main
from llmc.compiler.calibration import driver
from llmc.compiler.calibration.work import Work
from llmc.compiler.config import CompileError
from llmc.models.eager import load_model
from llmc.models.loader import check_checkpoint, load_parameters
from llmc.models.sources.registry import open_source
from llmc.quantize import QuantConfig
from llmc.quantize.formats.base import Quantized
from llmc.quantize.rtn import quantize

from support.calibrated import TEXT, W4A16, divergence, logits, make_model, request_of
from support.calibrated import quantized as written
from support.compiled import assert_same_bytes, check_every_bucket, compile_tiny, random_tokens, relative_error
from support.families import CASES
from support.gemma_families import GEMMA3N, GEMMA4
from support.tiny_encoders import DenseModule, make_encoder, save_sentence_files
from support.tiny_models import make_tiny_model

LADDER = "prefill=[4]x[12],decode=[4]x[64]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("calibrated") / "model")


def test_methods_that_look_at_text_are_closer_to_the_model(model: Path, tmp_path: Path) -> None:
    nearest = divergence(written(model, tmp_path / "rtn", W4A16, "rtn"), model)
    assert divergence(written(model, tmp_path / "gptq"), model) < 0.6 * nearest
    assert divergence(written(model, tmp_path / "awq", W4A16, "awq"), model) < 0.8 * nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "method"), [("w8a16", "awq"), ("w8a8", "awq"), ("w8a8", "smoothquant")])
def test_scales_that_move_between_layers_change_nothing(
    scheme: str, method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With 8 bits what is left is rounding: biases, heads that share keys, and norms in bf16 included."""
    model = make_model(tmp_path / "model", "qwen2", dtype)
    output = written(model, tmp_path / "out", QuantConfig(scheme), method)
    assert relative_error(logits(output), logits(model)) < 0.05
    folded, plain = (open_source(path).checkpoint() for path in (output, model))
    name = "model.layers.0.input_layernorm.weight"
    assert folded.dtype(name) == plain.dtype(name)
    assert np.asarray(folded.tensor(name).array != plain.tensor(name).array).any()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("quant", "method"),
    [
        (W4A16, "gptq"),
        (QuantConfig("w8a16"), "rtn"),
        (replace(W4A16, group_size=64), "rtn"),  # mlp.down has rows of 96
        (replace(W4A16, skip=("mlp.down",)), "rtn"),
        (QuantConfig("fp8"), "rtn"),
        (QuantConfig("mxfp4"), "gptq"),
    ],
    ids=["gptq", "w8a16", "whole-rows", "skip", "fp8", "mxfp4"],
)
def test_transformers_reads_what_is_written(quant: QuantConfig, method: str, model: Path, tmp_path: Path) -> None:
    output = written(model, tmp_path / "out", quant, method)
    try:
        # MXFP4 becomes bf16 when it is first needed, unless it does so at once; then its values are those of f32, too.
        if quant.scheme == "mxfp4":
            how = CompressedTensorsConfig(run_compressed=False)
            theirs = AutoModelForCausalLM.from_pretrained(output, quantization_config=how).float()
        else:
            theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
        theirs.apply(disable_quantization)  # of inputs, which FP8 checkpoints want rounded
    except ImportError as error:
        pytest.skip(f"transformers cannot read compressed-tensors here: {error}")
    tokens = random_tokens(515)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].float().numpy()
    assert relative_error(logits(output, tokens), expected) < 1e-4
    assert relative_error(logits(model, tokens), expected) > 1e-3


@pytest.mark.parametrize(
    ("quant", "method"),
    [
        (replace(W4A16, asymmetric=True), "awq"),
        (QuantConfig("w8a8"), "rtn"),
        (QuantConfig("w4a8", group_size=32), "rtn"),
        (QuantConfig("fp8"), "rtn"),
        (QuantConfig("mxfp4"), "rtn"),
    ],
)
def test_the_library_reads_what_is_written(quant: QuantConfig, method: str, model: Path, tmp_path: Path) -> None:
    """As it unpacks weights; transformers makes no room for packed zero points, and rounds inputs of int8 layers."""
    output = written(model, tmp_path / "out", quant, method)
    settings = json.loads((output / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    library = BaseCompressor.get_value_from_registry(settings["format"])
    prefix = "model.layers.1.mlp.down_proj"
    tensors = {name.removeprefix(f"{prefix}."): value for name, value in load_file(output / "model.safetensors").items()
               if name.startswith(prefix)}  # fmt: skip
    expected = library.decompress(tensors, scheme)["weight"].float().numpy()
    layer: Any = load_model(output).get_submodule("layers.1.mlp.down")
    found = layer.weight.detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (scheme.input_activations is not None) == (settings["format"] in ("int-quantized", "float-quantized"))


def test_a_head_of_its_own_stays_where_the_config_ties_it(tmp_path: Path) -> None:
    """The config that is written says so, for readers that believe it."""
    model = make_model(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = 8.0 * tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    output = written(model, tmp_path / "out", QuantConfig("w8a16"), "rtn")
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_file(output / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])
    assert relative_error(logits(output), logits(model)) < 0.05


def test_float_schemes_round_as_the_compiler_does(model: Path, tmp_path: Path) -> None:
    """Of the numbers of a checkpoint that was rounded to nearest, and of what `llmc compile --quant` rounds to."""
    plain = open_source(model).checkpoint()
    name = "model.layers.1.mlp.down_proj.weight"
    weight = np.empty(plain.shape(name), np.float32)
    plain.tensor(name).read(0, weight)
    for scheme in ("fp8", "mxfp4"):
        stored = open_source(written(model, tmp_path / scheme, QuantConfig(scheme), "rtn")).checkpoint()
        found = stored.tensor(name).stored
        assert found is not None
        expected = quantize(weight, QuantConfig(scheme).layers.weight)
        assert found.format == expected.format
        out = Quantized.empty(found.format, *weight.shape)
        found.read(0, out)
        assert np.array_equal(out.numbers, expected.numbers)
        assert np.array_equal(out.scale, expected.scale)


def test_rows_that_are_no_groups_of_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", intermediate_size=80)
    report = driver.quantize_checkpoint(request_of(model, tmp_path / "out", QuantConfig("mxfp4"), "rtn"))
    (note,) = report.notes
    assert note.startswith("2 layers have rows that are not whole groups of 32: they stay as they are")
    stored = open_source(tmp_path / "out").checkpoint()
    assert stored.tensor("model.layers.0.mlp.down_proj.weight").stored is None
    assert stored.tensor("model.layers.0.mlp.up_proj.weight").stored is not None
    assert relative_error(logits(tmp_path / "out"), logits(model)) < 1


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_other_layouts_have_the_same_numbers(layout: str, model: Path, tmp_path: Path) -> None:
    plain = written(model, tmp_path / "plain", W4A16, "rtn")
    other = written(model, tmp_path / "other", W4A16, "rtn", layout=layout)
    # Scales are float16 there.
    assert 0 < relative_error(logits(other), logits(plain)) < 0.05
    settings = json.loads((other / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["bits"], settings["group_size"]) == (layout, 4, 32)


@pytest.mark.native
@pytest.mark.parametrize(
    ("quant", "kept"),
    [(W4A16, "integers"), (QuantConfig("fp8"), "fp8"), (QuantConfig("mxfp4"), "codes")],
    ids=["w4a16", "fp8", "mxfp4"],
)
def test_a_written_checkpoint_compiles(
    quant: QuantConfig, kept: str, model: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    output = written(model, tmp_path / "out", quant)
    artifact = compile_tiny(output, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype="f32")
    tokens = random_tokens(515)
    check_every_bucket(artifact, tokens, logits(output, tokens))
    weights = json.loads((tmp_path / "artifact" / "manifest.json").read_text())["weights"]
    assert weights["layers.1.mlp.down.weight"]["format"]["kind"] == kept


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq", "awq"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("opt", {"ffn_dim": 96}),
        ("gpt_bigcode", {"n_inner": 96}),
        ("gemma4_text", {**GEMMA4, "intermediate_size": 96, "head_dim": 16, "global_head_dim": 16}),
        ("gemma3n_text", {**GEMMA3N, "intermediate_size": 96, "head_dim": 16, "laurel_rank": 8}),
        ("bert", {"intermediate_size": 96, "labels": 1}),
        ("roberta", {"intermediate_size": 96}),
        ("qwen3", {"intermediate_size": 96, "head_dim": 16, "labels": 3}),
    ],
)
def test_tables_and_layers_outside_are_left_as_the_settings_say(
    family: str, sizes: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    """Tables of positions, types and token inputs, projections of all layers' inputs, and heads with labels."""
    make = make_tiny_model if "labels" not in sizes and family != "roberta" else make_encoder
    model = make(tmp_path / "model", family, **{"hidden_size": 64, "num_attention_heads": 4, **sizes})
    output = written(model, tmp_path / "out", W4A16, "rtn", layout=layout)
    plain, source = open_source(model), open_source(output)
    targets = check_checkpoint(source.config(), source.checkpoint()).targets
    stored = {p.name: p for p in load_parameters(source.config(), source.checkpoint(), "f32")}
    wanted = {p.name: p for p in load_parameters(plain.config(), plain.checkpoint(), "f32")}
    assert "layers.1.mlp.down.weight" in {name for name, one in stored.items() if one.stored is not None}
    for target in targets:
        if target.table or target.precise or not target.name.startswith("layers."):
            assert np.array_equal(stored[target.name].value(), wanted[target.name].value()), target.name


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_bytes_depend_neither_on_threads_nor_on_when_it_was_killed(
    method: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(model, tmp_path / "one", W4A16, method)
    assert_same_bytes(expected, written(model, tmp_path / "three", W4A16, method, jobs=3))
    keep = Work.keep

    def killed(self: Work, index: int, *given: Any) -> None:
        keep(self, index, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Work, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            written(model, tmp_path / "out", W4A16, method)
    assert not (tmp_path / "out").exists()
    report = driver.quantize_checkpoint(request_of(model, tmp_path / "out", W4A16, method))
    assert report.resumed == 1
    assert_same_bytes(expected, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out", "three"]


def test_a_killed_process_leaves_what_the_next_one_goes_on_with(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["quantize", str(model), "-o", str(tmp_path / "out"), "--scheme", "w4a16", "--group-size", "32", "--json",
             "--calibration", str(tmp_path / "text.txt"), "--samples", "8", "--sample-tokens", "64"]  # fmt: skip
    code = """
import os, signal, sys
from llmc.compiler.calibration import work
write = work.write_tensors
def killed(path, tensors):
    if path.name == "layer-00001.safetensors":
        path.with_name(path.name + ".partial").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, tensors)
work.write_tensors = killed
from llmc.cli.main import main
main(sys.argv[1:])
"""
    child = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True)
    assert child.returncode == -9, child.stderr
    assert main(words) == 0
    expected = written(model, tmp_path / "expected")
    assert_same_bytes(expected, tmp_path / "out")


def test_a_dry_run_writes_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", str(model), "-o", str(tmp_path / "out"), "--scheme", "w4a16", "--method", "rtn"]
    assert main([*words, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert told["output_bytes"] == pytest.approx(report["output_bytes"], rel=0.02)
    assert main([*words, "--dry-run"]) == 1
    assert f"{tmp_path / 'out'} exists; choose another -o or remove it" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "out"), "-o", str(tmp_path / "again"), *words[4:]]) == 1
    assert "is quantized already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"method": "hqq"}, "--method 'hqq' is unknown: use rtn, gptq, awq, smoothquant"),
        ({"method": "smoothquant"}, "smoothquant is for rounded activations, which w4a16 has not"),
        ({"text": None}, "--method gptq needs --calibration FILE"),
        ({"text": "a"}, "the text has less than two tokens"),
        (
            {"quant": replace(W4A16, group_size=128), "layout": "gptq"},
            "holds none of this model's layers in groups of 128",
        ),
        ({"quant": QuantConfig("w8a8"), "method": "rtn", "layout": "gptq"}, "holds no rounded activations"),
        ({"quant": QuantConfig("nf4"), "method": "rtn"}, "nvfp4, nf4 and fp4 are not written; use mxfp4"),
        ({"quant": QuantConfig("fp8"), "layout": "gptq"}, "--format gptq holds integers alone"),
        ({"quant": replace(W4A16, skip=("mlp.sideways",))}, "--skip 'mlp.sideways' is not a linear layer"),
    ],
)
def test_requests_that_make_no_sense(more: dict[str, Any], sentence: str, model: Path, tmp_path: Path) -> None:
    given = {"quant": W4A16, "method": "gptq", **more}
    with pytest.raises((CompileError, ValueError), match=sentence):
        driver.quantize_checkpoint(request_of(model, tmp_path / "out", **given))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_an_embedding_model_gives_the_same_vectors(family: str, tmp_path: Path) -> None:
    """Pooling, the longest text, and what a ranker's model card shows are in files beside the weights."""
    model = make_encoder(tmp_path / "model", family, hidden_size=64, num_attention_heads=4, intermediate_size=96)
    save_sentence_files(model, "mean_tokens", normalised=False)
    (model / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    (model / "README.md").write_text("A card.")
    output = written(model, tmp_path / "out", W4A16, "rtn")
    found, config = open_source(output).config(), open_source(model).config()
    assert config.pooled is not None
    assert config.pooled.pooling == "mean"
    assert (found.pooled, found.task) == (config.pooled, config.task)
    assert (output / "README.md").read_text() == "A card."


def test_layers_behind_the_pooling_are_not_written(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "bert")
    dense = [DenseModule(60, 8, "tanh")]
    save_sentence_files(model, "mean_tokens", normalised=True, dense=dense)
    with pytest.raises(CompileError, match=r"linear layers behind its pooling.*llmc compile --quant rounds the model"):
        written(model, tmp_path / "out", W4A16, "rtn")


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("gemma3n_text", "follows no text yet; give --method rtn without --target-kl"),
        ("gpt2", "layers of gpt2 are of a kind that llmc quantize -o does not know"),
    ],
)
def test_families_that_are_not_calibrated(family: str, sentence: str, model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "model", family, **CASES[family][1])
    (other / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    with pytest.raises(CompileError, match=sentence):
        driver.quantize_checkpoint(request_of(other, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--method", "gptq"], "--method says how to write a checkpoint; add -o OUT"),
        (["-o", "out"], "--scheme is missing"),
        (["-o", "out", "--scheme", "w5a5"], "scheme 'w5a5' is unknown"),
        (["-o", "out", "--scheme", "w4a16", "--layers"], "--layers is of the comparison"),
        (["-o", "out", "--scheme", "w4a16", "--calibration", "nowhere.txt"], "cannot read nowhere.txt"),
    ],
)
def test_options_that_do_not_fit(
    words: list[str], sentence: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), *words]) == 2
    assert sentence in capsys.readouterr().err
