"""The recipes of deploy/ for nginx and HAProxy before replicas: a replica that is lost is not seen."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

import httpx
import pytest

from support.paths import ROOT
from support.server_harness import PATIENCE_S, running_server

PROMPT = "It is a truth universally acknowledged, that"


class Proxy(Protocol):
    """Makes the command of a proxy, which has this name."""

    __name__: str

    def __call__(self, folder: Path, port: int, replicas: list[str]) -> list[str]: ...


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def nginx(folder: Path, port: int, replicas: list[str]) -> list[str]:
    """The command, with the recipe as its configuration but for addresses and TLS."""
    lines = (ROOT / "deploy" / "nginx-replicas.conf").read_text().splitlines()
    recipe = "\n".join(line for line in lines if "ssl" not in line)
    recipe = recipe.replace("server_name", f"listen 127.0.0.1:{port};\n    server_name")
    for known, one in zip(("127.0.0.1:8001", "127.0.0.1:8002"), replicas, strict=True):
        assert known in recipe
        recipe = recipe.replace(known, one)
    (folder / "llmc.conf").write_text(recipe)
    kept = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    head = f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/errors;\nevents {{}}\n"
    (folder / "nginx.conf").write_text(f"{head}http {{\naccess_log off;\n{kept}\ninclude {folder}/llmc.conf;\n}}\n")
    return ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "errors")]


def haproxy(folder: Path, port: int, replicas: list[str]) -> list[str]:
    """The same."""
    recipe = (ROOT / "deploy" / "haproxy.cfg").read_text()
    changes = {":443 ssl crt /etc/haproxy/llm.example.com.pem": f"127.0.0.1:{port}"}
    changes |= dict(zip(("127.0.0.1:8001", "127.0.0.1:8002"), replicas, strict=True))
    for known, one in changes.items():
        assert known in recipe
        recipe = recipe.replace(known, one)
    (folder / "haproxy.cfg").write_text(recipe)
    return ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]


@contextmanager
def running(command: list[str], url: str) -> Iterator[httpx.Client]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            end = time.monotonic() + PATIENCE_S
            while True:
                assert process.poll() is None, process.stdout and process.stdout.read()
                assert time.monotonic() < end
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.communicate()


def installed(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")


each_proxy = pytest.mark.parametrize("proxy", [nginx, haproxy], ids=["nginx", "haproxy"])


@contextmanager
def stub(name: str, full: threading.Event) -> Iterator[str]:
    """The address of a replica that tells its name, or 429 while it is full."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = 429 if full.is_set() and self.path != "/ready" else 200
            self.send_response(status)
            self.send_header("Content-Length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@each_proxy
def test_full_replicas_say_so_and_are_asked_again(proxy: Proxy, tmp_path: Path) -> None:
    """What they say is not an error of the proxy, which takes no replica out for it."""
    installed(proxy.__name__)
    port, full = free_port(), threading.Event()
    with (
        stub("a", full) as first,
        stub("b", full) as second,
        running(proxy(tmp_path, port, [first, second]), f"http://127.0.0.1:{port}") as client,
    ):
        full.set()
        assert {client.get("/v1/models").status_code for _ in range(16)} == {429}
        full.clear()
        assert {client.get("/v1/models").status_code for _ in range(16)} == {200}
        assert client.get("/metrics").status_code == client.get("/metrics/").status_code == 404


def test_nginx_keeps_a_session_at_its_replica(tmp_path: Path) -> None:
    installed("nginx")
    port, full = free_port(), threading.Event()
    with (
        stub("a", full) as first,
        stub("b", full) as second,
        running(nginx(tmp_path, port, [first, second]), f"http://127.0.0.1:{port}") as client,
    ):

        def asked(session: str | None) -> str:
            return client.get("/v1/models", headers={"X-Session": session} if session else {}).text

        by_session = {session: {asked(session) for _ in range(8)} for session in map(str, range(16))}
        assert all(len(replicas) == 1 for replicas in by_session.values())
        assert set.union(*by_session.values()) == {"a", "b"}
        assert {asked(None) for _ in range(64)} == {"a", "b"}


@each_proxy
def test_a_lost_replica_is_not_seen(proxy: Proxy, english_artifact: Path, tmp_path: Path) -> None:
    installed(proxy.__name__)
    port = free_port()
    with ExitStack() as first_stack, running_server(english_artifact) as second:
        first = first_stack.enter_context(running_server(english_artifact))
        replicas = [one.url.removeprefix("http://") for one in (first, second)]
        with running(proxy(tmp_path, port, replicas), f"http://127.0.0.1:{port}") as client:

            def ask(seed: int, *, stream: bool) -> str:
                body = {"prompt": PROMPT, "max_tokens": 5, "seed": seed, "stream": stream}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                return answer.text if stream else str(answer.json()["choices"][0]["text"])

            texts = [ask(seed, stream=False) for seed in range(8)]
            assert all(ask(seed, stream=True).endswith("data: [DONE]\n\n") for seed in range(8))
            first_stack.close()
            assert [ask(seed, stream=False) for seed in range(8)] == texts
