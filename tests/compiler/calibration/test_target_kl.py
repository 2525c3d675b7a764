"""`llmc quantize --target-kl`: what is written keeps to the target, as measured here by other means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from llmc.cli.main import main
from llmc.compiler.calibration import driver
from llmc.compiler.calibration.recipe import search
from llmc.compiler.calibration.recipe.sensitivity import measure
from llmc.compiler.calibration.request import CalibrationConfig, CalibrationReport
from llmc.compiler.calibration.task import Task
from llmc.compiler.calibration.work import Work
from llmc.compiler.config import CompileError
from llmc.models.eager import load_model
from llmc.models.sources.registry import open_source
from llmc.quantize import QuantConfig

from support.compiled import assert_same_bytes, check_every_bucket, compile_tiny, random_tokens
from support.paged_reference import PagedRunner
from support.tiny_models import make_tiny_model

TEXT = "It was a truth which nobody cared to deny, that a walk before dinner does no harm at all. " * 12
TARGET = 0.01


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "model"
    make_tiny_model(
        folder, "llama", num_hidden_layers=2, hidden_size=128, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    tokenizer = Tokenizer(BPE({char: index for index, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def request_of(model: Path, output: Path, **more: Any) -> CalibrationConfig:
    given: dict[str, Any] = {"text": TEXT, "samples": 12, "sample_tokens": 64, "jobs": 1, "target_kl": TARGET, **more}
    return CalibrationConfig(
        model, output, given.pop("quant", QuantConfig("w4a16")), given.pop("method", "gptq"), **given
    )


def quantized(model: Path, output: Path, **more: Any) -> CalibrationReport:
    return driver.quantize_checkpoint(request_of(model, output, **more))


def divergence(config: CalibrationConfig) -> float:
    """Of the written checkpoint on the windows that are held out, each run by itself."""
    task = Task(replace(config, output=config.output.with_name("none")))
    found = []
    for window in task.windows[-task.held_out :]:
        ours, theirs = (
            torch.log_softmax(PagedRunner(load_model(at)).step([window.tolist()])[0].double(), -1)
            for at in (config.output, config.model)
        )
        found.append((theirs.exp() * (theirs - ours)).sum(-1))
    return float(torch.cat(found).mean())


def test_the_model_keeps_to_the_target(model: Path, tmp_path: Path) -> None:
    config = request_of(model, tmp_path / "out")
    report = driver.quantize_checkpoint(config)
    recipe = report.recipe
    assert recipe is not None
    assert recipe.kl == pytest.approx(divergence(config), rel=1e-3)
    assert 0 < recipe.kl <= TARGET
    assert recipe.tries[-1] == (recipe.chosen.predicted_kl, recipe.kl)
    assert recipe.measured_tokens == 3 * 64
    assert [point.nbytes for point in recipe.curve] == sorted(point.nbytes for point in recipe.curve)
    assert recipe.chosen in recipe.curve
    smaller = [point for point in recipe.curve if point.nbytes < recipe.chosen.nbytes]
    assert smaller
    assert all(point.predicted_kl > recipe.tries[0][0] for point in smaller)


def test_a_mixed_recipe_is_stored_as_it_says(model: Path, tmp_path: Path) -> None:
    recipe = quantized(model, tmp_path / "out").recipe
    assert recipe is not None
    assert len(set(recipe.layers.values())) > 2
    checkpoint = open_source(tmp_path / "out").checkpoint()
    nbytes = 0
    for prefix, described in recipe.layers.items():
        stored = checkpoint.tensor(f"{prefix}.weight").stored
        if stored is None:
            assert described == "none"
            nbytes += 4 * int(np.prod(checkpoint.shape(f"{prefix}.weight")))
        else:
            assert described == f"{stored.format.bits} bits, {stored.format.describe()}"
            n, k = checkpoint.shape(f"{prefix}.weight")
            nbytes += int(n * k * stored.format.bits_per_weight(k)) // 8
    assert nbytes == recipe.chosen.nbytes


@pytest.mark.native
def test_a_mixed_recipe_compiles(model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    quantized(model, tmp_path / "out")
    tokens = random_tokens(515)
    artifact = compile_tiny(
        tmp_path / "out", tmp_path / "artifact", kernel_cache, buckets="prefill=[4]x[12],decode=[4]x[64]", dtype="f32"
    )
    check_every_bucket(artifact, tokens, PagedRunner(load_model(tmp_path / "out")).step([tokens])[0].numpy())


def test_a_recipe_that_misses_is_followed_by_a_stricter_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hopeful(*given: Any) -> Any:
        reference, choices = measure(*given)
        return reference, [replace(choice, costs=tuple(cost / 8 for cost in choice.costs)) for choice in choices]

    honest = quantized(model, tmp_path / "honest").recipe
    monkeypatch.setattr(search, "measure", hopeful)
    config = request_of(model, tmp_path / "out")
    recipe = driver.quantize_checkpoint(config).recipe
    assert recipe is not None
    assert honest is not None
    assert len(recipe.tries) > len(honest.tries)
    assert all(kl > TARGET for _, kl in recipe.tries[:-1])
    predicted = [of for of, _ in recipe.tries]
    assert predicted == sorted(predicted, reverse=True)
    assert recipe.kl == pytest.approx(divergence(config), rel=1e-3)
    assert recipe.kl <= TARGET


def test_the_bytes_depend_neither_on_threads_nor_on_when_it_was_killed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized(model, tmp_path / "one")
    quantized(model, tmp_path / "three", jobs=3)
    assert_same_bytes(tmp_path / "one", tmp_path / "three")
    keep, calls = Work.keep, 0

    def killed(self: Work, index: int, *given: Any) -> None:
        nonlocal calls
        keep(self, index, *given)
        calls += 1
        if calls in (1, 3):  # while measuring, and in the first recipe
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Work, "keep", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                quantized(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert quantized(model, tmp_path / "out").resumed == 2
    assert_same_bytes(tmp_path / "one", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out", "three"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"target_kl": 0.0}, "--target-kl 0.0 is not a divergence"),
        ({"target_kl": 1e-12}, "--target-kl 1e-12 leaves no layer to quantize"),
        ({"text": None}, "--target-kl needs --calibration FILE"),
        ({"method": "awq"}, "--target-kl goes with --method rtn or gptq"),
        ({"layout": "gptq"}, "--target-kl goes with --method rtn or gptq and --format compressed-tensors"),
    ],
)
def test_requests_that_make_no_sense(more: dict[str, Any], sentence: str, model: Path, tmp_path: Path) -> None:
    given = {"method": "rtn", **more}
    with pytest.raises(CompileError, match=sentence):
        quantized(model, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_the_command_tells_the_curve(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    text = str(tmp_path / "text.txt")
    words = ["quantize", str(model), "--target-kl", "0.2", "--calibration", text, "--method", "rtn",
             "--samples", "4", "--sample-tokens", "32", "--group-size", "32", "--skip", "mlp.down"]  # fmt: skip
    assert main([*words, "-o", str(tmp_path / "one"), "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["kl"] <= 0.2
    assert {format for prefix, format in recipe["layers"].items() if "down_proj" in prefix} == {"none"}
    assert set(recipe["layers"].values()) <= {"none", "4 bits, symmetric groups of 32", "8 bits, symmetric channels"}
    assert main([*words, "-o", str(tmp_path / "two")]) == 0
    said = capsys.readouterr().out
    assert f"KL {recipe['kl']:.6f} of at most 0.2 on 32 tokens" in said
    assert f"{recipe['chosen']['bits_per_weight']:.2f}" in said
    assert main([*words, "-o", str(tmp_path / "three"), "--scheme", "w8a16"]) == 2
    assert "--target-kl chooses the bits of each layer itself" in capsys.readouterr().err
    assert main([*words, "-o", str(tmp_path / "three"), "--dry-run"]) == 1
    assert "--dry-run does not know what --target-kl takes" in capsys.readouterr().err
