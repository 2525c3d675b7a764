"""What a request asks of the engine: stops, limits, logprobs, penalties, seeds, cancel, and requests it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer, SamplingParams
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams as LLMParams
from llmc.runtime.request_error import RequestError

from support.compiled import Pages, compile_tiny, replay
from support.engine_driver import MIXED_LADDER, Output, bits, drive, greedy, random_ids, reference_logits

PROMPT = random_ids(60, 21)


@pytest.fixture(scope="module")
def engine(llama: tuple[Path, Artifact]) -> Engine:
    return Engine(llama[1], num_threads=2, num_blocks=64)


def one(engine: Engine, prompt: list[int] = PROMPT, **params: Any) -> Output:
    ((output,),) = drive(engine, [(prompt, SamplingParams(**params))])
    return output


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    """Greedy ids after PROMPT."""
    return one(engine, temperature=0.0, max_tokens=20, ignore_eos=True).ids


class OwnLogits:
    """Logits of the compiled model itself: the same bits as those that the engine samples from."""

    def __init__(self, artifact: Artifact) -> None:
        self.replayer = Replayer(artifact, num_threads=1, num_blocks=16)
        graphs = artifact.graphs()
        self.graph = max(range(len(graphs)), key=lambda i: graphs[i].max_tokens)
        self.block_size = artifact.info.block_size

    def after(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = replay(
            self.replayer, self.graph, Pages(16, self.block_size), [(0, tokens, 0)]
        )[0]
        return logits

    def greedy(
        self, count: int, adjust: Callable[[npt.NDArray[np.float32], list[int]], npt.NDArray[np.float32]]
    ) -> list[int]:
        """Greedy ids after PROMPT of adjust(logits, output so far)."""
        ids: list[int] = []
        while len(ids) < count:
            ids.append(int(adjust(self.after(PROMPT + ids).copy(), ids).argmax()))
        return ids


@pytest.fixture(scope="module")
def own(llama: tuple[Path, Artifact]) -> OwnLogits:
    return OwnLogits(llama[1])


def test_stop_token_ids(engine: Engine, plain: list[int]) -> None:
    stop = plain[7]
    output = one(engine, temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=(514, stop))
    assert (output.ids, output.reason, output.last_id) == (plain[: plain.index(stop)], "stop", stop)


def test_min_tokens_masks_stops(engine: Engine, plain: list[int], own: OwnLogits) -> None:
    stop = plain[2]

    def masked(logits: npt.NDArray[np.float32], ids: list[int]) -> npt.NDArray[np.float32]:
        if len(ids) < 9:
            logits[[2, stop]] = -np.inf
        return logits

    expected = own.greedy(20, masked)
    output = one(engine, temperature=0.0, max_tokens=20, min_tokens=9, stop_token_ids=(stop,))
    ends = [i for i, token in enumerate(expected) if i >= 9 and token in (2, stop)]
    assert output.ids == expected[: ends[0] if ends else 20]
    assert output.reason == ("stop" if ends else "length")
    assert stop not in output.ids


def test_eos(engine: Engine) -> None:
    eos: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "logit_bias": {2: 1000.0}}
    output = one(engine, **eos)
    assert (output.ids, output.reason, output.last_id) == ([], "stop", 2)
    output = one(engine, ignore_eos=True, **eos)
    assert (output.ids, output.reason, output.last_id) == ([2] * 8, "length", -1)
    output = one(engine, min_tokens=5, **eos)
    assert (len(output.ids), 2 in output.ids, output.reason, output.last_id) == (5, False, "stop", 2)


def test_max_tokens_ends_at_max_model_len(engine: Engine) -> None:
    assert len(one(engine, temperature=0.0, max_tokens=1, ignore_eos=True).ids) == 1
    for length in (100, 127):
        output = one(engine, random_ids(5, length), temperature=0.0, max_tokens=1000, ignore_eos=True)
        assert (len(output.ids), output.reason) == (128 - length, "length")


def test_logprobs_are_those_of_transformers(engine: Engine, llama: tuple[Path, Artifact]) -> None:
    # Temperature, penalties and bias change what is drawn, not the logprobs, which are the model's own.
    output = one(engine, temperature=1.5, seed=4, max_tokens=16, num_logprobs=7, ignore_eos=True, presence_penalty=1.0)
    logits = torch.tensor(reference_logits(llama[0], PROMPT + output.ids)[len(PROMPT) - 1 : -1])
    expected = torch.log_softmax(logits.double(), -1).numpy()
    best = np.argsort(-expected, axis=-1)[:, :7]
    assert len(output.logprobs) == 16
    for i, token in enumerate(output.ids):
        assert output.logprobs[i] == pytest.approx(expected[i, token], abs=1e-3)
        assert [t for t, _ in output.top[i]] == best[i].tolist()
        np.testing.assert_allclose([lp for _, lp in output.top[i]], expected[i, best[i]], atol=1e-3)
    assert one(engine, max_tokens=2, num_logprobs=0).top == [(), ()]


def test_logit_bias(engine: Engine, own: OwnLogits) -> None:
    bias = {7: 2.5, 100: -4.0, 514: 3.0, **{t: -1000.0 for t in range(200, 400)}}

    def biased(logits: npt.NDArray[np.float32], ids: list[int]) -> npt.NDArray[np.float32]:
        for token, value in bias.items():
            logits[token] += np.float32(value)
        return logits

    output = one(engine, temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias=bias)
    assert output.ids == own.greedy(20, biased)
    assert not any(200 <= t < 400 for t in output.ids)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.3, 0.0, 0.0), (0.8, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.7), (1.0, -1.0, -0.5), (1.2, 0.5, 0.3)],
)
def test_penalties(engine: Engine, own: OwnLogits, repetition: float, presence: float, frequency: float) -> None:
    def penalized(logits: npt.NDArray[np.float32], ids: list[int]) -> npt.NDArray[np.float32]:
        seen = sorted({*PROMPT, *ids})
        x, factor = logits[seen], np.float32(repetition)
        logits[seen] = np.where(x > 0, x / factor, x * factor)
        counts = np.bincount(np.array(ids, np.int64), minlength=len(logits)).astype(np.float32)
        return logits - np.float32(frequency) * counts - np.float32(presence) * (counts > 0)

    output = one(
        engine,
        temperature=0.0,
        max_tokens=20,
        ignore_eos=True,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    assert output.ids == own.greedy(20, penalized)


def test_seeds(engine: Engine) -> None:
    sampling: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5, "ignore_eos": True}
    first = one(engine, seed=11, **sampling)
    assert bits(one(engine, seed=11, **sampling)) == bits(first)
    assert one(engine, seed=12, **sampling).ids != first.ids
    assert one(engine, **sampling).ids != one(engine, **sampling).ids
    ((a, b, c),) = drive(engine, [(PROMPT, SamplingParams(seed=11, n=3, **sampling))])
    assert a.ids == first.ids
    assert len({tuple(o.ids) for o in (a, b, c)}) == 3


def test_cancel(llama: tuple[Path, Artifact], plain: list[int]) -> None:
    with Engine(llama[1], num_threads=1, num_blocks=40, max_num_seqs=2) as engine:
        kept = engine.submit(PROMPT, greedy(20))
        cancelled = engine.submit(PROMPT, SamplingParams(n=2, max_tokens=60, ignore_eos=True))
        queued = engine.submit(PROMPT, greedy(60))
        for _ in range(6):
            engine.step()
        engine.cancel(cancelled)
        engine.cancel(queued)
        events = engine.poll()
        while engine.step():
            engine.check_integrity()
            events += engine.poll()
        events += engine.poll()
        ends = {(e.request_id, e.output_index): e.finish_reason for e in events if e.kind == "finished"}
        cancels = {(cancelled, 0): "cancelled", (cancelled, 1): "cancelled", (queued, 0): "cancelled"}
        assert ends == {(kept, 0): "length", **cancels}
        assert [e.token_id for e in events if e.request_id == kept and e.kind == "token"] == plain
        assert 0 < sum(e.kind == "token" and e.request_id == cancelled for e in events) < 60
        stats = engine.stats
        assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (stats.num_blocks, 0, 0)
        for request in (cancelled, kept, 12345):
            with pytest.raises(LlmcError, match="nothing to cancel") as caught:
                engine.cancel(request)
            assert caught.value.name == "not_found"


def test_full_queue(llama: tuple[Path, Artifact]) -> None:
    with Engine(llama[1], num_threads=1, num_blocks=40, max_waiting=2) as engine:
        for _ in range(2):
            engine.submit(PROMPT, greedy(3))
        with pytest.raises(LlmcError, match="2 requests are waiting") as caught:
            engine.submit(PROMPT, greedy(3))
        assert caught.value.name == "queue_full"
        while engine.step():
            engine.check_integrity()
        engine.submit(PROMPT, greedy(3))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([5] * 128, {}, "prompt has 128 tokens but at most 127"),
        ([5, 515], {}, r"prompt_token_ids\[1\] is 515"),
        ([-1], {}, r"prompt_token_ids\[0\] is -1"),
        ([5], {"max_tokens": 0}, "max_tokens is 0"),
        ([5], {"n": 65}, "n is 65"),
        ([5], {"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        ([5], {"temperature": -1.0}, "temperature is -1"),
        ([5], {"temperature": float("nan")}, "temperature is"),
        ([5], {"top_p": 0.0}, "top_p is 0"),
        ([5], {"num_logprobs": 21}, "num_logprobs is 21"),
        ([5], {"stop_token_ids": (515,)}, r"stop_token_ids\[0\] is 515"),
        ([5], {"logit_bias": {515: 1.0}}, r"logit_bias\[0\].token_id is 515"),
    ],
)
def test_bad_requests(engine: Engine, prompt: list[int], params: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError, match=message) as caught:
        engine.submit(prompt, **params)
    assert caught.value.name == "invalid_argument"
    assert engine.stats.num_waiting == 0


def test_a_pool_that_kernels_cannot_address(llama: tuple[Path, Artifact]) -> None:
    """They count the elements of a layer's pool in int32."""
    info = llama[1].info
    keys = info.num_kv_heads * info.head_dim * info.block_size
    most = info.max_kv_blocks
    assert 2**30 < most * keys < 2**31  # values may be padded
    with pytest.raises(LlmcError, match=f"use at most {most - 1}"):
        Engine(llama[1], num_blocks=most)
    with pytest.raises(LlmcError, match=f"use at most {most * info.kv_block_bytes}"):
        Engine(llama[1], kv_bytes=(most + 1) * info.kv_block_bytes)


