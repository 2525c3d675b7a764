"""Log-likelihoods are those of torch, whatever was scored before and however contexts are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmc.models.eager import load_model
from llmc.runtime.eval.scorer import Scorer
from llmc.runtime.request_error import RequestError

from support.artifacts import TinyArtifact
from support.compiled import compile_tiny
from support.paged_reference import PagedRunner
from support.tiny_models import make_tiny_model


def test_scores_are_the_models(tiny_artifact: TinyArtifact) -> None:
    model = load_model(tiny_artifact.model)
    draw = np.random.default_rng(5)
    ids = [int(token) for token in draw.integers(3, 200, 64)]
    # Contexts that need two chunks, share all, a part or nothing with the one before, and are as long as it gets.
    pairs = [
        (ids[:40], ids[40:43]), (ids[:40], [7]), (ids[:40], ids[40:60]), (ids[:9], ids[9:12]), (ids[1:3], ids[3:40]),
        (ids[:1], ids[1:2]), (ids[:63], ids[62:]), (ids[:40], ids[40:43]),
    ]  # fmt: skip
    found = []
    with Scorer(tiny_artifact.artifact, 1) as scores_of:
        for context, continuation in pairs:
            found.append(scores_of.score(context, continuation))
            tokens = context + continuation
            scores = torch.log_softmax(PagedRunner(model).step([tokens])[0].double(), -1)[len(context) - 1 : -1]
            expected = float(scores[torch.arange(len(continuation)), torch.tensor(continuation)].sum())
            assert found[-1][0] == pytest.approx(expected, abs=1e-4)
            assert found[-1][1] is (scores.argmax(-1).tolist() == continuation)
            best = scores.argmax(-1).tolist()[:1]
            assert scores_of.score(context, best)[1]
    assert found[0] == found[-1]


def test_a_kept_state_is_reused(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That behind the last context, if the next one begins with all of it; with the bits of a context alone."""
    model = make_tiny_model(tmp_path / "model", "lfm2", layer_types=["conv", "full_attention", "conv"])
    buckets = "prefill=[1]x[32,64],decode=[1]x[64]"
    options: dict[str, Any] = {"buckets": buckets, "target": "reference", "tokenizer": "none"}
    compile_tiny(model, tmp_path / "out", kernel_cache, **options).close()
    chunk, starts = Scorer._chunk, list[int]()

    def run(self: Scorer, tokens: Sequence[int], start: int, sampled: bool) -> tuple[int, npt.NDArray[np.float32]]:
        starts.append(start)
        return chunk(self, tokens, start, sampled)

    monkeypatch.setattr(Scorer, "_chunk", run)
    ids = [int(token) for token in np.random.default_rng(5).integers(3, 200, 64)]
    # (context, continuation, where it begins): the same one again, a longer one, a shorter one, one that parts, and two
    # of a single token, behind which nothing is kept.
    cases = [
        (ids[:40], ids[40:43], 0), (ids[:40], [7], 39), (ids[:45], ids[45:], 39), (ids[:41], [7], 0),
        ([*ids[:20], 9, 9], [7], 0), (ids[:1], ids[1:9], 0), (ids[:30], ids[30:33], 0), (ids[:1], [7], 0),
        (ids[:30], ids[30:33], 0),
    ]  # fmt: skip
    with Scorer(tmp_path / "out", 1) as scores_of:
        for context, continuation, start in cases:
            starts.clear()
            found = scores_of.score(context, continuation)
            assert starts[0] == start
            with Scorer(tmp_path / "out", 1) as alone:
                assert alone.score(context, continuation) == found


def test_requests_that_make_no_sense(tiny_artifact: TinyArtifact) -> None:
    with Scorer(tiny_artifact.artifact, 1) as scores_of:
        with pytest.raises(RequestError, match="a context of at least one token"):
            scores_of.score([], [3])
        with pytest.raises(RequestError, match="65 tokens are more than the 64"):
            scores_of.score([5] * 64, [3, 4])
        assert scores_of.score([5], []) == (0.0, True)
