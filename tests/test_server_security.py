"""What SECURITY.md claims: whatever a client sends, the answer is a 4xx in OpenAI's shape and the server goes on."""

from __future__ import annotations

import ast
import json
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import PATIENCE_S, LiveServer, serving

ROOT = Path(__file__).resolve().parent.parent
KEY = "a-key-of-the-test"
SECRET = "secret-text-of-a-prompt"
MAX_BODY = 2 << 20


@pytest.fixture(scope="module")
def server(chat_artifact: Path) -> Iterator[LiveServer]:
    with serving(chat_artifact, "--served-model-name", "tiny", "--max-body-size", str(MAX_BODY)) as server:
        yield server


@pytest.fixture(autouse=True)
def it_goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every attack the server is there, healthy, and answers as before."""
    yield
    if "server" in request.fixturenames:
        check_alive(request.getfixturevalue("server"))


def check_alive(server: LiveServer) -> None:
    assert server.process.poll() is None, "".join(server.log)
    assert server.ask("GET", "/health").json() == {"status": "ok"}
    assert server.ask("GET", "/ready").status == 200
    answer = server.ask("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2, "temperature": 0})
    assert answer.status == 200, answer.content


def check_refused(status: int, content: bytes) -> dict[str, Any]:
    """The error of an answer that must be a 4xx in OpenAI's shape."""
    assert 400 <= status < 500, (status, content[:300])
    body = json.loads(content)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 1000, "an error does not echo what it got"
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    return dict(error)


def parse_raw(received: bytes) -> tuple[int, bytes]:
    head, _, content = received.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), content


# ---- bytes that are no HTTP --------------------------------------------------------------------------------------

HOST = b"Host: x\r\n"
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
BODY = b'{"prompt": "Hi", "max_tokens": 1}'
CHUNKED = JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

