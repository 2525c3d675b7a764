"""Bytes that are no HTTP, or come slowly, or stop coming: a plain 4xx at most, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.attacks import BODY, CHUNKED, HOST, JSON_HEAD, check_alive, check_refused, parse_raw
from support.live_server import PATIENCE_S, LiveServer, serving
from support.server_harness import until

pytestmark = pytest.mark.usefixtures("it_goes_on")


@pytest.fixture(scope="module")
def server(chat_artifact: Path) -> Iterator[LiveServer]:
    with serving(chat_artifact, "--served-model-name", "tiny") as server:
        yield server


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
    hidden = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
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


def test_a_client_that_shuts_its_side_down_gets_its_answers(server: LiveServer) -> None:
    """As netcat and scripts do: all is sent, the writing side is closed, and the answer is awaited."""
    request = JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    chunked = CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    long = json.dumps({"prompt": ["Hi"] * 64, "n": 64, "max_tokens": 5, "ignore_eos": True}).encode()
    many = JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(long) + long
    stream = long[:-1] + b', "stream": true}'
    streamed = JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(stream) + stream
    old = many.replace(b"HTTP/1.1", b"HTTP/1.0")
    for data, num_answers in ((request, 1), (chunked, 1), (request * 3, 3), (many, 1), (streamed, 1), (old, 1)):
        received = server.send_raw(data)
        assert received.count(b"HTTP/1.1 200 OK\r\n") == num_answers, received[:300]
        answers = received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 200 OK\r\n")
        assert answers[0] == b"", "nothing but interim answers before the answer"
        for answer in answers[1:]:
            head, _, content = answer.partition(b"\r\n\r\n")
            assert b"[DONE]" in content if b"event-stream" in head else json.loads(content)["choices"]
        if data is old:
            assert b"100 Continue" not in received


def test_an_offer_of_another_protocol_is_declined(server: LiveServer) -> None:
    """Java's HTTP client offers HTTP/2 with its first request; the body and the requests after it are read as usual."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    with_length = JSON_HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    chunked = CHUNKED[:-2] + offer + b"\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    bare = b"GET /health HTTP/1.1\r\n" + HOST + offer + b"\r\n"
    received = server.send_raw(with_length + chunked + bare + with_length)
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 4, received
    assert received.count(b'"text"') == 3
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        for byte in with_length:
            connection.sendall(bytes([byte]))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


def test_http_1_0_gets_no_chunks(server: LiveServer) -> None:
    body = BODY[:-1] + b', "stream": true}'
    request = JSON_HEAD.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(body) + body
    head, _, content = server.send_raw(request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = content.split(b"\n\n")
    assert json.loads(events[0].removeprefix(b"data: "))["choices"]
    assert events[-2:] == [b"data: [DONE]", b""]


def test_head_is_get_without_its_body(server: LiveServer) -> None:
    for path in (b"/health", b"/", b"/v1/models", b"/metrics"):
        rest = b" " + path + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
        head, _, nothing = server.send_raw(b"HEAD" + rest).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), path
        assert nothing == b""
    assert parse_raw(server.send_raw(b"HEAD /v1/completions HTTP/1.1\r\n" + HOST + b"\r\n"))[0] == 405


