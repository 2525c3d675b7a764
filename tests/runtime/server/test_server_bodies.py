"""Bodies that are no request: whatever a client sends, the answer is a 4xx in OpenAI's shape and the server goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.attacks import BODY, CHUNKED, JSON_HEAD, ask, check_refused, parse_raw
from support.live_server import LiveServer, serving

MAX_BODY = 2 << 20


pytestmark = pytest.mark.usefixtures("it_goes_on")


@pytest.fixture(scope="module")
def server(chat_artifact: Path) -> Iterator[LiveServer]:
    with serving(chat_artifact, "--served-model-name", "tiny", "--max-body-size", str(MAX_BODY)) as server:
        yield server


def deep(levels: int, opening: str, closing: str, inner: str = "") -> str:
    return opening * levels + inner + closing * levels


NOT = '{"not":'
COMPLETION_BODIES: dict[str, str | bytes] = {
    "empty": "",
    "no JSON": "prompt=Hi",
    "list": "[]",
    "null": "null",
    "text": '"Hi"',
    "number": "3",
    "cut": '{"prompt": "Hi"',
    "trailing": '{"prompt": "Hi"} {"prompt": "Ho"}',
    "deep lists": deep(100_000, "[", "]"),
    "deep objects": deep(100_000, '{"a":', "}", "1"),
    "deep prompt": f'{{"prompt": {deep(100_000, "[", "]")}}}',
    "deep unknown field": f'{{"prompt": "Hi", "x": {deep(100_000, "[", "]")}}}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe\xc3"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "lone surrogate": '{"prompt": "\\ud800"}',
    "NaN": '{"prompt": "Hi", "temperature": NaN}',
    "Infinity": '{"prompt": "Hi", "temperature": Infinity}',
    "-Infinity": '{"prompt": "Hi", "presence_penalty": -Infinity}',
    "1e999": '{"prompt": "Hi", "temperature": 1e999}',
    "NaN bias": '{"prompt": "Hi", "logit_bias": {"5": NaN}}',
    "giant int": f'{{"prompt": "Hi", "max_tokens": {"9" * 5000}}}',
    "giant unknown int": f'{{"prompt": "Hi", "x": {"9" * 5000}}}',
    "int beyond 64 bits": '{"prompt": "Hi", "max_tokens": 18446744073709551616}',
    "int of 400 digits": f'{{"prompt": "Hi", "max_tokens": {"9" * 400}}}',
    "giant token": f'{{"prompt": [{"9" * 4000}]}}',
    "token beyond int32": '{"prompt": [4294967299]}',
    "negative token": '{"prompt": [-1]}',
    "token is true": '{"prompt": [true]}',
    "token is 1.5": '{"prompt": [1.5]}',
    "tokens and texts": '{"prompt": [1, "a"]}',
    "prompt of three levels": '{"prompt": [[[1]]]}',
    "no prompt": "{}",
    "prompt is null": '{"prompt": null}',
    "prompt is an object": '{"prompt": {}}',
    "empty prompt": '{"prompt": []}',
    "no tokens": '{"prompt": [[]]}',
    "too many prompts": json.dumps({"prompt": ["a"] * 1025}),
    "long prompt": json.dumps({"prompt": "a" * 1_000_000}),
    "n is 65": '{"prompt": "Hi", "n": 65}',
    "n is 0": '{"prompt": "Hi", "n": 0}',
    "n is text": '{"prompt": "Hi", "n": "2"}',
    "max_tokens is true": '{"prompt": "Hi", "max_tokens": true}',
    "max_tokens beyond the context": '{"prompt": "Hi", "max_tokens": 2147483647}',
    "many stops": json.dumps({"prompt": "Hi", "stop": ["a"] * 10_000}),
    "empty stop": '{"prompt": "Hi", "stop": ""}',
    "stop is a number": '{"prompt": "Hi", "stop": 3}',
    "many stop tokens": json.dumps({"prompt": "Hi", "stop_token_ids": [1] * 10_000}),
    "bias of a word": '{"prompt": "Hi", "logit_bias": {"the": 1}}',
    "bias of a negative token": '{"prompt": "Hi", "logit_bias": {"-1": 1}}',
    "bias of a giant token": '{"prompt": "Hi", "logit_bias": {"99999999999": 1}}',
    "bias of a token that is none": '{"prompt": "Hi", "logit_bias": {"2000000000": 1}}',
    "bias of 10^6": '{"prompt": "Hi", "logit_bias": {"1": 1000000}}',
    "many biases": json.dumps({"prompt": "Hi", "logit_bias": {str(i): 0.5 for i in range(100_000)}}),
    "logprobs of 1000": '{"prompt": "Hi", "logprobs": 1000}',
    "priority of 10^30": f'{{"prompt": "Hi", "priority": 1{"0" * 30}}}',
    "code": '{"prompt": "Hi", "logits_processors": ["os.system"]}',
    "model is a number": '{"prompt": "Hi", "model": 3}',
    "stream_options without stream": '{"prompt": "Hi", "stream_options": {"include_usage": true}}',
    "regex of the devil": json.dumps({"prompt": "Hi", "guided_regex": "(" * 50_000}),
    "grammar of nothing": '{"prompt": "Hi", "guided_grammar": "not a grammar {"}',
    "unknown schema": '{"prompt": "Hi", "guided_json": {"type": "nonsense"}}',
    "deep schema": f'{{"prompt": "Hi", "guided_json": {deep(2000, NOT, "}", "{}")}}}',
    "schema of the file system": '{"prompt": "Hi", "guided_json": {"$ref": "file:///etc/passwd"}}',
    "response_format is text": '{"prompt": "Hi", "response_format": "json"}',
}


@pytest.mark.parametrize("name", COMPLETION_BODIES)
def test_bodies_that_are_no_completion_request(server: LiveServer, name: str) -> None:
    body = COMPLETION_BODIES[name]
    answer = server.ask("POST", "/v1/completions", body.encode() if isinstance(body, str) else body)
    check_refused(answer.status, answer.content)
    assert answer.headers.get("X-Request-Id") or answer.headers.get("x-request-id")


HI = '"messages": [{"role": "user", "content": "Hi"}]'
CHAT_BODIES: dict[str, str] = {
    "no messages": "{}",
    "empty": '{"messages": []}',
    "messages is an object": '{"messages": {"role": "user"}}',
    "message is a text": '{"messages": ["Hi"]}',
    "message is null": '{"messages": [null]}',
    "no role": '{"messages": [{"content": "Hi"}]}',
    "role is a number": '{"messages": [{"role": 3, "content": "Hi"}]}',
    "content is a number": '{"messages": [{"role": "user", "content": 3}]}',
    "content is an object": '{"messages": [{"role": "user", "content": {"a": 1}}]}',
    "part of an image": json.dumps(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}
    ),
    "part is null": '{"messages": [{"role": "user", "content": [null]}]}',
    "deep content": f'{{"messages": [{{"role": "user", "content": {deep(100_000, "[", "]")}}}]}}',
    "deep variable": f'{{{HI}, "chat_template_kwargs": {{"a": {deep(100_000, "[", "]")}}}}}',
    "variable of a reserved name": f'{{{HI}, "chat_template_kwargs": {{"messages": {deep(150, "[", "]")}}}}}',
    "variables are a list": f'{{{HI}, "chat_template_kwargs": []}}',
    "tool is null": f'{{{HI}, "tools": [null]}}',
    "tool call without function": '{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
    "tool calls are a text": '{"messages": [{"role": "assistant", "content": null, "tool_calls": "x"}]}',
    "lone surrogate": '{"messages": [{"role": "user", "content": "\\udfff"}]}',
    "top_logprobs of 21": f'{{{HI}, "logprobs": true, "top_logprobs": 21}}',
    "giant conversation": json.dumps({"messages": [{"role": "user", "content": "a"}] * 20_000}),
    "a template": f'{{{HI}, "chat_template": "{{{{ 1 }}}}"}}',
    "functions": f'{{{HI}, "functions": [{{"name": "f"}}]}}',
    "audio": f'{{{HI}, "modalities": ["audio"]}}',
}


@pytest.mark.parametrize("name", CHAT_BODIES)
def test_bodies_that_are_no_chat_request(server: LiveServer, name: str) -> None:
    answer = server.ask("POST", "/v1/chat/completions", CHAT_BODIES[name].encode())
    check_refused(answer.status, answer.content)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", [name for name, body in COMPLETION_BODIES.items() if "prompt" not in str(body)])
def test_bodies_that_are_nothing(server: LiveServer, path: str, name: str) -> None:
    body = COMPLETION_BODIES[name]
    answer = server.ask("POST", path, body.encode() if isinstance(body, str) else body)
    check_refused(answer.status, answer.content)


def test_tokenizer_endpoints_check_their_fields(server: LiveServer) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "a", "messages": []},
        {"prompt": 3},
        {"prompt": "\ud800"},
        {"messages": [{}]},
    ]
    for body in bodies:
        check_refused(*ask(server, "/tokenize", body))
    for tokens in ([-1], [10**9], [10**30], ["a"], [1.5], [True], 3, None):
        check_refused(*ask(server, "/detokenize", {"tokens": tokens}))


def test_what_is_odd_but_valid_is_answered(server: LiveServer) -> None:
    odd = [
        # The last of two equal keys counts, as everywhere in Python.
        b'{"prompt": "a", "prompt": "Hi", "max_tokens": 1}',
        b'\xef\xbb\xbf{"prompt": "Hi", "max_tokens": 1}',
        b'{"prompt": "\\u0000\\u001b[2J", "max_tokens": 1}',
        '{"prompt": "é\U0001f600", "max_tokens": 1}'.encode(),
        b' \n\t{"prompt": "Hi", "max_tokens": 1, "seed": -9223372036854775808}',
        b'{"prompt": "Hi", "max_tokens": 1, "unknown": {"a": [1, NaN]}}',
        '{"prompt": "Hi", "max_tokens": 1}'.encode("utf-16"),
    ]
    for body in odd:
        answer = server.ask("POST", "/v1/completions", body)
        assert answer.status in (200, 400), (body, answer.content)
        assert answer.status == 200 or check_refused(answer.status, answer.content)["code"] == "invalid_json"
    assert server.ask("POST", "/v1/completions", odd[0]).json()["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "x" * 999]
)
def test_wrong_content_types(server: LiveServer, kind: str) -> None:
    answer = server.ask("POST", "/v1/completions", BODY, {"Content-Type": kind})
    check_refused(answer.status, answer.content)


def test_bodies_above_the_limit(server: LiveServer) -> None:
    large = b'{"prompt": "' + b"a" * MAX_BODY + b'"}'
    declared = JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(large)
    status, content = parse_raw(server.send_raw(declared, end=False))
    assert status == 413
    assert str(MAX_BODY) in check_refused(status, content)["message"]
    chunks = b"".join(b"10000\r\n" + large[at : at + 0x10000] + b"\r\n" for at in range(0, MAX_BODY, 0x10000))
    received = server.send_raw(CHUNKED + chunks + b"10000\r\n" + b" " * 0x10000 + b"\r\n0\r\n\r\n")
    assert not received or parse_raw(received)[0] == 413
    # A length of its own does not make a body smaller than it is.
    answer = server.ask("POST", "/v1/completions", large)
    assert answer.status == 413
    check_refused(answer.status, answer.content)


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/completions"), ("GET", "/v1/completions"), ("TRACE", "/")])
def test_wrong_methods(server: LiveServer, method: str, path: str) -> None:
    answer = server.ask(method, path)
    check_refused(answer.status, answer.content)


def test_random_mutations_of_a_request(server: LiveServer) -> None:
    """Bytes changed, dropped and doubled: never a 5xx, whatever comes out."""
    source = json.dumps(
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 2,
            "temperature": 0.5,
            "stop": ["a", "b"],
            "logit_bias": {"5": -1.5},
            "n": 2,
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {"type": "text"},
            "stream_options": None,
        }
    ).encode()
    random_ = random.Random(1)
    statuses = set()
    for _ in range(300):
        data = bytearray(source)
        for _ in range(random_.choice((1, 1, 2, 5))):
            at = random_.randrange(len(data))
            match random_.randrange(3):
                case 0:
                    data[at] = random_.randrange(256)
                case 1:
                    del data[at : at + random_.randrange(1, 4)]
                case 2:
                    data[at:at] = data[at : at + random_.randrange(1, 8)]
        answer = server.ask("POST", "/v1/chat/completions", bytes(data))
        statuses.add(answer.status)
        if answer.status != 200:
            check_refused(answer.status, answer.content)
    assert {200, 400} <= statuses
