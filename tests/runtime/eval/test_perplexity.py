"""`llmc eval perplexity`, against torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.cli.main import main
from llmc.models.eager import load_model
from llmc.runtime.eval.windows import mean_and_error, text_windows, window_length, windows
from llmc.runtime.request_error import RequestError
from llmc.runtime.text.tokenizer import Tokenizer

from support.artifacts import TinyArtifact
from support.paged_reference import PagedRunner


def test_the_perplexity_is_the_models(
    chat_artifact: Path, tiny_artifact: TinyArtifact, sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "perplexity", str(chat_artifact), "--text", str(sample), "--window", "40"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model, losses = load_model(tiny_artifact.model), []
    for window in text_windows(Tokenizer(chat_artifact), sample.read_text(), 40, None):
        scores = torch.log_softmax(PagedRunner(model).step([window])[0].double(), -1)
        losses += [-float(scores[i, token]) for i, token in enumerate(window[1:])]
    assert (found["tokens"], found["windows"], found["window"]) == (len(losses), 3, 40)
    expected = math.exp(np.mean(losses))
    assert found["perplexity"] == pytest.approx(expected, rel=1e-4)
    error = expected * np.std(losses, ddof=1) / math.sqrt(len(losses))
    assert found["standard_error"] == pytest.approx(error, rel=1e-3)
    assert found["tokens_per_s"] > 0
    assert main([*command, "--tokens", "50"]) == 0
    assert "48 tokens predicted in 2 windows of 40" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--window", "64"], "a window of 64 tokens does not fit: the artifact holds 63 at most"),
        (["--tokens", "1"], "1 is not in the range"),
        (["--text", "nowhere.txt"], "cannot read nowhere.txt"),
    ],
)
def test_requests_that_make_no_sense(
    arguments: list[str], sentence: str, chat_artifact: Path, sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "perplexity", str(chat_artifact), "--text", str(sample), *arguments]
    assert main(command) in (1, 2)
    assert sentence in capsys.readouterr().err


def test_windows() -> None:
    assert windows(range(7), 3, None) == [[0, 1, 2], [3, 4, 5]]
    assert windows(range(7), 3, 5) == [[0, 1, 2], [3, 4]]
    assert window_length(None, 4096) == 512
    assert window_length(None, 64) == 63
    with pytest.raises(RequestError, match="holds 63 at most"):
        window_length(64, 64)


def test_a_text_of_one_token_predicts_nothing(chat_artifact: Path) -> None:
    with pytest.raises(RequestError, match="nothing to predict"):
        text_windows(Tokenizer(chat_artifact), "a", 8, None)


def test_the_error_of_a_mean() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, 1 / math.sqrt(3)))
    assert mean_and_error([4.0]) == (4.0, 0.0)
