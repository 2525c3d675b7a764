"""Beam search gives what transformers' gives, and best_of the likeliest continuations, whatever runs beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmc.runtime.beams import BeamSearchParams
from llmc.runtime.binding import Artifact
from llmc.runtime.llm import LLM
from llmc.runtime.outputs import RequestOutput
from llmc.runtime.params import EarlyStopping, SamplingParams
from llmc.runtime.request_error import RequestError

from support.engine_driver import random_ids

MAX_TOKENS = 10
PAD = 1  # transformers has 0 for none
PROMPT = random_ids(5, 21)
Told = list[tuple[tuple[int, ...], float]]


def artifact_of(llama: tuple[Path, Artifact]) -> Path:
    return llama[0].parent / "artifact"


@pytest.fixture(scope="module")
def model(llama: tuple[Path, Artifact]) -> Path:
    return llama[0]


@pytest.fixture(scope="module")
def llm(llama: tuple[Path, Artifact]) -> Iterator[LLM]:
    with LLM(artifact_of(llama), num_threads=1, num_blocks=64) as llm:
        yield llm


def told(output: RequestOutput) -> Told:
    return [(one.token_ids, one.cumulative_logprob or 0.0) for one in output.outputs]


@pytest.fixture(scope="module")
def stop_ids(llm: LLM) -> tuple[int, ...]:
    """Tokens that beams meet early, so that some end and others go on."""
    plain = llm.beam_search(PROMPT, BeamSearchParams(4, MAX_TOKENS, ignore_eos=True))[0]
    return tuple(sorted({one.token_ids[place] for one, place in zip(plain.outputs, (2, 3, 5), strict=False)}))


@pytest.mark.parametrize(
    ("width", "penalty", "early"),
    [(4, 1.0, False), (3, -0.5, True), (3, 0.0, False), (5, 0.5, "never"), (1, 1.0, False)],
)
def test_beams_are_those_of_transformers(
    llm: LLM, model: Path, stop_ids: tuple[int, ...], width: int, penalty: float, early: EarlyStopping
) -> None:
    from transformers import AutoModelForCausalLM

    params = BeamSearchParams(
        width, MAX_TOKENS, ignore_eos=True, length_penalty=penalty, early_stopping=early, stop_token_ids=stop_ids
    )
    found = told(llm.beam_search(PROMPT, params)[0])
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answer = reference.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        length_penalty=penalty,
        early_stopping=early,
        eos_token_id=list(stop_ids),
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [row[len(PROMPT) :].tolist() for row in answer.sequences]
    assert [list(ids) for ids, _ in found] == [row[: len(ids)] for row, (ids, _) in zip(rows, found, strict=True)]
    for (ids, _), row in zip(found, rows, strict=True):
        assert ids[-1] in stop_ids or len(ids) == MAX_TOKENS
        assert all(token == PAD for token in row[len(ids) :])
    if width > 1:
        assert any(ids[-1] in stop_ids for ids, _ in found)
        scores = [score / len(ids) ** penalty for ids, score in found]
        assert scores == pytest.approx(answer.sequences_scores.tolist(), abs=1e-4)


def test_bits_do_not_depend_on_company(llm: LLM, llama: tuple[Path, Artifact], stop_ids: tuple[int, ...]) -> None:
    """A pool and seats that are too few for all beams, others beside them."""
    beams = [
        BeamSearchParams(width, MAX_TOKENS, ignore_eos=True, stop_token_ids=stop_ids).sampling() for width in (4, 6)
    ]
    params = [*beams, SamplingParams(max_tokens=12, seed=3, n=2, best_of=4, logprobs=2), SamplingParams(max_tokens=20)]
    prompts = [PROMPT, random_ids(8, 33), PROMPT, random_ids(9, 40)]
    alone = [told(llm.generate(prompt, one)[0]) for prompt, one in zip(prompts[:3], params, strict=False)]
    with LLM(artifact_of(llama), num_threads=2, num_blocks=12, max_num_seqs=3) as crowded:
        together = crowded.generate(prompts, params)
        stats = crowded.stats()
    assert [told(output) for output in together[:3]] == alone
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_best_of_tells_the_likeliest(llm: LLM) -> None:
    drawn = llm.generate(PROMPT, SamplingParams(n=6, max_tokens=8, seed=11, logprobs=0))[0]
    likeliest = sorted(told(drawn), key=lambda one: -one[1])[:2]
    best = llm.generate(PROMPT, SamplingParams(n=2, best_of=6, max_tokens=8, seed=11, logprobs=0))[0]
    assert told(best) == likeliest
    assert best.usage.completion_tokens == sum(len(ids) for ids, _ in likeliest)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"n": 3, "beam_width": 2}, "beam_width 2 is out of range"),
        ({"n": 3, "best_of": 2}, "best_of 2 is out of range"),
        ({"beam_width": 2, "best_of": 4}, "best_of does not go with beam search"),
        ({"beam_width": 2, "stop": "x"}, "use stop_token_ids"),
        ({"best_of": 2, "stop": "x"}, "use stop_token_ids"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "penalties and logit_bias do not go with beam search"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping 1 is unknown"),
        ({"beam_width": 2, "length_penalty": 1e9}, "length_penalty"),
    ],
)
def test_what_does_not_fit_is_refused(params: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**params)  # type: ignore[arg-type]
