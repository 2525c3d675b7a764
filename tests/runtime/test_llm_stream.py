"""`LLM.stream` and `AsyncLLM`: several readers of one engine, readers that leave, and options."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc import TokenDelta
from llmc.runtime.async_llm import AsyncLLM
from llmc.runtime.binding import LlmcError
from llmc.runtime.binding.engine import Engine
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError
from llmc.runtime.warm_up.warm_up import WarmStep

from support.fake_llm import FakeEngine, FakeLLM
from support.server_harness import slow_down

ENDLESS = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.fixture
def fake(tmp_path: Path) -> FakeLLM:
    return FakeLLM(FakeEngine(), tmp_path)


def texts(deltas: list[TokenDelta]) -> dict[int, str]:
    found: dict[int, str] = {}
    for delta in deltas:
        found[delta.index] = found.get(delta.index, "") + delta.text
    return found


def test_increments_come_step_by_step(fake: FakeLLM) -> None:
    stream = fake.stream("abc", SamplingParams(max_tokens=4, logprobs=1))
    found = []
    for delta in stream:
        found.append((delta.text, delta.token_ids, delta.finish_reason, fake.engine.num_steps))
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    assert found == [
        ("c", (99,), None, 1),
        ("b", (98,), None, 2),
        ("a", (97,), None, 3),
        ("c", (99,), "length", 4),
    ]


def test_several_prompts_of_every_kind(fake: FakeLLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (3, 1, 2)]
    prompts: list[str | Sequence[int]] = ["abc", [100, 101], "xy"]
    deltas = list(fake.stream(prompts, params))
    assert texts(deltas) == {0: "cba", 1: "e", 2: "yx"}
    assert texts(list(fake.stream([100, 101], SamplingParams(max_tokens=2)))) == {0: "ed"}
    assert list(fake.stream([])) == []


def test_bad_prompts_are_refused_at_once(fake: FakeLLM) -> None:
    bad: list[Any] = ["", [-1], [[1], 2.5]]
    for prompt in bad:
        with pytest.raises(RequestError):
            fake.stream(prompt)
    assert fake.engine.last_id == 0


def test_closing_cancels_what_still_runs(fake: FakeLLM) -> None:
    stream = fake.stream(["abc", "de", "fg"], [SamplingParams(max_tokens=n) for n in (1, 9, 9)])
    assert {next(stream).index, next(stream).index} == {0, 1}
    stream.close()
    assert fake.engine.cancelled == [2, 3]
    assert list(stream) == []
    (output,) = fake.generate("xy", SamplingParams(max_tokens=2))
    assert output.outputs[0].text == "yx"


def test_an_interruption_cancels_as_well(tmp_path: Path) -> None:
    llm = FakeLLM(FakeEngine(interrupt_after=3), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream("abc", ENDLESS))
    assert llm.engine.cancelled == [1]


def test_readers_take_turns(tmp_path: Path) -> None:
    llm = FakeLLM(FakeEngine(slots=4), tmp_path)
    first, second = (llm.stream(prompt, SamplingParams(max_tokens=9)) for prompt in ("abc", "xyz"))
    found = [next(first), next(second)]
    (between,) = llm.generate("mn", SamplingParams(max_tokens=4))
    assert between.outputs[0].text == "nmnm"
    assert next(first).text == "bacba", "what came while others read"
    second.close()
    assert texts([found[0], *first])[0] == "ccba"
    assert found[1].text == "z"
    assert llm.engine.cancelled == [2]


def test_a_failed_request_ends_alone(tmp_path: Path) -> None:
    llm = FakeLLM(FakeEngine(failing={ord("x"): 11}, refused=ord("r")), tmp_path)
    deltas = list(llm.stream(["abc", "xy", "rr"], SamplingParams(max_tokens=3)))
    assert texts(deltas) == {0: "cba", 1: "yx", 2: ""}
    errors = {delta.index: delta.error.code for delta in deltas if delta.error is not None}
    assert errors == {1: "internal", 2: "invalid_argument"}
    assert {delta.index for delta in deltas if delta.finish_reason == "error"} == {1, 2}


# --- options ----------------------------------------------------------------------------------------------------


# `speculate` stands for two; the last one is for tests.
KEYWORDS = Engine._OPTIONS - {"speculate_tokens", "speculate_always", "swap_always"}


@pytest.mark.parametrize("kind", [llmc.LLM, llmc.AsyncLLM])
def test_every_option_of_the_engine_is_a_keyword(kind: type) -> None:
    names = {name for name, one in inspect.signature(kind).parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert names >= {*KEYWORDS, "speculate", "draft"}
    assert all(one.annotation is not one.empty for one in inspect.signature(kind).parameters.values())
    assert kind.__doc__
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_thread'"):
        kind("nowhere", num_thread=1)
    with pytest.raises(llmc.ModelPathError, match="nowhere does not exist"):
        kind("nowhere")


def test_options_and_their_documentation_are_those_of_llm() -> None:
    assert inspect.signature(LLM) == inspect.signature(AsyncLLM)
    for name in KEYWORDS:
        assert f"{name}:" in (LLM.__doc__ or "") or f"{name}," in (LLM.__doc__ or ""), name


def test_a_cpu_has_no_use_for_swap_space(chat_artifact: Path) -> None:
    with pytest.raises(LlmcError, match=r"^This device.s KV blocks are in the host.s memory already; leave"):
        LLM(chat_artifact, num_threads=1, swap_bytes=1 << 20)


def test_a_budget_and_a_warm_up_on_a_loop(chat_artifact: Path) -> None:
    steps: list[WarmStep] = []

    async def main() -> None:
        async with AsyncLLM(
            chat_artifact, num_threads=1, memory_utilization=0.5, kv_bytes=8 << 20, skip_warmup=False,
            warmup_seconds=0, on_warm_step=steps.append,
        ) as llm:  # fmt: skip
            assert llm.budget is not None
            assert llm.budget.kv_bytes == 8 << 20
            assert len(steps) == llm.warm_up.num_warm == len(llm.engine.graphs) - len(llm.budget.dropped) > 0
            (output,) = await llm.generate("one", SamplingParams(max_tokens=2, ignore_eos=True))
            assert output.usage.completion_tokens == 2

    asyncio.run(main())


# --- on an event loop -------------------------------------------------------------------------------------------


def on_a_loop(path: Path, work: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncLLM(path, num_threads=1) as llm:
            await work(llm)
            # Whoever left took nothing along.
            while llm.engine.num_active:
                await asyncio.sleep(0.001)
            assert await llm.engine.check_integrity() is None
            assert llm.stats().num_running == llm.stats().num_waiting == 0

    asyncio.run(run())


def test_tasks_share_an_engine(chat_artifact: Path) -> None:
    prompts = [f"prompt {i}" for i in range(6)]
    params = SamplingParams(max_tokens=20, seed=4, temperature=1.0)
    with LLM(chat_artifact, num_threads=1) as llm:
        expected = [output.outputs for output in llm.generate(prompts, params)]

    async def work(llm: AsyncLLM) -> None:
        async def read(prompt: str) -> str:
            return "".join([delta.text async for delta in llm.stream(prompt, params)])

        outputs, read_texts = await asyncio.gather(llm.generate(prompts, params), asyncio.gather(*map(read, prompts)))
        assert [output.outputs for output in outputs] == expected
        assert read_texts == [one.text for (one,) in expected]
        assert all(output.timings.ttft_s is not None for output in outputs)

    on_a_loop(chat_artifact, work)


def test_who_leaves_cancels(chat_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM) -> None:
        slow_down(llm.engine, monkeypatch, 0.02)
        stream = llm.stream(["one", "two"], ENDLESS)
        await anext(stream)
        assert llm.engine.num_active == 2
        await stream.aclose()

        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.stream("three", ENDLESS):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        whole = asyncio.create_task(llm.generate("four", ENDLESS))
        await asyncio.sleep(0)
        whole.cancel()
        for one in (task, whole):
            with pytest.raises(asyncio.CancelledError):
                await one

    on_a_loop(chat_artifact, work)


def test_refusals_and_errors_on_a_loop(chat_artifact: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            await llm.generate([[]])
        # The engine knows the vocabulary; the others go on.
        params = [SamplingParams(max_tokens=3, stop_token_ids=[100000]), SamplingParams(max_tokens=3, ignore_eos=True)]
        bad, fine = await llm.generate(["a", "b"], params)
        assert bad.error is not None
        assert bad.error.code == "invalid_argument"
        assert (fine.error, len(fine.outputs[0].token_ids)) == (None, 3)

    on_a_loop(chat_artifact, work)


def test_another_loop_is_refused(chat_artifact: Path) -> None:
    llm = AsyncLLM(chat_artifact, num_threads=1)
    (first,) = asyncio.run(llm.generate([[5, 6]], SamplingParams(max_tokens=2)))
    assert len(first.outputs[0].token_ids) == 2
    for _ in range(2):
        with pytest.raises(RequestError, match="this AsyncLLM is of another event loop: make one in each loop"):
            asyncio.run(llm.generate([[5, 6]], SamplingParams(max_tokens=2)))
    asyncio.run(llm.close())


def test_more_prompts_than_may_wait(chat_artifact: Path) -> None:
    """They wait outside, also where requests of others fill the queue."""
    with LLM(chat_artifact, num_threads=1, max_waiting=3, max_num_seqs=2) as llm:
        wanted = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        for _ in range(3):
            llm.engine.submit([7], wanted)
        outputs = llm.generate([[5 + i] for i in range(20)], wanted)
        assert [len(one.outputs[0].token_ids) for one in outputs] == [3] * 20
        assert llm.stats().num_finished == 23


def test_closing_ends_those_who_still_read(chat_artifact: Path) -> None:
    async def main() -> list[str | None]:
        llm = AsyncLLM(chat_artifact, num_threads=1)
        stream = llm.stream("one", ENDLESS)
        deltas = [await anext(stream)]
        await llm.close()
        await llm.close()
        deltas += [delta async for delta in stream]
        return [delta.finish_reason for delta in deltas]

    reasons = asyncio.run(main())
    assert reasons[-1] in ("cancelled", "length")
    assert not any(reasons[:-1])


def test_a_closed_one_says_that_it_is_closed(chat_artifact: Path) -> None:
    async def main(started: bool) -> None:
        llm = AsyncLLM(chat_artifact, num_threads=1)
        if started:
            await llm.generate("a", SamplingParams(max_tokens=1))
        prepare = llm.prepare

        def closed_meanwhile(*arguments: Any) -> Any:
            prepared = prepare(*arguments)
            asyncio.run_coroutine_threadsafe(llm.close(), loop).result()
            return prepared

        if started:  # closed between the tokenizer and the engine
            loop, llm.prepare = asyncio.get_running_loop(), closed_meanwhile  # type: ignore[method-assign, assignment]
            with pytest.raises(RequestError, match="this AsyncLLM is closed and takes no more requests: open another"):
                await llm.generate("a", SamplingParams(max_tokens=1))
        await llm.close()
        for call in (
            lambda: llm.generate("a"),
            lambda: anext(llm.stream("a")),
            lambda: llm.load_adapter("a", "b"),
            lambda: llm.unload_adapter("a"),
        ):
            with pytest.raises(RequestError, match="this AsyncLLM is closed"):
                await call()
        with pytest.raises(RequestError, match="this AsyncLLM is closed"):
            llm.stats()
        await llm.close()

    asyncio.run(main(started=False))
    asyncio.run(main(started=True))
