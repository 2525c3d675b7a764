"""The script that trains the example model: what it exports is what it trained."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_example_model")


def test_transformers_reads_the_export_as_the_model_that_was_trained(script: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = script.Llama()
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape).mul(0.1).bfloat16().float()
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "tiny-english" / "tokenizer.json"))
    script.export(model, tokenizer, tmp_path)
    stream = torch.randint(script.VOCAB, (2 * script.CONTEXT + 1,))
    rows = stream.unfold(0, script.CONTEXT + 1, script.CONTEXT)
    assert script.held_out_loss(tmp_path, stream) == pytest.approx(model(rows).item(), rel=1e-5)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((EXAMPLES / "tiny-english" / name).read_text())


@pytest.mark.parametrize("shape", [(3, 2, 512, 192), (20, 64, 192)])
def test_steps_are_nearly_orthogonal(script: ModuleType, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.linspace(0.3, 1, min(shape[-2:]))
    update = script.Muon.orthogonal(left * values @ right)
    torch.testing.assert_close(update, left @ right, atol=0.1, rtol=0)
    assert (torch.linalg.svdvals(update) - 1).abs().max() < 0.11


def test_training_learns_and_repeats(script: ModuleType) -> None:
    stream = torch.arange(1, 5).repeat(1000)
    models = [script.train(stream, 12_000, seed=3) for _ in range(2)]
    assert models[0](stream[None, :65]).item() < 4  # ln 2048 = 7.6 before
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
