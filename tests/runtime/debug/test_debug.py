"""llmc debug: what commands write is what the runtime computes, and the first difference of two artifacts is named."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmc.cli.main import main
from llmc.compiler.targets.reference.backend import named
from llmc.models import registry
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.debug.diff import diff_artifacts
from llmc.runtime.debug.replay import CommandReplay, DebugError
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, compile_tiny, random_tokens, replay
from support.paths import ROOT
from support.quantized_model import REQUESTS, make_model
from support.quirky_model import Quirky, checkpoint, family
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
needs_reference = pytest.mark.skipif(
    not named("reference").runs_here(), reason="the reference target's code is of another architecture"
)
LADDER = "prefill=[1]x[32],decode=[1]x[64]"
WIDE_LADDER = "prefill=[4]x[32],decode=[4]x[64]"
TEXT = [5, 9, 200, 31, 7, 7, 88, 140, 3, 60, 61]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("debug") / "model", "qwen2")


@pytest.fixture(scope="module")
def artifact(model: Path, kernel_cache: Path) -> Path:
    compile_tiny(model, model.parent / "artifact", kernel_cache, buckets=LADDER, dtype="bf16")
    return model.parent / "artifact"


def test_commands_write_what_the_runtime_computes(artifact: Path) -> None:
    opened = Artifact(artifact)
    replayer, pages = Replayer(opened, num_threads=2, num_blocks=8), Pages(8, opened.info.block_size)
    commands = CommandReplay(artifact, len(TEXT) + 1)
    for graph, tokens, start in ((0, TEXT, 0), (1, [17], len(TEXT))):
        _, values = commands.step(tokens)
        expected = replay(replayer, graph, pages, [(0, tokens, start)])
        assert (list(values)[-1].array == expected).all()


def test_an_artifact_is_as_itself(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ",".join(map(str, TEXT))
    assert main(["debug", "diff", str(artifact), str(artifact), "--ids", ids, "--bound", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tables = read_graphs(artifact)
    assert len(found["tensors"]) == tables.graphs[0].num_commands
    assert found["same"] is True
    assert {tensor["max_error"] for tensor in found["tensors"]} == {0.0}
    assert [tensor["a"] for tensor in found["tensors"]] == list(range(tables.graphs[0].num_commands))


def test_another_ladder_changes_no_bit(model: Path, artifact: Path, kernel_cache: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "wide", kernel_cache, buckets=WIDE_LADDER, dtype="bf16")
    for step in (0, 2):
        found = diff_artifacts(artifact, tmp_path / "wide", TEXT, step)
        assert found.graphs[0] != found.graphs[1]
        assert found.first(0.0) is None
        assert not found.only_a + found.only_b


@needs_reference
@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2e-2), ("f16", 2.5e-3)])
def test_the_reference_target_agrees(dtype: str, bound: float, model: Path, kernel_cache: Path, tmp_path: Path) -> None:
    for target in ("reference", "native"):
        compile_tiny(model, tmp_path / target, kernel_cache, buckets=LADDER, dtype=dtype, target=target)
    for step in (0, 1, 5):
        found = diff_artifacts(tmp_path / "reference", tmp_path / "native", TEXT, step)
        assert found.first(bound) is None
        assert not found.only_a + found.only_b


@needs_reference
@pytest.mark.parametrize("name", list(REQUESTS))
def test_quantized_layers_agree(name: str, kernel_cache: Path, tmp_path: Path) -> None:
    made = make_model(tmp_path / "model", name)
    for target in ("reference", "native"):
        compile_tiny(
            made, tmp_path / target, kernel_cache, buckets=LADDER, dtype="f32", quant=REQUESTS[name], target=target
        )
    found = diff_artifacts(tmp_path / "reference", tmp_path / "native", TEXT)
    # Int8 activations that lie between two numbers may round either way.
    assert found.first(2e-2 if "a8" in name else 1e-4) is None
    assert not found.only_a + found.only_b


@needs_reference
def test_generic_ops_agree(tmp_path: Path, quirky_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "quirky", family(Quirky))
    made = checkpoint(tmp_path / "model")
    for target in ("reference", "native"):
        compile_tiny(made, tmp_path / target, quirky_cache, buckets=LADDER, dtype="f32", target=target)
    found = diff_artifacts(tmp_path / "reference", tmp_path / "native", TEXT)
    assert found.first(1e-4) is None
    assert any(tensor.op == "fused" for tensor in found.tensors)


def test_the_first_tensor_that_differs_is_named(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(artifact, damaged)
    weight = next(w for w in read_graphs(artifact).weights if w.name == "layers.1.mlp.down.weight")
    with (damaged / "weights.safetensors").open("r+b") as file:
        file.seek(weight.file_offset)
        file.write(bytes(weight.bytes))
    ids = ",".join(map(str, TEXT))
    assert main(["debug", "diff", str(artifact), str(damaged), "--ids", ids, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["first"]["name"], found["first"]["op"]) == ("layers.1.mlp.down", "linear")
    row, column = found["first"]["most"]["index"]
    assert 0 <= row < len(TEXT)
    assert column < found["first"]["shape"][1]
    assert found["first"]["max_error"] == pytest.approx(abs(found["first"]["most"]["a"] - found["first"]["most"]["b"]))
    assert main(["debug", "diff", str(artifact), str(damaged), "--ids", ids]) == 1
    shown = capsys.readouterr().out
    assert "first difference: command" in shown
    assert "tensor layers.1.mlp.down, element [" in shown
    # A wide bound lets it pass, and so does a narrow one what lies before it.
    assert main(["debug", "diff", str(artifact), str(damaged), "--ids", ids, "--bound", "1e9"]) == 0


def test_a_dump_holds_every_tensor(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids, output = ",".join(map(str, TEXT)), tmp_path / "tensors"
    assert main(["debug", "dump", str(artifact), "--ids", ids, "-o", str(output)]) == 0
    index = json.loads((output / "index.json").read_text())
    assert index["tokens"] == TEXT
    _, values = CommandReplay(artifact, len(TEXT)).step(TEXT)
    for entry, value in zip(index["tensors"], values, strict=True):
        array = np.load(output / entry["file"])
        assert array.dtype == np.float32
        assert (array == value.array).all()
        assert (entry["name"], entry["shape"]) == (value.name, list(value.array.shape))
    assert main(["debug", "dump", str(artifact), "--ids", ids, "-o", str(output)]) == 2
    assert "not empty" in capsys.readouterr().err
    some = tmp_path / "some"
    assert (
        main(["debug", "dump", str(artifact), "--ids", ids, "--step", "1", "--only", "mlp.down", "-o", str(some)]) == 0
    )
    index = json.loads((some / "index.json").read_text())
    assert {entry["name"] for entry in index["tensors"]} == {
        f"layers.{i}.mlp.down" for i in range(len(index["tensors"]))
    }
    assert len(index["tokens"]) == 1


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--ids", "1,two"], 2, "--ids '1,two' is not a list of token ids"),
        ([], 2, "give either --prompt or --ids"),
        (["--ids", "1", "--prompt", "x"], 2, "give either --prompt or --ids"),
        (["--ids", "1,99999"], 1, "token 99999 is outside the vocabulary: give ids below"),
        (["--ids", ",".join(["1"] * 40)], 1, "has no graph for 40 new tokens at once, at most 32"),
        (["--ids", ",".join(["1"] * 100)], 1, "tokens are more than the 64"),
        (["--prompt", "x"], 2, "has no tokenizer: give --ids"),
    ],
)
def test_what_cannot_be_run_is_said(
    argv: list[str], code: int, said: str, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(artifact, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert main(["debug", "diff", str(bare), str(bare), *argv]) == code
    assert said in capsys.readouterr().err


def test_two_models_are_not_compared(artifact: Path, kernel_cache: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", "llama", vocab_size=300)
    compile_tiny(other, tmp_path / "out", kernel_cache, buckets=LADDER)
    with pytest.raises(DebugError, match="not of one model"):
        diff_artifacts(artifact, tmp_path / "out", random_tokens(200, 5))


@pytest.mark.slow
@needs_reference
@pytest.mark.parametrize("page", ["debugging.md", "adding-a-target.md"])
def test_commands_of_the_pages_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path
) -> None:
    root = ROOT
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(kernel_cache))
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", (root / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        # Three greedy tokens on, bf16 has drifted further than the narrow bound of the example.
        expected = (0, 1) if "--bound 0.01" in line else (0,)
        assert main(shlex.split(line)[1:]) in expected, line
