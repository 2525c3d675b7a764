"""Clients that people use, against a server of the example model: openai, LangChain, curl and the examples."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from support.live_server import LiveServer, serving
from support.paths import ROOT

CLIENTS = ROOT / "examples" / "clients"
KEY = "key-of-the-tests"
SAID = [{"role": "user", "content": "Mr. Darcy had never"}]


@pytest.fixture(scope="module")
def server(english_artifact: Path) -> Iterator[LiveServer]:
    flags: list[str | Path] = ["--served-model-name", "tiny", "--api-key", KEY]
    flags += ["--chat-template", CLIENTS / "story.jinja"]
    with serving(english_artifact, *flags, "--max-queue", "8") as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason="openai belongs to the extra dev")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


# ---- openai ------------------------------------------------------------------------------------------------------


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_chat_streamed_is_the_chat(client: Any) -> None:
    options = {"model": "tiny", "messages": SAID, "max_tokens": 20, "seed": 7, "temperature": 0.8}
    whole = client.chat.completions.create(**options)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    finish = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finish == [whole.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    assert client.chat.completions.create(**options).choices[0].message.content == text, "same request, same bits"


def test_the_stream_helper_adds_it_up(client: Any) -> None:
    # The helper takes an answer that its limit cut off for an error.
    options = {"model": "tiny", "messages": SAID, "max_tokens": 100, "seed": 7, "stop": "e"}
    with client.chat.completions.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].message.content == (client.chat.completions.create(**options).choices[0].message.content)


def test_n_answers_with_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=SAID, n=3, max_tokens=5, seed=1, temperature=1.0, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs.content
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 2
            assert bytes(token.bytes).decode("utf-8", "replace") == token.token or "�" in token.token
        joined = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert joined.decode("utf-8", "replace").startswith(choice.message.content)
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)


def test_completions_of_a_batch(client: Any) -> None:
    prompts = ["The evening passed", "She was very"]
    batch = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, logprobs=1)
    for prompt, choice in zip(prompts, batch.choices, strict=True):
        alone = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=1)
        assert alone.choices[0].text == choice.text
        assert alone.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs, "same request, same bits"
    echo = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=3, echo=True, temperature=0)
    assert echo.choices[0].text.startswith(prompts[0])


def test_stop_and_vendor_fields(client: Any) -> None:
    free = client.completions.create(model="tiny", prompt="She was", max_tokens=30, temperature=0).choices[0].text
    word = free.split()[3]
    stopped = client.completions.create(model="tiny", prompt="She was", max_tokens=30, temperature=0, stop=[word])
    assert stopped.choices[0].text == free[: free.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    extra = {"top_k": 1, "min_tokens": 2, "ignore_eos": True}
    forced = client.completions.create(model="tiny", prompt="She was", max_tokens=30, seed=1, extra_body=extra)
    assert forced.choices[0].text == free or forced.usage.completion_tokens == 30


def test_json_that_a_schema_asks_for(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=80, seed=3, response_format=form)
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_many_at_once_from_an_async_client(server: LiveServer) -> None:
    openai = pytest.importorskip("openai", reason="openai belongs to the extra dev")

    async def ask(client: Any, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=SAID, max_tokens=12, seed=seed, temperature=1.0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def all_of_them() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            together = await asyncio.gather(*(ask(client, seed) for seed in range(12)))
            alone = [await ask(client, seed) for seed in range(12)]
        return list(together), alone

    together, alone = asyncio.run(all_of_them())
    assert together == alone, "same request, same bits"
    assert len(set(together)) > 1


def test_errors_are_the_clients_own_classes(server: LiveServer, client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=SAID, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="a " * 3000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as text:
        client.embeddings.create(model="tiny", input="a")
    assert text.value.code == "unsupported_task"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as unknown,
    ):
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key"


def test_a_stream_that_is_left_is_stopped(server: LiveServer, client: Any) -> None:
    stream = client.completions.create(
        model="tiny", prompt="She was", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    answer = client.completions.create(model="tiny", prompt="She was", max_tokens=2)
    assert answer.usage.completion_tokens == 2


# ---- openai's responses ------------------------------------------------------------------------------------------

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bath", "York"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_responses(client: Any) -> None:
    options = {"model": "tiny", "input": "Mr. Darcy had never", "max_output_tokens": 20, "temperature": 0.8}
    whole = client.responses.create(**options, extra_body={"seed": 7})
    type(whole).model_validate(whole.model_dump())
    chat = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=20, temperature=0.8, seed=7)
    assert whole.output_text == chat.choices[0].message.content != ""
    assert whole.usage.total_tokens == chat.usage.total_tokens
    for event in client.responses.create(**options, extra_body={"seed": 7}, stream=True):
        type(event).model_validate(event.model_dump())
    assert event.response.output_text == whole.output_text
    then = client.responses.create(**{**options, "input": "Why?"}, previous_response_id=whole.id)
    assert then.usage.input_tokens > whole.usage.total_tokens
    assert client.responses.retrieve(whole.id) == whole
    (item,) = client.responses.input_items.list(whole.id).data
    assert item.content[0].text == "Mr. Darcy had never"
    client.responses.delete(whole.id)
    import openai

    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)
    with pytest.raises(openai.BadRequestError, match="made while you wait"):
        client.responses.create(**options, background=True)


def test_responses_with_tools_and_formats(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    options = {"model": "tiny", "input": "How is it?", "max_output_tokens": 90}
    one = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**options, **one) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        call = stream.get_final_response().output[0]
    assert json.loads("".join(deltas)) == json.loads(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    told = [{"role": "user", "content": "How is it?"}, call.model_dump(exclude_none=True), result]
    said = client.responses.create(model="tiny", input=told, max_output_tokens=5)
    assert said.output[0].type == "message"

    class City(pydantic.BaseModel):
        good: bool

    assert isinstance(client.responses.parse(**options, text_format=City).output_parsed, City)


# ---- anthropic ---------------------------------------------------------------------------------------------------


def test_anthropic(server: LiveServer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic belongs to the extra dev")
    more = {"extra_body": {"seed": 7, "temperature": 0.8}}  # as clients differ in what they name
    options = {"model": "tiny", "max_tokens": 20, "messages": SAID, **more}
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        whole = client.messages.create(**options)
        type(whole).model_validate(whole.model_dump())
        body = {"messages": SAID, "max_tokens": 20, "temperature": 0.8, "seed": 7}
        chat = server.ask("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"}).json()
        assert whole.content[0].text == chat["choices"][0]["message"]["content"] != ""
        with client.messages.stream(**options) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == final.content[0].text == whole.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        counted = client.messages.count_tokens(model="tiny", messages=SAID).input_tokens
        assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        tool = {"name": "weather", "input_schema": WEATHER}
        one = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        with client.messages.stream(**{**options, "max_tokens": 90}, **one) as stream:
            called = stream.get_final_message()
        assert called.stop_reason == "tool_use"
        assert called.content[0].input["city"] in ("Bath", "York")
        result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "rain"}
        told = [*SAID, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(model="tiny", max_tokens=4, messages=told).content[0].type == "text"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "a " * 3000}])
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", max_tokens=1, messages=SAID)
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model="tiny", max_tokens=1, messages=SAID)


# ---- LangChain ---------------------------------------------------------------------------------------------------


def test_langchain(server: LiveServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai belongs to the extra dev")
    options = {"base_url": f"{server.url}/v1", "api_key": KEY, "model": "tiny", "max_tokens": 10, "seed": 2}
    chat = langchain_openai.ChatOpenAI(**options, temperature=0.5)
    message = chat.invoke("Mr. Darcy had never")
    assert message.content
    assert message.usage_metadata["output_tokens"] <= 10
    assert "".join(chunk.content for chunk in chat.stream("Mr. Darcy had never")) == message.content
    assert asyncio.run(chat.ainvoke("Mr. Darcy had never")).content == message.content
    assert [answer.content for answer in chat.batch(["Mr. Darcy had never"] * 3)] == [message.content] * 3
    with pytest.raises(Exception, match="context length"):
        chat.invoke("a " * 3000)


def test_langchain_structured_output(server: LiveServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai belongs to the extra dev")
    chat = langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key=KEY, model="tiny", max_tokens=80, seed=1)
    schema = {
        "title": "verdict",
        "type": "object",
        "properties": {"good": {"type": "boolean"}},
        "required": ["good"],
        "additionalProperties": False,
    }
    verdict = chat.with_structured_output(schema, method="json_schema").invoke("Is it good?")
    assert verdict in ({"good": True}, {"good": False})


# ---- curl and the examples ---------------------------------------------------------------------------------------


def run(*command: str | Path) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_curl(server: LiveServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines = run("sh", CLIENTS / "curl.sh", server.url, KEY).splitlines()
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    assert answers[0]["status"] == "ready"
    assert answers[1]["data"][0]["id"] == "tiny"
    assert answers[2]["usage"]["completion_tokens"] <= 16
    assert answers[3]["choices"][0]["message"]["content"]
    assert answers[4]["count"] == len(answers[4]["tokens"])
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events[:-1])
    refused = subprocess.run(["sh", CLIENTS / "curl.sh", server.url, "wrong"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "invalid_api_key" in refused.stdout


@pytest.mark.parametrize(
    ("name", "module"), [("openai_client.py", "openai"), ("langchain_client.py", "langchain_openai")]
)
def test_examples_run(server: LiveServer, name: str, module: str) -> None:
    pytest.importorskip(module, reason=f"{module} belongs to the extra dev")
    shown = dict(
        line.split(": ", 1)
        for line in run(sys.executable, CLIENTS / name, f"{server.url}/v1", KEY).splitlines()
        if ": " in line
    )
    assert shown["answer"].strip()
    if module == "openai":
        assert shown["stream"].strip() == shown["answer"].strip(), "same request, same bits"


def test_llmc_chat_talks_to_it(server: LiveServer) -> None:
    command = [sys.executable, "-P", "-m", "llmc.cli.main", "chat", server.url, "--api-key", KEY]
    options = ["--max-tokens", "10", "--seed", "1", "--stats"]
    result = subprocess.run([*command, *options], input="She was\n", capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    body = {"messages": [{"role": "user", "content": "She was"}], "max_tokens": 10, "seed": 1}
    answer = server.ask("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"}).json()
    assert result.stdout == answer["choices"][0]["message"]["content"] + "\n"
    assert f"answer {answer['usage']['completion_tokens']} tokens, first token " in result.stderr
