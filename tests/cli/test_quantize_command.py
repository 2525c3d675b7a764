"""`llmc quantize`: sizes, errors, and perplexity against torch."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.cli.main import main
from llmc.models.eager import load_model
from llmc.quantize import SCHEMES, WeightFormat
from llmc.quantize.error import weight_error
from llmc.quantize.formats.integers import Integers
from llmc.quantize.rtn import quantize
from llmc.runtime.eval.windows import windows
from llmc.runtime.text.tokenizer import Tokenizer

from support.paged_reference import PagedRunner
from support.paths import ROOT
from support.quantized_checkpoints import make_gptq_model

MODEL = ROOT / "examples" / "tiny-english"
TEXT = "It was a truth which nobody at Longbourn cared to deny, that a walk before dinner does no harm. " * 3


def results(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert main(["quantize", str(MODEL), "--json", *arguments]) == 0
    return {found["scheme"]: found for found in json.loads(capsys.readouterr().out)}


def test_sizes_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(capsys, "--group-size", "32", "--skip", "mlp.down")
    assert list(found) == ["none", *SCHEMES]
    assert found["none"]["bits_per_weight"] == 16
    assert found["none"]["error"] == 0
    for name, bits, error in (("w8a8", 8, 0.01), ("w4a8", 4, 0.12)):
        layers = found[name]["layers"]
        assert isinstance(layers, list)
        assert all(0 < layer["error"] < error for layer in layers)
        assert "layers.0.mlp.down.weight" not in {layer["name"] for layer in layers}
        assert {layer["scheme"] for layer in layers if layer["name"] == "embed.weight"} == {"w8a8"}
        size = found[name]["bits_per_weight"]
        assert isinstance(size, float)
        assert bits < size < 16
        assert found[name]["perplexity"] is None
    assert found["w4a8"]["groups"] == found["w4a16"]["groups"]
    assert "32" in str(found["w4a8"]["groups"])


def test_perplexity_is_that_of_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kernel_cache: Path
) -> None:
    sample = tmp_path / "sample.txt"
    sample.write_text(TEXT)
    options = ["--text", str(sample), "--window", "32", "--dtype", "f32", "--cache-dir", str(kernel_cache)]
    found = results(capsys, "--schemes", "none,w8a8", *options)
    tokenizer, model = Tokenizer(MODEL), load_model(MODEL)
    first = tokenizer.encode("")
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(tokens) > 64
    losses = []
    for window in windows(tokens, 32 - len(first), None):
        ids = first + window
        scores = torch.log_softmax(PagedRunner(model).step([ids])[0].double(), -1)
        losses += [-float(scores[i, token]) for i, token in enumerate(ids[1:])]
    expected = math.exp(np.mean(losses))
    assert found["none"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert found["w8a8"]["perplexity"] == pytest.approx(expected, rel=0.05)
    assert found["w8a8"]["perplexity"] != found["none"]["perplexity"]


@pytest.mark.slow
def test_the_commands_of_the_documentation_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kernel_cache: Path
) -> None:
    lines = (MODEL.parent.parent / "docs" / "quantization.md").read_text().splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("    llmc ")]
    assert {command[0] for command in commands} == {"compile", "inspect", "quantize"}
    for name in ("held-out.txt", "text.txt"):
        (tmp_path / name).write_text(TEXT)
    layers = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
    scales = {str(layer): 0.02 for layer in range(layers)}
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": scales}}
    (tmp_path / "kv_cache_scales.json").write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
    places = {
        "examples/tiny-english": str(MODEL),
        "held-out.txt": str(tmp_path / "held-out.txt"),
        "text.txt": str(tmp_path / "text.txt"),
        "ORG/MODEL-GPTQ-Int4": str(make_gptq_model(tmp_path / "gptq")),
        "kv_cache_scales.json": str(tmp_path / "kv_cache_scales.json"),
        "model.llmc": str(tmp_path / "kept"),
    }
    for command in commands:
        arguments = [
            str(tmp_path / argument) if argument.startswith("out/") else places.get(argument, argument)
            for argument in command
        ]
        if command[0] == "compile":
            arguments += ["--buckets", "prefill=[1]x[16],decode=[1]x[64]", "--cache-dir", str(kernel_cache)]
            arguments += ["--no-tokenizer"] if "ORG/" in command[1] else []
        elif "--text" in command:
            arguments += ["--schemes", "none", "--cache-dir", str(kernel_cache)]
        assert main(arguments) == 0, command
    assert "w4a8" in capsys.readouterr().out


def test_windows() -> None:
    assert windows(range(7), 3, None) == [[0, 1, 2], [3, 4, 5]]
    assert windows(range(7), 3, 5) == [[0, 1, 2], [3, 4]]


def test_the_error_of_a_weight_does_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((37, 50)).astype(np.float32)
    format = Integers(4, 32, True)

    def read(first: int, out: np.ndarray) -> None:
        np.copyto(out, weight[first : first + len(out)])

    change = quantize(weight, format).value() - weight
    expected = math.sqrt((change**2).sum() / (weight.astype(np.float64) ** 2).sum())
    for piece in (1, 200, 1 << 20):
        monkeypatch.setattr("llmc.quantize.error._PIECE", piece)
        assert weight_error(weight.shape, read, format).relative == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("format", [Integers(8), Integers(4, 32), Integers(4, 32, True), Integers(4)])
def test_rounding_is_to_the_nearest_number(format: WeightFormat) -> None:
    weight = np.random.default_rng(0).standard_normal((5, 77)).astype(np.float32)
    weight[2] = 0
    weight[3, :40] = np.abs(weight[3, :40])
    found = quantize(weight, format)
    group = np.zeros(77, int) if format.group_size == -1 else np.arange(77) // 32
    step = np.abs(found.scale)[:, group]
    change = np.abs(found.value() - weight)
    # Half a step. Where the range has no number for a value's sign, the last one is up to one step away.
    limit = 0.5001 if format.bits == 8 else 1.0001
    assert (change <= limit * step).all()
    assert np.median(change / np.maximum(step, 1e-30)) < 0.3
    assert (found.value()[2] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--schemes", "w5a5"], "--schemes names 'w5a5', which is unknown: use none, w8a16"),
        (["--schemes", ","], "--schemes is empty"),
        (["--text", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--group-size", "7"], "group size 7 is not one of"),
    ],
)
def test_requests_that_make_no_sense(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(MODEL), *arguments]) == 2
    assert sentence in capsys.readouterr().err
