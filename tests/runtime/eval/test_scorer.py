"""Log-likelihoods are those of torch, whatever was scored before and however contexts are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmc.models.eager import load_model
from llmc.runtime.eval import scorer
from llmc.runtime.eval.scorer import Scorer
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.request_error import RequestError

from support.artifacts import TinyArtifact
from support.paged_reference import PagedRunner


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


def test_states_are_reused_where_a_block_ends(tiny_artifact: TinyArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = replace(read_graphs(tiny_artifact.artifact), state_layers=(0,))
    monkeypatch.setattr(scorer, "read_graphs", lambda path: tables)
    chunk, starts = Scorer._chunk, list[int]()

    def run(self: Scorer, tokens: Sequence[int], start: int, sampled: bool) -> tuple[int, npt.NDArray[np.float32]]:
        starts.append(start)
        return chunk(self, tokens, start, sampled)

    monkeypatch.setattr(Scorer, "_chunk", run)
    size, ids = tables.model.block_size, [int(token) for token in np.random.default_rng(5).integers(3, 200, 64)]
    with Scorer(tiny_artifact.artifact, 1) as states:
        for common in (1, size - 1, size, size + 1, 2 * size - 1):
            states.score(ids[:-1], ids[-1:])
            starts.clear()
            states.score([*ids[:common], *(3 + token for token in ids[common : 2 * size + 5])], [7])
            assert starts[0] == common // size * size


def test_requests_that_make_no_sense(tiny_artifact: TinyArtifact) -> None:
    with Scorer(tiny_artifact.artifact, 1) as scores_of:
        with pytest.raises(RequestError, match="a context of at least one token"):
            scores_of.score([], [3])
        with pytest.raises(RequestError, match="65 tokens are more than the 64"):
            scores_of.score([5] * 64, [3, 4])
        assert scores_of.score([5], []) == (0.0, True)
