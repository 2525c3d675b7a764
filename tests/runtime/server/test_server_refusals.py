"""What the endpoints refuse, and how they say so: OpenAI's shape, the field at fault, one sentence."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from llmc.runtime.text.tokenizer import Tokenizer

from support.server_harness import Running, error_of, running_server

PROMPT = "It is a truth universally acknowledged, that"


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact) as running:
        yield running


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "required"),
        ({"prompt": []}, "prompt", "non-empty"),
        ({"prompt": [1, "a"]}, "prompt", "list"),
        ({"prompt": {"a": 1}}, "prompt", "string"),
        ({"prompt": [1 << 30]}, "prompt", "token id"),
        ({"prompt": [-1]}, "prompt", "token id"),
        ({"prompt": "x " * 2000}, "prompt", "This model's maximum context length is 512 tokens, and the prompt has"),
        ({"prompt": "x " * 2000}, "prompt", "(context_length_exceeded)"),
        ({"prompt": "x", "max_tokens": 10_000}, "max_tokens", "This model's maximum context length is"),
        ({"prompt": "x", "max_tokens": 10_000}, "max_tokens", "(context_length_exceeded)"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "greater"),
        ({"prompt": "x", "temperature": -0.1}, "temperature", "greater"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", '"hot"'),
        ({"prompt": "x", "top_p": -0.1}, "top_p", "greater"),
        ({"prompt": "x", "n": 0}, "n", "greater"),
        ({"prompt": "x", "n": True}, "n", "integer"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "less"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
        ({"prompt": "x", "stop": ""}, "stop", "non-empty"),
        ({"prompt": "x", "stop": [1]}, "stop", "non-empty"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a", 'not "a"'),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1", "101"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", "at most 4096"),
        ({"prompt": "x", "truncation_side": "right"}, "truncation_side", "left"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens", "17"),
        ({"prompt": "x", "best_of": 2, "n": 4}, "best_of", "no smaller than n"),
        ({"prompt": "x", "best_of": 4, "stream": True}, "stream", "at the end"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ({"prompt": "x", "use_beam_search": True, "logit_bias": {"1": 1}}, "logit_bias", "nothing is drawn"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"prompt": "x", "priority": 1 << 40}, "priority", "less"),
    ],
)
def test_refused_completions_name_the_field(running: Running, body: dict[str, Any], param: str, says: str) -> None:
    error = error_of(running.post("/v1/completions", **body), 400)
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0.function"),
        ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 4096}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "user", "content": "x"}], "modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools.0.function"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [3]}, "tools.0"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [tool("a b")]}, "tools.0.function.name"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [tool("a", [])]}, "tools.0.function.parameters"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [tool("a", {"type": "string"})]},
            "tools.0.function.parameters",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [tool(f"a{i}") for i in range(129)]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [tool("a")], "tool_choice": "b"}, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [tool("a")], "tool_choice": {"type": "function"}},
            "tool_choice.function",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {
                "messages": [{"role": "assistant", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4096, "max_completion_tokens": 1},
            "max_tokens",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [1 << 30]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "x"}], "logit_bias": {"9999999999": 1}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_refused_chats_name_the_field(running: Running, body: dict[str, Any], param: str) -> None:
    error = error_of(running.post("/v1/chat/completions", **body), 400)
    assert (error["param"] or "messages") == param


def test_fields_that_mean_nothing_are_ignored(running: Running) -> None:
    answer = running.complete(PROMPT, max_tokens=3, best_of=None, suffix=None, user="u", metadata={"a": "b"}, zzz=1)
    assert answer["usage"]["completion_tokens"] <= 3


def test_unknown_models_are_404(running: Running) -> None:
    for path, body in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        error = error_of(running.post(f"/v1/{path}", model="gpt", **body), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"prompt": ' + b"[" * 100_000])
def test_malformed_json_is_400(running: Running, content: bytes) -> None:
    response = running.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize("field", ["model", "prompt", "guided_regex", "stop"])
def test_half_a_surrogate_pair_is_refused(running: Running, field: str) -> None:
    body = json.dumps({"prompt": "x", field: "a\ud800b"}).encode()
    answer = running.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert "half a surrogate pair" in error_of(answer, 400)["message"]


def test_other_content_types_are_415(running: Running) -> None:
    response = running.client.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}
    )
    assert "application/json" in error_of(response, 415)["message"]
    no_body = running.client.get("/v1/llmc/state?quantiles=some")
    assert error_of(no_body, 400)["param"] == "quantiles"


def test_packed_bodies_are_415(running: Running) -> None:
    data = b'{"prompt": "x", "max_tokens": 1}'
    asked = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    for path in ("/v1/completions", "/v1/messages"):
        response = running.client.post(path, content=gzip.compress(data), headers=asked)
        assert response.status_code == 415
        assert "Content-Encoding 'gzip': send it unpacked" in response.json()["error"]["message"]
        assert response.headers["accept-encoding"] == "identity"
    plain = running.client.post("/v1/completions", content=data, headers={**asked, "Content-Encoding": "Identity"})
    assert plain.status_code == 200


def test_unknown_paths_and_methods_have_the_shape(running: Running) -> None:
    error_of(running.client.get("/v1/nothing"), 404)
    error_of(running.client.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/completion", "/v1/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/healthz", "/health"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_a_404_names_the_endpoints_nearest_first(running: Running, path: str, nearest: str) -> None:
    error = error_of(running.client.get(path), 404)
    assert error["code"] == "unknown_endpoint"
    assert error["message"].startswith(f"there is no endpoint {path}: use one of {nearest}, ")
    for known in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"):
        assert known in error["message"]


@pytest.mark.parametrize(
    ("path", "status", "times"), [("/favicon.ico", 404, 0), ("/v1/completions", 405, 0), ("/openapi.json", 200, 1)]
)
def test_the_loop_goes_on_while_the_document_is_made(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str, status: int, times: int
) -> None:
    """In another thread, and for nothing but itself."""
    made_by: list[threading.Thread] = []

    def document() -> dict[str, Any]:
        made_by.append(threading.current_thread())
        return {}

    async def this_thread() -> threading.Thread:
        return threading.current_thread()

    app = running.process.config.app
    assert isinstance(app, FastAPI)
    monkeypatch.setattr(app, "openapi", document)
    assert running.client.get(path).status_code == status
    assert len(made_by) == times
    assert running.on_loop(this_thread) not in made_by


def test_a_long_path_is_cut_and_escaped(running: Running) -> None:
    message = error_of(running.client.get("/%1b[31m" + "a" * 5000), 404)["message"]
    assert message.startswith("there is no endpoint /\\x1b[31maaa")
    assert len(message) <= 500
    assert "/v1/completions" in message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is missing: send a JSON object"),
        (b"null", "the body: give a JSON object, not null"),
        (b'{"messages": null}', "messages: input should be a valid list, not null"),
        (b'{"messages": {"role": ["x", true]}}', 'messages: input should be a valid list, not {"role": ["x", true]}'),
        (b'{"messages": []}', "messages: list should have at least 1 item, not 0"),
    ],
)
def test_a_body_of_another_kind(running: Running, body: bytes, says: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = running.client.post("/v1/chat/completions", content=body, headers=headers)
    assert error_of(response, 400)["message"] == says


def test_a_405_names_the_methods(running: Running) -> None:
    response = running.client.get("/v1/completions")
    error = error_of(response, 405)
    assert error["message"] == "/v1/completions does not take GET: use POST"
    assert (error["code"], response.headers["allow"]) == ("method_not_allowed", "POST")
    assert error_of(running.client.delete("/v1/models/tiny"), 405)["message"].endswith("does not take DELETE: use GET")
    # A path of two routes has the methods of both.
    response = running.client.put("/v1/responses/resp_1")
    assert error_of(response, 405)["message"].endswith("does not take PUT: use DELETE, GET")
    assert response.headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 1_050_000}),
        ("/v1/completions", {"prompt": ["a", "a" * 1_050_000]}),
        ("/tokenize", {"prompt": "a" * 1_050_000}),
    ],
)
def test_a_text_beyond_any_context_is_not_tokenised(
    running: Running, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    error = error_of(running.client.post(path, json=body), 400)
    assert "has 1050000 characters: at most 1048576 are read" in error["message"]
    assert error["code"] == "context_length_exceeded"
