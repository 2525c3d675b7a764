"""`llmc serve` as a process: what it loads, signals, addresses, keys, TLS and compiling on the way."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from llmc.runtime.binding import Artifact

from support.failing import fails
from support.server_harness import until
from support.serving_imports import loaded_by_serving

LLMC = [sys.executable, "-P", "-m", "llmc.cli.main"]
PATIENCE_S = 300.0  # only a hang takes that long
PROMPT = "It is a truth universally acknowledged, that"


class Served:
    """A process that serves; `lines` is what it wrote so far, stdout and stderr together."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in what was written; the process must live until then."""
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, "".join(self.lines))):
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < end, "".join(self.lines)
            time.sleep(0.01)
        return found

    def finish(self) -> int:
        """Waits for the end; the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


@contextmanager
def started(*arguments: str | Path, port: str = "0") -> Iterator[Served]:
    environment = {name: value for name, value in os.environ.items() if name != "LLMC_API_KEY"}
    command = [*LLMC, "serve", *map(str, arguments), "--port", port]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    served = Served(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
    try:
        yield served
    finally:
        served.process.kill()
        served.finish()


def url_of(served: Served) -> str:
    return served.wait_for(r"ready: \S+ at (http\S+)/v1")[1]


def refusal(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and the last line of a server that must not start."""
    with started(*arguments) as served:
        code = served.finish()
    return code, served.lines[-1].rstrip()


def test_the_serving_process_never_loads_torch_or_tvm(english_artifact: Path) -> None:
    assert loaded_by_serving(english_artifact) == set()


def test_it_warms_up_serves_and_ends(english_artifact: Path) -> None:
    with started(english_artifact, "--served-model-name", "tiny", "--num-threads", "1") as served:
        url = url_of(served)
        steps = [line for line in served.lines if line.startswith("[warm-up]")]
        total = len(steps)
        for number, line in enumerate(steps, 1):
            assert re.fullmatch(
                rf"\[warm-up\] (prefill|decode) +{number}/{total} batch \d+ (length|context) \d+ "
                r"(replayed|walked) in [\d.]+ ms, [\d.]+ GiB free(, \d+ s left)?\n",
                line,
            )
        graphs = httpx.get(f"{url}/ready", timeout=PATIENCE_S).json()["graphs"]
        assert graphs["total"] == graphs["warm"] == graphs["replayed"] + graphs["walked"] == total
        assert graphs["replayed"] == sum(" replayed in " in line for line in steps)
        for phase, counts in graphs["by_phase"].items():
            assert sum(f"{phase} buckets: {counts['total']} (" in line for line in served.lines) == 1
            (warm,) = (line for line in served.lines if f"{phase} graphs warm: {counts['total']}, " in line)
            assert f" {counts['replayed']} replayed and {counts['walked']} walked in " in warm
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}, timeout=PATIENCE_S)
        assert answer.json()["model"] == "tiny"
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    assert served.lines[-1] == "llmc: stopping: SIGTERM; no request runs\n"
    assert not [line for line in served.lines if "Traceback" in line or not line.strip()]


def test_without_a_warm_up_it_is_ready_at_once(english_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_SKIP_WARMUP", "1")
    with started(english_artifact, "--no-access-log", "--num-threads", "1") as served:
        url = url_of(served)
        graphs = httpx.get(f"{url}/ready", timeout=PATIENCE_S).json()["graphs"]
        assert (graphs["skipped"], graphs["warm"]) == (True, 0)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}, timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 4
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    assert not [line for line in served.lines if line.startswith("[warm-up]")]
    assert any("the warm-up is skipped" in line for line in served.lines)


def test_sigterm_lets_a_stream_finish_and_takes_no_new_request(english_artifact: Path) -> None:
    with started(english_artifact, "--no-access-log", "--num-threads", "1") as served, httpx.Client() as client:
        url = url_of(served)
        body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "stream": True}
        with client.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-4]
        assert served.finish() == 0


LONG = {"prompt": [PROMPT] * 256, "n": 16, "max_tokens": 480, "ignore_eos": True}  # runs for minutes