def test_prompt_longer_than_the_pool(llama: tuple[Path, Artifact]) -> None:
    with (
        Engine(llama[1], num_threads=1, num_blocks=2) as engine,
        pytest.raises(LlmcError, match="at most 31 fit the KV pool"),
    ):
        engine.submit([5] * 32)


def test_llm_runs_token_ids(llama: tuple[Path, Artifact], tmp_path: Path, kernel_cache: Path, plain: list[int]) -> None:
    model, _ = llama
    compile_tiny(model, tmp_path / "artifact", kernel_cache, buckets=MIXED_LADDER, dtype="f32", block_size=16).close()
    with LLM(tmp_path / "artifact", num_threads=1, num_blocks=40) as llm:
        prompts = [random_ids(70, 30), PROMPT, random_ids(71, 3)]
        params = LLMParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
        outputs = llm.generate(prompts, params)
        assert [o.index for o in outputs] == [0, 1, 2]
        assert list(outputs[1].outputs[0].token_ids) == plain
        logprobs = outputs[1].outputs[0].logprobs
        assert logprobs is not None
        assert all(max(entry.top, key=lambda t: entry.top[t]) == entry.token_id for entry in logprobs)
        assert outputs[1].usage.completion_tokens == 20
        # The second time the whole blocks of a prompt come from the cache.
        assert [o.usage.cached_tokens for o in llm.generate(prompts, params)] == [16, 16, 0]
        with pytest.raises(RequestError, match="prompt 1 has 128 tokens and max-model-len is 128"):
            llm.generate([PROMPT, [5] * 128])