BROKEN = {
    "garbage": bytes(range(256)) * 40,
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 300,
    "long request line": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "long header": b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 300_000 + b"\r\n\r\n",
    "endless headers": b"GET /health HTTP/1.1\r\n" + HOST + b"".join(b"X-%d: y\r\n" % i for i in range(40_000)),
    "header without colon": b"GET /health HTTP/1.1\r\n" + HOST + b"nonsense\r\n\r\n",
    "header with NUL": b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n",
    "space before colon": JSON_HEAD + b"Content-Length : 5\r\n\r\n" + BODY,
    "long header at once": b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "bad chunk size": CHUNKED + b"xyz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "negative chunk size": CHUNKED + b"-5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "giant chunk size": CHUNKED + b"F" * 40 + b"\r\n" + BODY,
    "chunk longer than its size": CHUNKED + b"2\r\n" + BODY + b"\r\n0\r\n\r\n",
    "unknown transfer encoding": JSON_HEAD + b"Transfer-Encoding: gzip, magic\r\n\r\n" + BODY,
    "negative length": JSON_HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "length is no number": JSON_HEAD + b"Content-Length: 0x10\r\n\r\n" + BODY,
    "two lengths": JSON_HEAD + b"Content-Length: 5\r\nContent-Length: 33\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http(server: LiveServer, name: str) -> None:
    received = server.send_raw(BROKEN[name])
    if received:
        status, _ = parse_raw(received)
        assert 400 <= status < 500, received[:200]


def test_a_head_is_limited_not_what_follows_it(server: LiveServer) -> None:
    """Many requests over one connection, each with a head and body that come in one read, or in many."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 1, "unknown": "x" * 200_000}).encode()
    one = JSON_HEAD + b"X: " + b"a" * 50_000 + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        for _ in range(4):
            connection.sendall(one)
            received = b""
            while not received.endswith(b"}}}"):
                chunk = connection.recv(65536)
                assert chunk, received
                received += chunk
            assert received.startswith(b"HTTP/1.1 200"), received


def test_a_body_that_never_ends_reaches_nobody(server: LiveServer) -> None:
    for data in (JSON_HEAD + b"Content-Length: 33\r\n\r\n" + BODY[:10], CHUNKED + b"21\r\n" + BODY[:10]):
        received = server.send_raw(data)
        assert not received or 400 <= parse_raw(received)[0] < 500


def test_a_smuggled_request_is_not_answered(server: LiveServer) -> None:
    hidden = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    received = server.send_raw(JSON_HEAD + both + b"0\r\n\r\n" + hidden)
    assert b"HTTP/1.1 200" not in received.split(b"\r\n")[0]
    # The chunks count, as the standard says: what follows them is a request of its own, what is in a body is not.
    assert received.count(b"HTTP/1.1 ") <= 2
    length = b"Content-Length: %d\r\n\r\n" % (len(BODY) + len(hidden))
    received = server.send_raw(JSON_HEAD + length + BODY + hidden, end=False)
    assert check_refused(*parse_raw(received))["code"] == "invalid_json"


def test_slow_clients_keep_nobody_waiting(server: LiveServer) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(60)]
    try:
        for index, connection in enumerate(slow):
            data = JSON_HEAD + b"Content-Length: 33\r\n\r\n" + BODY
            connection.sendall(data[: 10 + 2 * index])
        check_alive(server)
        for connection in slow[:20]:
            connection.sendall(b"\x00")
    finally:
        for connection in slow:
            connection.close()


def test_clients_that_leave_free_what_they_used(server: LiveServer) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 50, "stream": True, "ignore_eos": True}).encode()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
            connection.sendall(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    check_alive(server)


# ---- bodies that are no request ----------------------------------------------------------------------------------


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
    "int beyond 64 bits": '{"prompt": "Hi", "seed": 18446744073709551616}',
    "int of 400 digits": f'{{"prompt": "Hi", "seed": {"9" * 400}}}',
    "giant token": f'{{"prompt": [{"9" * 4000}]}}',
    "token beyond int32": '{"prompt": [4294967299]}',
    "negative token": '{"prompt": [-1]}',
    "token is true": '{"prompt": [true]}',
    "token is 1.0": '{"prompt": [1.0]}',
    "tokens and texts": '{"prompt": [1, "a"]}',
    "prompt of three levels": '{"prompt": [[[1]]]}',
    "no prompt": "{}",
    "prompt is null": '{"prompt": null}',
    "prompt is an object": '{"prompt": {}}',
    "empty prompt": '{"prompt": []}',
    "no tokens": '{"prompt": ""}',
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
    for body in ({"prompt": "a", "messages": []}, {"prompt": 3}, {"prompt": "\ud800"}, {"messages": [{}]}):
        check_refused(*shape(server, "/tokenize", body))
    for tokens in ([-1], [10**9], [10**30], ["a"], [1.5], [True], 3, None):
        check_refused(*shape(server, "/detokenize", {"tokens": tokens}))


def shape(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    answer = server.ask("POST", path, body)
    return answer.status, answer.content


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


# ---- templates ---------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% for x in range(10**9) %}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_messages_are_text_not_templates(server: LiveServer, text: str) -> None:
    for message in ({"role": "user", "content": text}, {"role": text, "content": "a"}):
        answer = server.ask("POST", "/tokenize", {"messages": [message]})
        assert answer.status == 200, answer.content
        plain = server.ask("POST", "/detokenize", {"tokens": answer.json()["tokens"]}).json()["prompt"]
        assert text in plain, "it is in the prompt as it was written"


@pytest.mark.parametrize(
    "variables",
    [
        {"__class__": 1},
        {"self": {"__init__": 1}},
        {"loop": []},
        {"namespace": "x", "range": 3, "dict": [], "raise_exception": None, "strftime_now": {}},
        {"bos_token": {"__globals__": 1}, "eos_token": ["x"] * 10},
        {"tools": [1]},
        {"add_generation_prompt": False},
        {"messages": []},
        {"": 1, "a b": 2, "\x00": 3},
        {"x" * 10_000: "y"},
        {"__builtins__": {"eval": "x"}, "environment": "y", "caller": 1, "varargs": 2},
    ],
)
def test_template_variables_are_data(server: LiveServer, variables: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "chat_template_kwargs": variables}
    answer = server.ask("POST", "/v1/chat/completions", body)
    if answer.status != 200:
        check_refused(answer.status, answer.content)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ lipsum.__globals__.os.popen('id') }}",
        "{% for x in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ strftime_now.__code__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    ],
)
def test_a_models_template_cannot_reach_python(template: str) -> None:
    """A model directory is data that somebody else made."""
    from llmc.runtime.chat_template import ChatTemplateError, ChatTemplates
    from llmc.runtime.params import RequestError

    templates = ChatTemplates(Path("/nowhere"), {"chat_template": template})
    try:
        shown = templates.render([{"role": "user", "content": "Hi"}])
    except (RequestError, ChatTemplateError):
        return
    assert not shown.strip(), f"the template showed {shown[:200]!r}"


# ---- files -------------------------------------------------------------------------------------------------------

PATHS = [
    "../../../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "\x00",
    "C:\\",
    "~/.ssh",
]


@pytest.mark.parametrize("name", PATHS)
def test_model_names_are_no_paths(server: LiveServer, name: str) -> None:
    for path, field in (("/v1/completions", {"prompt": "Hi"}), ("/tokenize", {"prompt": "Hi"})):
        error = check_refused(*shape(server, path, {"model": name, **field}))
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    "target",
    ["/../../etc/passwd", "/page.css/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/v1/models/"]
    + [f"/v1/models/{name}" for name in ("../../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "\\etc")],
)
def test_paths_lead_to_no_file(server: LiveServer, target: str) -> None:
    status, content = parse_raw(
        server.send_raw(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    )
    assert b"root:" not in content
    if target == "/v1/models/":
        assert status in (200, 307)
    else:
        assert check_refused(status, content)["type"] == "not_found_error"


def test_requests_open_no_file(chat_artifact: Path) -> None:
    """Everything a process opens passes its audit hooks: nothing that a request says is among it."""
    program = (
        "import asyncio, json, sys\n"
        "from pathlib import Path\n"
        "import httpx\n"
        "from llmc.runtime.server.app import create_app\n"
        "from llmc.runtime.server.async_engine import AsyncEngine\n"
        "from llmc.runtime.server.config import ServerConfig\n"
        "config = ServerConfig(Path(sys.argv[1]), ('tiny',), access_log=False)\n"
        "app = create_app(config, AsyncEngine(config.artifact))\n"
        "seen, watching = [], False\n"
        "FAMILIES = ('open', 'os', 'subprocess', 'shutil', 'socket', 'pickle', 'exec', 'compile', 'ctypes', 'import')\n"
        "def hook(event, arguments):\n"
        "    if watching and event.split('.')[0] in FAMILIES:\n"
        "        seen.append((event, repr(arguments)))\n"
        "sys.addaudithook(hook)\n"
        "async def main():\n"
        "    global watching\n"
        "    async with app.router.lifespan_context(app):\n"
        "        transport = httpx.ASGITransport(app)\n"
        "        async with httpx.AsyncClient(transport=transport, base_url='http://x') as client:\n"
        "            while (await client.get('/ready')).status_code != 200: await asyncio.sleep(0.01)\n"
        "            statuses = []\n"
        # The first round imports what is imported at its first use.
        "            for round in range(2):\n"
        "                for path in ('/v1/completions', '/v1/chat/completions', '/tokenize'):\n"
        "                    for name in ('/marker/x', '../marker', 'tiny'):\n"
        "                        body = {'model': name, 'max_tokens': 1, 'user': '/marker'}\n"
        "                        message = {'role': 'user', 'content': '/marker/y', 'name': '/marker/z'}\n"
        "                        body |= {'messages': [message]} if 'chat' in path else {'prompt': '/marker/file'}\n"
        "                        watching = round == 1\n"
        "                        answer = await client.post(path, json=body)\n"
        "                        await client.get('/v1/models/' + name)\n"
        "                        watching = False\n"
        "                        statuses.append(answer.status_code)\n"
        "    print(json.dumps({'statuses': statuses, 'seen': seen}))\n"
        "asyncio.run(main())\n"
    )
    import subprocess

    pytest.importorskip("httpx", reason="httpx belongs to the extra dev")
    command = [sys.executable, "-P", "-c", program, str(chat_artifact)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["statuses"] == [404, 404, 200] * 6
    assert [event for event in report["seen"] if "marker" in event[1]] == []
    assert {event[0] for event in report["seen"]} <= {"ctypes.addressof", "ctypes.cdata", "ctypes.call_function"}


# ---- keys --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(chat_artifact: Path) -> Iterator[LiveServer]:
    with serving(chat_artifact, "--served-model-name", "tiny", "--api-key", KEY, "--api-key", "other") as server:
        yield server


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}x",
        f"Basic {KEY}",
        KEY,
        "Bearer é",
    ],
)
def test_without_a_key_nothing_is_told(guarded: LiveServer, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/v1/llmc/state"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
    ):
        answer = guarded.ask(method, path, BODY if method == "POST" else None, headers)
        assert answer.status == 401, (path, answer.content)
        assert check_refused(answer.status, answer.content)["code"] == "invalid_api_key"


def test_each_key_opens(guarded: LiveServer) -> None:
    for key in (KEY, "other"):
        answer = guarded.ask("POST", "/v1/completions", BODY, {"Authorization": f"Bearer {key}"})
        assert answer.status == 200, answer.content
    assert guarded.ask("GET", "/health").status == 200
    assert not any(KEY in line for line in guarded.log), "a key is never logged"


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    from llmc.runtime.server.config import ServerConfig
    from llmc.runtime.server.security import ApiKeys

    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return real(given, key)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = ApiKeys(lambda *_: None, ["one", "two", "three"])  # type: ignore[arg-type, return-value]
    scope = {"type": "http", "headers": [(b"authorization", b"Bearer one")]}
    assert keys._known(scope)
    assert compared == [b"one", b"two", b"three"]
    assert KEY not in repr(ServerConfig(Path("x"), ("x",), api_keys=(KEY,)))


# ---- what goes out -----------------------------------------------------------------------------------------------


def test_prompts_are_not_logged(server: LiveServer) -> None:
    server.ask("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": 1})
    server.ask("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": -1})
    server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1})
    server.ask("GET", "/health")
    assert not any(SECRET in line for line in server.log)


def test_request_ids_cannot_forge_lines(server: LiveServer) -> None:
    for given in ("a\tb", "x" * 1000, "é", '"}'):
        answer = server.ask("GET", "/health", headers={"X-Request-Id": given.encode().decode("latin-1")})
        assert answer.status == 200
    logged = [line for line in server.log if line.startswith("{")]
    assert logged
    for line in logged:
        json.loads(line)


def test_other_origins_get_no_permission(server: LiveServer) -> None:
    answer = server.ask("GET", "/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_errors_tell_nothing_of_the_machine(server: LiveServer, chat_artifact: Path) -> None:
    for body in (b"{", b'{"prompt": 3}', b'{"model": "x", "prompt": "Hi"}', b'{"prompt": "' + b"a" * 9999 + b'"}'):
        answer = server.ask("POST", "/v1/completions", body)
        assert str(chat_artifact.parent).encode() not in answer.content
        assert b"Traceback" not in answer.content


# ---- what the code does not do -----------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "importlib.util"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", sorted((ROOT / "runtime").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_runtime_runs_no_code_from_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{node.func.id} in line {node.lineno}"
        assert not FORBIDDEN_MODULES.intersection(names), f"{names} in line {node.lineno}"
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code", "shell"):
            assert isinstance(node.value, ast.Constant), node.arg
            assert node.value.value is False, node.arg


def test_a_pickled_checkpoint_is_not_opened(tmp_path: Path) -> None:
    """Weights in torch's own format can run code as they are read."""
    import pickle
    import subprocess

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((ROOT / "examples" / "tiny-english" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    (model / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    command = [sys.executable, "-P", "-m", "llmc.cli.main", "compile", str(model), "-o", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
