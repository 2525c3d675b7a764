"""A stand-in of the Hugging Face hub: the endpoints that huggingface_hub uses to download a model, over HTTP."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.forked import Parent

COMMIT = "c0ffee" + "0" * 34
NEXT_COMMIT = "decade" + "0" * 34


@dataclass
class FakeHub:
    """What the hub has, and what was asked of it.

    repos: files by commit by repository. branches: commits by (repository, name). gated: repositories that take only
    `token`. cut: bytes after which the connection breaks, by file, once; down_after_cut: and the hub is down then.
    broken: it is down. requests: (method, path, range) in order. python: runs what asks it.
    """

    url: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_good"
    broken: bool = False
    down_after_cut: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    python: Parent | None = None

    def add(self, repo: str, folder: Path, commit: str = COMMIT, /, **more: bytes) -> None:
        """Makes the files of a directory the main branch's newest commit; more: files by name, `__` for a dot."""
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.repos.setdefault(repo, {})[commit] = files | {n.replace("__", "."): data for n, data in more.items()}
        self.branches[repo, "main"] = commit

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if hub.broken:
                return self.fail(503, None)
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
                return self.info(found[1], found[2])
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
                return self.tree(found[1], found[2])
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self.file(found[1], found[2], found[3])
            self.fail(404, None)

        def commit(self, repo: str, revision: str) -> str | None:
            """The commit that a revision means; None when the answer has been a refusal."""
            if repo not in hub.repos:
                self.fail(401, "RepoNotFound")
                return None
            commit = hub.branches.get((repo, revision), revision)
            if commit not in hub.repos[repo]:
                self.fail(404, "RevisionNotFound")
                return None
            return commit

        def info(self, repo: str, revision: str) -> None:
            if (commit := self.commit(repo, revision)) is not None:
                files = [{"rfilename": name} for name in hub.repos[repo][commit]]
                self.send({"id": repo, "modelId": repo, "sha": commit, "siblings": files, "private": False})

        def tree(self, repo: str, revision: str) -> None:
            if (commit := self.commit(repo, revision)) is not None:
                files = hub.repos[repo][commit].items()
                self.send([{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files])

        def file(self, repo: str, revision: str, name: str) -> None:
            commit = self.commit(repo, revision)
            if commit is None:
                return None
            if repo in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
                known = self.headers.get("Authorization") is not None
                return self.fail(403 if known else 401, "GatedRepo")
            data = hub.repos[repo][commit].get(name)
            if data is None:
                return self.fail(404, "EntryNotFound", commit)
            begin = 0
            if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
                begin = int(asked[1])
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(data) - begin))
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.send_header("ETag", f'"{_etag(data)}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if self.command == "HEAD":
                return None
            length = hub.cut.pop(name, None)
            self.wfile.write(data[begin:] if length is None else data[begin : begin + length])
            self.wfile.flush()
            if length is not None:
                self.close_connection, hub.broken = True, hub.down_after_cut

        def send(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def fail(self, status: int, code: str | None, commit: str | None = None) -> None:
            self.send_response(status)
            for name, value in (("X-Error-Code", code), ("X-Repo-Commit", commit)):
                if value is not None:
                    self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that listens on this machine while the block runs."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
