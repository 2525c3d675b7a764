"""`llmc eval kl`: the logits of a step are the engine's, and the numbers those of torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.cli.main import main
from llmc.runtime.eval.lockstep import Lockstep
from llmc.runtime.eval.windows import text_windows
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.text.tokenizer import Tokenizer

from support.artifacts import TinyArtifact


def logits(artifact: Path, windows: list[list[int]]) -> list[np.ndarray]:
    """Of each window, which have one length."""
    with Lockstep(artifact, len(windows[0]), len(windows), 1) as lockstep:
        steps = [lockstep.step(at, [w[at] for w in windows]) for at in range(len(windows[0]))]
    return list(np.stack(steps, axis=1))


def test_logits_are_those_of_the_engine(changed_artifact: Path, sample: Path) -> None:
    # Four windows, where a graph holds two.
    windows = text_windows(Tokenizer(changed_artifact), sample.read_text(), 24, None)
    assert [len(window) for window in windows] == [24] * 4
    with LLM(changed_artifact, num_threads=1) as llm:
        outputs = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=20))
    for found, output in zip(logits(changed_artifact, windows), outputs, strict=True):
        scores = torch.log_softmax(torch.from_numpy(found).double(), -1)
        for at, entry in enumerate(output.prompt_logprobs or ()):
            assert len(entry.top) == 20
            for token, logprob in {**entry.top, entry.token_id: entry.logprob}.items():
                assert float(scores[at, token]) == pytest.approx(logprob, abs=1e-5)


def test_the_divergence_is_that_of_torch(
    chat_artifact: Path, changed_artifact: Path, sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "kl", str(changed_artifact), "--against", str(chat_artifact), "--text", str(sample)]
    assert main([*command, "--window", "40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kl, same, losses = [], [], []
    for window in text_windows(Tokenizer(chat_artifact), sample.read_text(), 40, None):
        p, q = (
            torch.log_softmax(torch.from_numpy(logits(path, [window])[0][:-1]).double(), -1)
            for path in (chat_artifact, changed_artifact)
        )
        kl += torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        losses += (-q[torch.arange(len(window) - 1), torch.tensor(window[1:])]).tolist()
    assert found["tokens"] == len(kl) == 93
    assert found["kl_mean"] == pytest.approx(np.mean(kl), rel=1e-9)
    assert found["kl_mean"] > 0
    assert found["kl_max"] == pytest.approx(max(kl), rel=1e-9)
    assert found["kl_quantile_999"] == pytest.approx(np.quantile(kl, 0.999), rel=1e-9)
    assert found["top1_agreement"] == pytest.approx(np.mean(same))
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-9)
    assert main([*command, "--tokens", "50"]) == 0
    assert "49 tokens in 1 windows of 63" in capsys.readouterr().out


def test_a_model_is_compiled_in_f32_as_the_reference(
    chat_artifact: Path, tiny_artifact: TinyArtifact, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "kl", str(chat_artifact), "--text", str(sample), "--tokens", "30", "--json"]
    compiled: list[tuple[object, ...]] = []

    def cached(model: Path, progress: object, source: object, dtype: str, cache_dir: Path) -> Path:
        compiled.append((model, source, dtype, cache_dir))
        return chat_artifact

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmc.compiler.pipeline.compile_cached", cached)
        assert main([*command, "--reference", str(tiny_artifact.model), "--cache-dir", str(tmp_path)]) == 0
    assert compiled == [(tiny_artifact.model, None, "f32", tmp_path)]
    found = json.loads(capsys.readouterr().out)
    # Against itself.
    assert (found["kl_mean"], found["kl_max"], found["top1_agreement"]) == (0, 0, 1)
    assert found["perplexity"] == found["reference_perplexity"]


def test_requests_that_make_no_sense(
    chat_artifact: Path, english_tokenizer: Path, sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "kl", str(chat_artifact), "--text", str(sample)]
    assert main(command) == 2
    assert "give either --against ARTIFACT or --reference MODEL" in capsys.readouterr().err
    assert main([*command, "--against", str(english_tokenizer)]) == 1
    assert "read the text as different tokens" in capsys.readouterr().err