def test_during_a_drain_new_connections_get_a_503(english_artifact: Path) -> None:
    with started(english_artifact, "--drain-timeout", "300", "--num-threads", "1") as served:
        url = url_of(served)
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=PATIENCE_S) as long:
            events = long.iter_lines()
            next(events)
            served.process.send_signal(signal.SIGTERM)
            served.wait_for(r"llmc: stopping: SIGTERM; \d+ requests running, up to 300 s to finish\n")
            for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/ready")):
                body = {"json": {"prompt": PROMPT}} if method == "POST" else {}
                answer = httpx.request(method, url + path, timeout=PATIENCE_S, **body)  # type: ignore[arg-type]
                assert answer.status_code == 503, path
                assert int(answer.headers["retry-after"]) > 0
                assert answer.headers["connection"] == "close"
                assert answer.json().get("status", "draining") == "draining"
            assert next(line for line in events if line), "what runs goes on"
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in events if line]
        # A second signal ends it at once, and the client is told in its stream.
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "draining"
        assert served.finish() == 0
    text = "".join(served.lines)
    assert re.search(r"llmc: stopping at once: a second signal; \d+ requests cancelled\n", text)
    assert "Traceback" not in text
    assert "\n\n" not in text
    statuses = [json.loads(line)["status"] for line in served.lines if line.startswith('{"time"')]
    assert 500 not in statuses


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_answers_503_to_whoever_waits(english_artifact: Path, name: str) -> None:
    with started(english_artifact, "--drain-timeout", "300", "--num-threads", "1") as served:
        url = url_of(served)
        answers: list[httpx.Response] = []
        ask = lambda: answers.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        while httpx.get(f"{url}/v1/llmc/state", timeout=PATIENCE_S).json()["num_requests"] <= 256:  # both have come
            time.sleep(0.01)
        served.process.send_signal(getattr(signal, name))
        served.wait_for("llmc: stopping: ")
        served.process.send_signal(getattr(signal, name))
        assert served.finish() == 0
        for thread in threads:
            thread.join(PATIENCE_S)
    assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(503, "draining")] * 2
    assert "Traceback" not in "".join(served.lines)


def test_drain_timeout_cancels_what_runs(english_artifact: Path) -> None:
    with started(english_artifact, "--drain-timeout", "0", "--no-access-log", "--num-threads", "1") as served:
        url = url_of(served)
        body = {"prompt": [PROMPT] * 16, "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "draining"
        assert served.finish() == 0
    assert served.lines[-2] == "llmc: stopping: Ctrl+C (SIGINT); 16 requests running, up to 0 s to finish\n"
    assert re.fullmatch(r"llmc: 16 requests cancelled after \d+\.\d s\n", served.lines[-1])


def test_a_bar_on_terminals(english_artifact: Path) -> None:
    parent, child = pty.openpty()
    command = [*LLMC, "serve", str(english_artifact), "--port", "0", "--num-threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=child)
    os.close(child)
    shown = b""
    try:
        while b"ready:" not in shown:
            shown += os.read(parent, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    assert b"[warm-up]" in shown
    assert b" ms\r\n" not in shown


def test_a_model_directory_is_compiled_by_a_child(tmp_path: Path, kernel_cache: Path) -> None:
    from support.tiny_models import make_tiny_model

    # So short a context has few buckets.
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1, max_position_embeddings=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMC_CACHE_DIR", str(kernel_cache))
        with started(model, "--num-threads", "1") as served:
            url = url_of(served)
            maps = Path(f"/proc/{served.process.pid}/maps").read_text()
            assert "libtorch" not in maps
            assert "libtvm" not in maps
            assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"] == "model"
            body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["usage"]["completion_tokens"] == 3


def test_the_child_ends_with_a_server_that_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))
    model = Path(__file__).parents[3] / "examples" / "tiny-english"
    with started(model) as served:
        pid = served.process.pid
        listed = Path(f"/proc/{pid}/task/{pid}/children")
        until(lambda: listed.read_text() != "")
        (child,) = listed.read_text().split()
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == -signal.SIGTERM
        until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())


