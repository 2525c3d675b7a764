"""What the endpoints answer, over a real server and a model that writes English."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.server.request_stream import RequestStream
from llmc.runtime.server.requests import EngineRequest

from support.server_harness import Running, engine_event, error_of, running_server

GREEDY = {"temperature": 0}
PROMPT = "It is a truth universally acknowledged, that"


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact) as running:
        yield running


@pytest.fixture(scope="module")
def llm(english_artifact: Path) -> Iterator[LLM]:
    with LLM(english_artifact, num_threads=1) as llm:
        yield llm


def streamed_text(events: list[dict[str, Any]], index: int = 0) -> str:
    """What the chunks of one choice add up to."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def finish_reasons(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


# --- state and models -------------------------------------------------------------------------------------------


def test_health_ready_and_version(running: Running) -> None:
    assert running.client.get("/health").json() == {"status": "ok"}
    ready = running.client.get("/ready").json()
    graphs = ready["graphs"]
    assert ready["status"] == "ready"
    assert graphs["warm"] == graphs["total"] == len(running.engine.graphs)
    assert sum(phase["warm"] for phase in graphs["by_phase"].values()) == graphs["total"]
    assert set(running.client.get("/version").json()) == {"version", "native"}


def test_models(running: Running) -> None:
    listed = running.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert running.client.get("/v1/models/tiny").json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == running.engine.max_model_len
    assert listed["data"][0]["vocab_size"] == running.engine.vocab_size
    error = error_of(running.client.get("/v1/models/other"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'other'" in error["message"]


def test_a_slash_behind_a_path_changes_nothing(running: Running) -> None:
    assert running.client.get("/v1/models/").json() == running.client.get("/v1/models").json()
    assert running.client.get("/health/").json() == {"status": "ok"}
    assert running.client.get("/", headers={"Accept": "text/html"}).status_code == 200
    answer = running.post("/v1/completions/", prompt="Hi", max_tokens=2)
    assert (answer.status_code, answer.json()["object"]) == (200, "text_completion")
    assert error_of(running.client.get("/v1/none/"), 404)["code"] == "unknown_endpoint"
    assert error_of(running.client.get("/v1/completions/"), 405)["code"] == "method_not_allowed"


def test_request_ids_go_back(running: Running) -> None:
    assert running.client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    first, second = (running.client.get("/health").headers["x-request-id"] for _ in range(2))
    assert len(first) == 32
    assert first != second
    assert running.client.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"


# --- completions ------------------------------------------------------------------------------------------------


def test_completion_equals_the_python_api(running: Running, llm: LLM) -> None:
    answer = running.complete(PROMPT, max_tokens=24, seed=7, temperature=0.8)
    (expected,) = llm.generate(PROMPT, llm.default_params(max_tokens=24, seed=7, temperature=0.8))
    (choice,) = answer["choices"]
    assert choice["text"] == expected.outputs[0].text
    assert choice["finish_reason"] == expected.outputs[0].finish_reason
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(expected.prompt_token_ids)
    assert usage["completion_tokens"] == len(expected.outputs[0].token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_sixteen_tokens_by_default(running: Running) -> None:
    assert running.complete(PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_prompts_of_every_kind(running: Running, llm: LLM) -> None:
    texts = [PROMPT, "She was"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    single = [running.complete(text, max_tokens=8, **GREEDY)["choices"][0]["text"] for text in texts]
    assert running.complete(ids[0], max_tokens=8, **GREEDY)["choices"][0]["text"] == single[0]
    for batch in (texts, ids):
        answer = running.complete(batch, max_tokens=8, **GREEDY)
        assert [choice["text"] for choice in answer["choices"]] == single
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"n": 3}, {"stop": ["e"]}, {"logprobs": 2, "echo": True}])
def test_stream_equals_answer(running: Running, extra: dict[str, Any]) -> None:
    body = {"prompt": [PROMPT, "She was"], "max_tokens": 20, "seed": 3, "temperature": 1.2, **extra}
    whole = running.post("/v1/completions", **body).json()
    events = running.events("/v1/completions", **body, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        assert streamed_text(events, choice["index"]) == choice["text"]
        assert finish_reasons(events, choice["index"]) == [choice["finish_reason"]]
        if "logprobs" in extra:
            parts = [c["logprobs"] for e in events for c in e["choices"] if c["index"] == choice["index"]]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [*chain.from_iterable(part[key] for part in parts)] == choice["logprobs"][key]
    assert events[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {key: events[-1]["usage"][key] for key in counts} == {key: whole["usage"][key] for key in counts}
    assert all(event["usage"] is None for event in events[:-1])


def test_usage_in_every_chunk(running: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = running.events("/v1/completions", prompt=PROMPT, max_tokens=8, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_echo_with_logprobs_equals_the_python_api(running: Running, llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=3)
    (expected,) = llm.generate(PROMPT, params)
    answer = running.complete(PROMPT, max_tokens=6, echo=True, logprobs=3, **GREEDY)
    (choice,) = answer["choices"]
    output = expected.outputs[0]
    assert choice["text"] == PROMPT + output.text
    told = choice["logprobs"]
    assert expected.prompt_logprobs is not None
    assert output.logprobs is not None
    entries = [*expected.prompt_logprobs, *output.logprobs]
    assert told["token_logprobs"] == [None, *(entry.logprob for entry in entries)]
    assert told["tokens"][0] == "<s>"
    assert "".join(told["tokens"][1:]) == PROMPT + output.text
    for entry, top in zip(entries, told["top_logprobs"][1:], strict=True):
        assert len(top) in (3, 4)
        assert set(entry.top.values()) <= set(top.values())
        assert entry.logprob in top.values()


def test_echo_of_no_tokens_scores_the_prompt(running: Running) -> None:
    answer = running.complete(PROMPT, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    assert "".join(choice["logprobs"]["tokens"]) == "<s>" + PROMPT
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs(running: Running, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2))
    told = running.complete(PROMPT, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    assert expected.prompt_logprobs is not None
    for entry, values in zip(expected.prompt_logprobs, told[1:], strict=True):
        assert values[str(entry.token_id)]["logprob"] == entry.logprob
        assert values[str(entry.token_id)]["rank"] == entry.rank
        assert {int(token) for token in values} == {entry.token_id, *entry.top}


def test_prompt_logprobs_in_streams(running: Running) -> None:
    whole = running.complete([PROMPT, "She"], n=2, seed=1, max_tokens=3, prompt_logprobs=2)["choices"]
    body = {"prompt": [PROMPT, "She"], "n": 2, "seed": 1, "max_tokens": 3, "prompt_logprobs": 2}
    told = [choice for event in running.events("/v1/completions", **body) for choice in event["choices"]]
    with_them = [choice for choice in told if "prompt_logprobs" in choice]
    assert sorted(choice["index"] for choice in with_them) == [0, 1, 2, 3]
    for choice in with_them:
        assert choice["prompt_logprobs"] == whole[choice["index"]]["prompt_logprobs"]
    chat = {"messages": [{"role": "user", "content": "She"}], "max_tokens": 3, "seed": 1, "prompt_logprobs": 1}
    answer = running.post("/v1/chat/completions", return_token_ids=True, **chat).json()
    events = running.events("/v1/chat/completions", return_token_ids=True, **chat)
    for name in ("prompt_logprobs", "prompt_token_ids"):
        (event,) = [event for event in events if name in event]
        assert event[name] == answer[name]


def test_several_outputs_differ_and_have_their_own_index(running: Running) -> None:
    answer = running.complete(PROMPT, n=4, max_tokens=12, seed=5, temperature=1.5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in answer["choices"]}) == 4


def test_beams_and_best_of_equal_the_python_api(running: Running, llm: LLM) -> None:
    """The model's defaults for drawing have no effect on beams."""
    beams = llm.generate(PROMPT, SamplingParams(n=2, beam_width=3, max_tokens=6, length_penalty=0.5))[0]
    body = {"max_tokens": 6, "use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0.5, "temperature": 0.3}
    answer = running.complete(PROMPT, **body)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in beams.outputs]
    assert answer["usage"]["completion_tokens"] == beams.usage.completion_tokens
    drawn = llm.generate(PROMPT, llm.default_params(best_of=3, max_tokens=6, temperature=1.0, seed=5))[0]
    best = running.complete(PROMPT, max_tokens=6, best_of=3, temperature=1.0, seed=5)
    assert [choice["text"] for choice in best["choices"]] == [one.text for one in drawn.outputs]


def test_token_ids_are_told_when_asked_for(running: Running, llm: LLM) -> None:
    (choice,) = running.complete(PROMPT, max_tokens=5, return_token_ids=True, **GREEDY)["choices"]
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0))
    assert tuple(choice["prompt_token_ids"]) == expected.prompt_token_ids
    assert tuple(choice["token_ids"]) == expected.outputs[0].token_ids


# --- stops ------------------------------------------------------------------------------------------------------


def test_stop_strings_across_tokens(running: Running) -> None:
    text = running.complete(PROMPT, max_tokens=40, seed=11, ignore_eos=True)["choices"][0]["text"]
    # A string that starts inside one word and ends inside another spans tokens.
    space = text.index(" ", 12)
    stop = text[space - 2 : space + 3]
    before = text[: text.index(stop)]
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 11, "ignore_eos": True, "stop": ["never seen", stop]}
    (choice,) = running.post("/v1/completions", **body).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
    events = running.events("/v1/completions", **body)
    assert streamed_text(events) == before
    (choice,) = running.post("/v1/completions", **body, include_stop_str_in_output=True).json()["choices"]
    assert choice["text"] == before + stop


def test_stop_token_ids(running: Running) -> None:
    (whole,) = running.complete(PROMPT, max_tokens=10, seed=2, ignore_eos=True, return_token_ids=True)["choices"]
    stop = whole["token_ids"][6]
    first = whole["token_ids"].index(stop)
    (choice,) = running.complete(
        PROMPT, max_tokens=10, seed=2, ignore_eos=True, stop_token_ids=[stop], return_token_ids=True
    )["choices"]
    assert choice["token_ids"] == whole["token_ids"][: first + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_min_tokens_and_logit_bias(running: Running, llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_ids[0]
    bias = {str(eos): 100}
    assert running.complete(PROMPT, max_tokens=9, logit_bias=bias, **GREEDY)["usage"]["completion_tokens"] == 1
    answer = running.complete(PROMPT, max_tokens=9, min_tokens=4, logit_bias=bias, **GREEDY)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None


# --- chat -------------------------------------------------------------------------------------------------------


def test_chat_equals_the_python_api(running: Running, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is she?"}]
    response = running.post("/v1/chat/completions", messages=messages, max_tokens=16, seed=9)
    (expected,) = llm.chat(messages, llm.default_params(max_tokens=16, seed=9))
    answer = response.json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == expected.outputs[0].finish_reason
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["object"] == "chat.completion"


@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_equals_answer(running: Running, n: int) -> None:
    body = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 20, "seed": 4, "n": n}
    whole = running.post("/v1/chat/completions", **body).json()
    events = running.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    for choice in whole["choices"]:
        assert streamed_text(events, choice["index"]) == choice["message"]["content"]
        assert finish_reasons(events, choice["index"]) == [choice["finish_reason"]]
    roles = [e["choices"][0]["delta"].get("role") for e in events if e["choices"]]
    assert roles[:n] == ["assistant"] * n
    assert not any(roles[n:])
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_chat_logprobs(running: Running) -> None:
    answer = running.chat("Who?", max_tokens=6, logprobs=True, top_logprobs=2, **GREEDY)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
    events = running.events(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Who?"}],
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
        **GREEDY,
    )
    parts = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
    assert [*chain.from_iterable(parts)] == content


def test_chat_fills_the_context_by_default(running: Running, llm: LLM) -> None:
    answer = running.chat("Who?", ignore_eos=True, **GREEDY)
    limit = llm.generation_config["max_new_tokens"]
    assert answer["usage"]["completion_tokens"] == limit
    rest = running.engine.max_model_len - answer["usage"]["prompt_tokens"]
    assert limit < rest


def test_chat_messages_of_parts_and_developers(running: Running) -> None:
    plain = [{"role": "system", "content": "a"}, {"role": "user", "content": "b\nc"}]
    parts = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    ids = [running.post("/tokenize", messages=messages).json()["tokens"] for messages in (plain, parts)]
    assert ids[0] == ids[1]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    error = error_of(running.post("/v1/chat/completions", messages=image), 400)
    assert error["param"] == "messages.0.content.0.image_url.url"


def test_continue_final_message(running: Running, llm: LLM) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "She was"}]
    ids = running.post("/tokenize", messages=messages, continue_final_message=True).json()["tokens"]
    assert ids == llm.tokenizer.encode("<user>a<assistant>She was", add_special_tokens=False)


@pytest.mark.parametrize("content", ["", " "])
def test_an_empty_final_message_is_begun(running: Running, llm: LLM, content: str) -> None:
    """As a generation prompt would, and without what the template writes after a message."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    ids = running.post("/tokenize", messages=messages, continue_final_message=True).json()["tokens"]
    assert ids == llm.tokenizer.encode("<user>a<assistant>", add_special_tokens=False)
    options = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 4, "ignore_eos": True}
    answer = running.post("/v1/chat/completions", messages=messages, **options).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_an_empty_prompt_is_the_beginning_of_a_document(running: Running, llm: LLM) -> None:
    tokenizer = llm.tokenizer
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_ids[0]
    options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    expected = running.complete([start], **options)["choices"][0]["text"]
    for special in (False, True):
        answer = running.complete("", add_special_tokens=special, return_token_ids=True, **options)["choices"][0]
        assert (answer["text"], answer["prompt_token_ids"]) == (expected, [start])
    (output,) = llm.generate("", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert (output.outputs[0].text, list(output.prompt_token_ids)) == (expected, [start])


# --- tokenizer --------------------------------------------------------------------------------------------------


def test_tokenize_and_back(running: Running, llm: LLM) -> None:
    answer = running.post("/tokenize", prompt="Grüße, 世界", return_token_strs=True).json()
    assert answer["tokens"] == llm.tokenizer.encode("Grüße, 世界")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert running.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "<s>Grüße, 世界"}
    skipped = running.post("/detokenize", tokens=answer["tokens"], skip_special_tokens=True).json()
    assert skipped == {"prompt": "Grüße, 世界"}
    error_of(running.post("/detokenize", tokens=[1 << 20]), 400)
    error_of(running.post("/tokenize"), 400)


# --- same request, same bits ------------------------------------------------------------------------------------


def test_answers_are_the_same_alone_and_in_company(running: Running) -> None:
    bodies = [
        {"prompt": PROMPT[: 8 + i], "max_tokens": 10 + i, "seed": i, "temperature": 0.9, "logprobs": 3, "echo": True}
        for i in range(16)
    ]

    def ask(body: dict[str, Any]) -> Any:
        return running.post("/v1/completions", **body).json()["choices"]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, bodies)) == alone
    batch = running.complete([PROMPT, "She was"], max_tokens=12, seed=1)
    again = [running.complete(prompt, max_tokens=12, seed=1) for prompt in (PROMPT, "She was")]
    assert [choice["text"] for choice in batch["choices"]] == [one["choices"][0]["text"] for one in again]


# --- text that is not cut ---------------------------------------------------------------------------------------


def test_characters_are_never_torn(llm: LLM) -> None:
    """Characters of several tokens come in one piece each, whenever the reader looks."""
    tokens = llm.tokenizer.encode("é世😀 ok", add_special_tokens=False)
    assert any("\ufffd" in llm.tokenizer.decode(tokens[:length]) for length in range(len(tokens)))
    request = EngineRequest("r", (0,), SamplingParams(max_tokens=99))
    stream = RequestStream(request, llm.tokenizer)

    async def read() -> list[str]:
        pieces = []
        for token in tokens:
            stream.take(engine_event("token", token_id=token))
            pieces.append((await anext(stream)).text)
        stream.take(engine_event("finished", finish_reason="length"))
        async for delta in stream:
            pieces.append(delta.text)
        return pieces

    pieces = asyncio.run(read())
    assert [piece for piece in pieces if piece][:3] == ["é", "世", "😀"]
    assert "".join(pieces) == "é世😀 ok"


def test_an_unfinished_character_is_left_out(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    stream = RequestStream(EngineRequest("r", (0,), SamplingParams()), llm.tokenizer)
    for token in tokens:
        stream.take(engine_event("token", token_id=token))
    stream.take(engine_event("finished", finish_reason="length"))

    async def read() -> str:
        return "".join([delta.text async for delta in stream])

    assert asyncio.run(read()) == "a"


def test_asgi_without_a_network(english_artifact: Path) -> None:
    """The application alone, as another server would mount it."""
    from llmc.runtime.server.app import create_app
    from llmc.runtime.server.run import open_engine

    from support.server_harness import make_config

    config = make_config(english_artifact)

    async def main() -> dict[str, Any]:
        app = create_app(config, open_engine(config))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
        ):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
            response = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
            return dict(json.loads(response.text))

    assert asyncio.run(main())["usage"]["completion_tokens"] <= 4
