"""What a server asks of the engine, on a compiled tiny model: masks, prompt logprobs, deadlines, waiting, warm-up."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llmc.runtime.binding import Artifact, Engine, Event, LlmcError, SamplingParams
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams as LLMParams
from llmc.runtime.request_error import RequestError

from support.engine_driver import Output, drive, greedy, random_ids, reference_logits

VOCAB = 515
PROMPT = random_ids(70, 45)


@pytest.fixture(scope="module")
def artifact(llama: tuple[Path, Artifact]) -> Artifact:
    return llama[1]


@pytest.fixture(scope="module")
def model(llama: tuple[Path, Artifact]) -> Path:
    return llama[0]


def mask_words(allowed: list[int]) -> npt.NDArray[np.uint32]:
    words = np.zeros((VOCAB + 31) // 32, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def allowed_after(ids: list[int]) -> list[int]:
    """A grammar of sorts: sixty tokens that depend on the last one."""
    last = ids[-1] if ids else 7
    return [(last * 31 + 8 * i + 3) % VOCAB for i in range(60)]


def drive_guided(engine: Engine, request: int, n: int) -> list[Output]:
    """The loop of a host that answers every request for a mask, in a step or two."""
    outputs = [Output() for _ in range(n)]
    waiting: list[Event] = []
    while not all(output.reason for output in outputs):
        ready = engine.wait(10.0)
        assert ready.events or ready.work
        if ready.work:
            engine.step()
            engine.check_integrity()
        for event in waiting:
            words = mask_words(allowed_after(outputs[event.output_index].ids))
            engine.set_token_mask(request, event.output_index, words)
        waiting = []
        for event in engine.poll():
            if event.request_id != request:
                continue
            output = outputs[event.output_index]
            if event.kind == "token":
                output.ids.append(event.token_id)
            elif event.kind == "finished":
                output.reason = event.finish_reason
            else:
                assert event.kind == "needs_mask"
                assert event.num_output_tokens == len(output.ids)
                waiting.append(event)
    return outputs


def test_guided_tokens_are_the_best_that_the_mask_allows(model: Path, artifact: Artifact) -> None:
    with Engine(artifact, num_threads=2, num_blocks=64) as engine:
        others = [engine.submit(random_ids(i, 20), greedy(15)) for i in range(3)]
        request = engine.submit(PROMPT, greedy(12), guided=True)
        (output,) = drive_guided(engine, request, 1)
        while engine.stats.num_finished < len(others) + 1:
            engine.step()
    logits = reference_logits(model, PROMPT + output.ids)[len(PROMPT) - 1 : -1]
    assert len(output.ids) == 12
    for i, row in enumerate(logits):
        allowed = sorted(allowed_after(output.ids[:i]))
        assert output.ids[i] == allowed[int(row[allowed].argmax())]
    # Alone, in another chunking, the same tokens.
    with Engine(artifact, num_threads=1, num_blocks=64, max_tokens_per_step=8, prefix_cache=0) as engine:
        (again,) = drive_guided(engine, engine.submit(PROMPT, greedy(12), guided=True), 1)
    assert again.ids == output.ids


def test_each_continuation_has_its_own_mask(artifact: Artifact) -> None:
    params = SamplingParams(n=3, max_tokens=8, seed=5, ignore_eos=True)
    with Engine(artifact, num_threads=2, num_blocks=64) as engine:
        outputs = drive_guided(engine, engine.submit(PROMPT, params, guided=True), 3)
    assert len({tuple(output.ids) for output in outputs}) > 1
    for output in outputs:
        assert len(output.ids) == 8
        assert all(token in allowed_after(output.ids[:i]) for i, token in enumerate(output.ids))


def test_mask_errors(artifact: Artifact) -> None:
    with Engine(artifact, num_threads=1, num_blocks=64) as engine:
        plain = engine.submit(PROMPT, greedy(2))
        with pytest.raises(LlmcError, match="not guided"):
            engine.set_token_mask(plain, 0, mask_words([1]))
        with pytest.raises(LlmcError, match="unknown") as caught:
            engine.set_token_mask(999, 0, mask_words([1]))
        assert caught.value.name == "not_found"
        with pytest.raises(TypeError, match="float64"):
            engine.set_token_mask(plain, 0, np.zeros(17))
        guided = engine.submit(PROMPT, greedy(2), guided=True)
        engine.set_token_mask(guided, 0, mask_words([]))
        while engine.step():
            pass
        failed = [event for event in engine.poll() if event.kind == "failed"]
        assert [event.request_id for event in failed] == [guided]
        assert LlmcError(failed[0].error_code, "").name == "empty_mask"
        assert "allows no token" in failed[0].error_message


def prompt_scores(engine: Engine, num: int) -> list[Event]:
    request = engine.submit(PROMPT, greedy(3), num_prompt_logprobs=num)
    events: list[Event] = []
    while engine.step():
        engine.check_integrity()
        events += [event for event in engine.poll() if event.request_id == request]
    kinds = [event.kind for event in events]
    assert kinds == ["prompt_logprobs"] * (len(PROMPT) - 1) + ["token"] * 3 + ["finished"]
    return events[: len(PROMPT) - 1]


def test_prompt_logprobs_are_those_of_transformers(model: Path, artifact: Artifact) -> None:
    logits = reference_logits(model, PROMPT)[:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    with Engine(artifact, num_threads=2, num_blocks=64) as engine:
        events = prompt_scores(engine, 5)
    for i, event in enumerate(events):
        row, token = expected[i], PROMPT[i + 1]
        assert (event.position, event.token_id) == (i + 1, token)
        assert abs(event.logprob - row[token]) < 1e-3
        assert abs(event.rank - 1 - int((row > row[token]).sum())) <= 1
        best = np.sort(row)[::-1][:5]
        np.testing.assert_allclose([value for _, value in event.top_logprobs], best, atol=1e-3)


def test_prompt_logprobs_have_the_same_bits_however_chunked(artifact: Artifact) -> None:
    def bits(events: list[Event]) -> list[object]:
        return [(e.token_id, e.logprob, e.rank, e.top_logprobs) for e in events]

    with Engine(artifact, num_threads=2, num_blocks=64) as engine:
        drive(engine, [(PROMPT, greedy(3))])  # leaves its blocks in the prefix cache
        first = bits(prompt_scores(engine, 3))
        assert engine.stats.cached_tokens == 0
        for i in range(4):
            engine.submit(random_ids(i, 30), greedy(30))
        engine.step()
        assert bits(prompt_scores(engine, 3)) == first
    for step in (1, 3, 8):
        with Engine(artifact, num_threads=1, num_blocks=64, max_tokens_per_step=step) as engine:
            assert bits(prompt_scores(engine, 3)) == first


def test_llm_gives_prompt_logprobs(llama: tuple[Path, Artifact], artifact: Artifact) -> None:
    with Engine(artifact, num_threads=1, num_blocks=64) as engine:
        events = prompt_scores(engine, 2)
    with LLM(llama[0].parent / "artifact", num_threads=1) as llm:
        asked, plain = llm.generate(
            [PROMPT, PROMPT],
            [LLMParams(max_tokens=2, temperature=0.0, prompt_logprobs=k, logprobs=k) for k in (2, None)],
        )
    assert plain.prompt_logprobs is None
    assert asked.prompt_logprobs is not None
    assert [(p.token_id, p.logprob, p.rank, p.top) for p in asked.prompt_logprobs] == [
        (e.token_id, e.logprob, e.rank, dict(e.top_logprobs)) for e in events
    ]
    assert asked.outputs[0].token_ids == plain.outputs[0].token_ids
    # Greedy without penalties: every token was the likeliest.
    assert [token.rank for token in asked.outputs[0].logprobs or ()] == [1] * len(asked.outputs[0].token_ids)
    with pytest.raises(RequestError, match="prompt_logprobs 21"):
        LLMParams(prompt_logprobs=21)


def test_deadline_and_times(artifact: Artifact) -> None:
    with Engine(artifact, num_threads=1, num_blocks=64) as engine:
        held = engine.submit(PROMPT, greedy(4), guided=True, deadline_ns=time.monotonic_ns() + 30_000_000)
        plain = engine.submit(PROMPT, greedy(4))
        ends: dict[int, Event] = {}
        while len(ends) < 2:
            if engine.wait().work:
                engine.step()
            ends |= {event.request_id: event for event in engine.poll() if event.kind == "finished"}
    assert (ends[held].finish_reason, ends[plain].finish_reason) == ("timeout", "length")
    end = ends[plain]
    assert 0 < end.arrival_ns <= end.first_scheduled_ns <= end.first_token_ns <= end.time_ns
    assert ends[held].first_token_ns == 0


def test_wait_is_woken_by_a_submission(artifact: Artifact) -> None:
    with Engine(artifact, num_threads=1, num_blocks=64) as engine:
        idle = engine.wait(0.001)
        assert (idle.events, idle.work) == (False, False)
        # The waiting thread does not hold the interpreter's lock, or this one could never submit.
        found = []
        thread = threading.Thread(target=lambda: found.append(engine.wait()))
        thread.start()
        engine.submit(PROMPT, greedy(1))
        thread.join(60)
        assert [ready.work for ready in found] == [True]


def test_warming_changes_nothing(artifact: Artifact) -> None:
    with Engine(artifact, num_threads=2, num_blocks=64) as cold:
        ((expected,),) = drive(cold, [(PROMPT, greedy(20))])
    with Engine(artifact, num_threads=2, num_blocks=64) as engine:
        num_graphs = len(artifact.graphs())
        assert all(engine.warm_graph(graph) > 0 for graph in range(num_graphs))
        with pytest.raises(LlmcError, match=f"Graph {num_graphs} does not exist"):
            engine.warm_graph(num_graphs)
        assert engine.stats.num_steps == 0
        ((output,),) = drive(engine, [(PROMPT, greedy(20))])
        assert engine.warm_graph(0) > 0
        stats, graphs = engine.stats, engine.graph_stats()
    assert output.ids == expected.ids
    assert sum(graph.replays for graph in graphs) == stats.num_steps
    assert sum(graph.padded_tokens for graph in graphs) == stats.padded_tokens
    assert sum(graph.replay_ns for graph in graphs) == stats.replay_ns
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (len(PROMPT), 0)