def test_a_client_that_leaves_within_its_body_is_no_error_of_the_server(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        connection.sendall(JSON_HEAD + b"Content-Length: 33\r\n\r\n" + BODY[:10])
    until(lambda: b'status="499"' in server.ask("GET", "/metrics").content)
    assert b'status="500"' not in server.ask("GET", "/metrics").content
    until(lambda: any('"status":499' in line for line in server.log))
    assert "Traceback" not in "".join(server.log)


def test_a_client_that_leaves_ends_its_request(server: LiveServer) -> None:
    """It closes both sides, which looks the same as closing one of them until something is sent to it."""
    body = json.dumps({"prompt": ["Hi"] * 64, "n": 64, "max_tokens": 50, "ignore_eos": True}).encode()

    def num_requests() -> int:
        return int(server.ask("GET", "/v1/llmc/state").json()["num_requests"])

    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        connection.sendall(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: num_requests() > 0)
    until(lambda: num_requests() == 0)
    finished = server.ask("GET", "/metrics").content
    assert int(float(re.search(rb'finished_total{finish_reason="cancelled"} (\S+)', finished)[1])) > 0  # type: ignore[index]


SLOW = {
    "nothing": b"",
    "half a request line": b"GET /hea",
    "half a head": JSON_HEAD + b"Content-Len",
    "half a body": JSON_HEAD + b"Content-Length: 33\r\n\r\n" + BODY[:10],
    "half a chunk": CHUNKED + b"21\r\n" + BODY[:10],
    "half a second head": b"GET /health HTTP/1.1\r\n" + HOST + b"\r\nGET /hea",
}


@pytest.fixture(scope="module")
def impatient(chat_artifact: Path) -> Iterator[LiveServer]:
    with serving(chat_artifact, "--served-model-name", "tiny", "--client-timeout", "0.2") as server:
        yield server


@pytest.mark.parametrize("name", SLOW)
def test_a_request_that_does_not_arrive_is_ended(impatient: LiveServer, name: str) -> None:
    """The server closes the connection, which this side keeps open."""
    with socket.create_connection(("127.0.0.1", impatient.port), PATIENCE_S) as connection:
        connection.sendall(SLOW[name])
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    answers = received.split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == ([b"200", b"408"] if "second" in name else [b"408"])
    assert answers[-1].endswith(b"The request took too long to arrive.")
    check_alive(impatient)


def test_a_body_that_does_not_arrive_is_told_as_its_client_was(impatient: LiveServer) -> None:
    """In the access log and in the metrics."""
    head = JSON_HEAD + b"X-Request-Id: half\r\nContent-Length: 33\r\n\r\n"
    with socket.create_connection(("127.0.0.1", impatient.port), PATIENCE_S) as connection:
        connection.sendall(head + BODY[:10])
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    until(lambda: any('"request_id":"half"' in line for line in impatient.log))
    assert ['"status":408' in line for line in impatient.log if '"request_id":"half"' in line] == [True]
    found = impatient.ask("GET", "/metrics").content
    assert b'status="408"' in found
    assert b'status="499"' not in found


def test_a_drop_at_a_time_is_too_slow(impatient: LiveServer) -> None:
    """The time is that of the whole head: bytes that keep coming do not extend it."""
    with socket.create_connection(("127.0.0.1", impatient.port), PATIENCE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        connection.settimeout(0.05)
        received = None
        while received is None:
            try:
                received = connection.recv(65536)
            except TimeoutError:
                connection.sendall(b"a")
            except ConnectionError:
                received = b"HTTP/1.1 408"
    assert received.startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_is_left(impatient: LiveServer) -> None:
    ask = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", impatient.port))
        # Far more than fits the buffers on the way; where the server has gone the send fails.
        with pytest.raises(ConnectionError):
            connection.sendall(ask * 1_000_000)
    check_alive(impatient)


def test_an_answer_that_takes_long_is_not_slow_to_arrive(impatient: LiveServer) -> None:
    """Neither while it is generated nor while the client has begun its next request."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 50, "n": 64, "ignore_eos": True, "stream": True}).encode()
    request = JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", impatient.port), PATIENCE_S) as connection:
        for next_one in (b"", b"GET /hea"):
            connection.sendall(request + next_one)
            received = b""
            while b"data: [DONE]" not in received:
                chunk = connection.recv(65536)
                assert chunk, received[-300:]
                received += chunk
            assert received.startswith(b"HTTP/1.1 200")
            while not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(65536)


def test_connections_may_be_many() -> None:
    """Each is an open file, of which many systems allow 1024 to a process that asks for no more."""
    code = (
        "import resource as r\n"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, hard))\n"
        "from llmc.runtime.server.file_limit import raise_file_limit\n"
        "raise_file_limit()\n"
        "wanted = 65536 if hard == r.RLIM_INFINITY else min(65536, hard)\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE) == (wanted, hard))\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.stdout == "True\n", result.stderr


def test_clients_that_leave_free_what_they_used(server: LiveServer) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 50, "stream": True, "ignore_eos": True}).encode()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
            connection.sendall(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    check_alive(server)


def test_connections_beyond_the_limit_of_files_are_told_of(server: LiveServer) -> None:
    """Once, however many there are."""
    pid, told = server.process.pid, "and more connections are reset: raise the hard limit"
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = max(int(file.name) for file in Path(f"/proc/{pid}/fd").iterdir()) + 20
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with contextlib.ExitStack() as open_ones:
            for _ in range(40):
                open_ones.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S))
            until(lambda: any(told in line for line in server.log))
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    check_alive(server)
    (line,) = [line for line in server.log if told in line]
    assert f"nearly {limit} files are open" in line