def test_what_cannot_be_served_is_one_sentence(
    english_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(
        capsys,
        1,
        ["serve", tmp_path / "nothing", "--port", "0"],
        f"llmc: error: {tmp_path / 'nothing'} does not exist: give an artifact, a model (a directory, a .gguf "
        "or .onnx file), or ORG/NAME of the hub",
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code, line = refusal(tmp_path / "model")
    assert code == 1
    assert line.startswith("llmc: error: ")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        started(english_artifact, port=str(taken.getsockname()[1])) as served,
    ):
        assert served.finish() == 1
    assert served.lines[-1].startswith(f"llmc: error: cannot listen on 127.0.0.1 port {taken_port(served)}: Address")
    assert refusal(english_artifact, "--ssl-keyfile", "x")[1] == (
        "llmc: error: --ssl-keyfile needs --ssl-certfile: give both"
    )
    assert "no.pem" in refusal(english_artifact, "--ssl-certfile", tmp_path / "no.pem")[1]
    for flag, path in (("--access-log-file", tmp_path), ("--record-trace", "/proc/x"), ("--profiler-dir", "/proc/x")):
        assert refusal(english_artifact, flag, path)[1].startswith(f"llmc: error: cannot write {flag} {path}: ")
    assert "no.jinja" in refusal(english_artifact, "--chat-template", tmp_path / "no.jinja")[1]


def taken_port(served: Served) -> str:
    match = re.search(r"port (\d+)", served.lines[-1])
    assert match is not None
    return match[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-bytes", "2 bananas"], "'2 bananas' is not a size"),
        (["--generation-config", "vllm"], "'vllm' is unknown"),
        (["--miss-policy", "x"], "'x' is unknown"),
        (["--log-level", "loud"], "'loud' is unknown"),
        (["--api-key", " "], "--api-key is empty"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--allowed-hosts", "http://x"], "--allowed-hosts 'http://x' is no host name"),
        (["--allowed-hosts", "x:80"], "--allowed-hosts 'x:80' is no host name"),
        (["--allowed-hosts", ""], "--allowed-hosts '' is no host name"),
        (["--allowed-origins", "foo"], "--allowed-origins 'foo' is no origin"),
        (["--allowed-origins", "https://a/b"], "--allowed-origins 'https://a/b' is no origin"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
    ],
)
def test_wrong_flags(english_artifact: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, 2, ["serve", english_artifact, "--port", "0", *flags], says)


def test_a_process_tells_of_a_wrong_flag(english_artifact: Path) -> None:
    code, line = refusal(english_artifact, "--log-level", "loud")
    assert code == 2
    assert "'loud' is unknown" in line


def test_keys_of_a_file_and_of_the_environment(english_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\n\nalpha\nbeta\n")
    flags = ["--api-key", "gamma", "--host", "0.0.0.0", "--num-threads", "1"]
    with started(english_artifact, "--api-key-file", tmp_path / "keys", *flags) as served:
        url = url_of(served).replace("0.0.0.0", "127.0.0.1")
        for key, status in (("alpha", 200), ("beta", 200), ("gamma", 200), ("# ours", 401), ("alph", 401)):
            response = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S)
            assert response.status_code == status
        assert not [line for line in served.lines if "warning" in line]


def test_a_server_without_keys_on_all_addresses_warns(english_artifact: Path) -> None:
    with started(english_artifact, "--host", "0.0.0.0", "--num-threads", "1") as served:
        served.wait_for("warning: 0.0.0.0 is reachable from other machines and no --api-key is set")


def test_warnings_of_the_server_are_lines_of_the_command(english_artifact: Path) -> None:
    with Artifact(english_artifact) as artifact:
        kv_bytes = 2 * artifact.info.kv_block_bytes
    with started(english_artifact, "--kv-bytes", str(kv_bytes), "--num-threads", "1") as served:
        served.wait_for("a request may have")
        (line,) = [line for line in served.lines if "a request may have" in line]
        assert line.startswith("llmc: a request may have ")


def test_tls(english_artifact: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", str(key), "-out", str(certificate), "-addext", "subjectAltName=IP:127.0.0.1"]
    if subprocess.run([*command, *files], capture_output=True, check=False).returncode != 0:
        pytest.skip("openssl cannot make a certificate here")
    with started(english_artifact, "--ssl-certfile", certificate, "--ssl-keyfile", key, "--num-threads", "1") as served:
        url = url_of(served)
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{url}/v1/models", verify=context, timeout=PATIENCE_S).status_code == 200
