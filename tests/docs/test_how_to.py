"""docs/how-to/ is true: what is marked as sh runs, in order; what cannot run here names flags and files that exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import typer

from llmc.cli.main import build_app, main
from llmc.runtime.binding.library import library_candidates

from support.paths import ROOT
from support.server_harness import running_server, slow_down, until

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/how-to").glob("*.md"))}
NGINX = (ROOT / "deploy" / "nginx.conf").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "llmc.service").read_text(encoding="utf-8")


def commands(page: str, language: str) -> list[str]:
    """The lines of the page's blocks of a language, also in lists; a line that ends with a backslash goes on."""
    blocks = re.findall(rf"^ *```{language}\n(.*?)^ *```$", PAGES[page], re.MULTILINE | re.DOTALL)
    text = "".join(textwrap.dedent(block) for block in blocks)
    return re.sub(r"\\\n\s*", "", text).splitlines()


@pytest.fixture(scope="module")
def folder(english_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks like a clone in which out/tiny was compiled and a trace recorded."""
    path = tmp_path_factory.mktemp("how-to")
    for name in ("examples", "runtime"):
        (path / name).symlink_to(ROOT / name)
    shutil.copytree(english_artifact, path / "out" / "tiny")
    rng = np.random.default_rng(0)
    with (path / "out" / "trace.jsonl").open("w") as trace:
        for i in range(60):
            lengths = {"prompt_tokens": int(rng.integers(8, 400)), "output_tokens": int(rng.integers(2, 60))}
            trace.write(json.dumps({"arrival_s": 0.5 * i, **lengths}) + "\n")
    return path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "sh")])
def test_what_is_to_run_runs(
    page: str, folder: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library = next(path for path in library_candidates() if path.is_file())
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(kernel_cache))
    monkeypatch.setenv("LLMC_LIBRARY", str(library))
    for command in commands(page, "sh"):
        words = shlex.split(command)
        if words[0] == "llmc":
            # In this process, as starting compiling processes takes longer than a tiny model's kernels.
            jobs = ["--jobs", "1"] if words[1] == "compile" else []
            assert main([*words[1:], *jobs]) == 0, f"{command}\n{capfd.readouterr().err}"
        else:
            line = re.sub(r"^python ", f"{shlex.quote(sys.executable)} -P ", command)
            result = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=300)
            assert result.returncode == 0, f"{command}\n{result.stderr}"
            assert result.stdout or words[0] in ("cc", "head"), command
    shown = capfd.readouterr().out
    match page:
        case "offline-batch":
            answers = [json.loads(line) for line in Path("out/answers.jsonl").read_text().splitlines()]
            assert [answer["index"] for answer in answers] == [0, 1, 2]
        case "add-a-bucket":
            assert "decode" in shown
            assert "decode:2x128" in json.loads(Path("out/tiny/manifest.json").read_text())["buckets"]
        case "fine-tunes-by-bundle":
            assert Path("out/tuned/graphs.bin").read_bytes() == Path("out/tiny/graphs.bin").read_bytes()
        case "choose-buckets":
            assert "prefill" in Path("out/buckets.toml").read_text()


def test_the_schema_of_structured_output_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES["structured-output"]
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(program, "structured-output.md", "exec"), names)
    assert names["city"].keys() == {"name", "big"}
    assert capsys.readouterr().out.strip().endswith(("True", "False"))
    # The same schema over HTTP.
    (body,) = re.findall(r" -d '(.*?)'", page, re.DOTALL)
    assert json.loads(body)["response_format"]["json_schema"]["schema"] == names["schema"]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_llmc_have_the_flags_that_are_shown(page: str) -> None:
    app = typer.main.get_command(build_app())
    for line in commands(page, "text") + commands(page, "sh"):
        found = re.search(r"(?:^|/)llmc (?!/)(.*)$", line)
        words = shlex.split(found[1]) if found else []
        command = app
        while words and hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        used = {word for word in words if word.startswith("-")}
        assert used <= known, line


def test_the_image_is_given_flags_of_the_server() -> None:
    serve = typer.main.get_command(build_app("serve")).commands["serve"]  # type: ignore[attr-defined]
    known = {name for param in serve.params for name in param.opts}
    (line,) = [line for line in commands("docker", "text") if "/model --host" in line]
    used = set(re.findall(r" (--[a-z-]+)", line.partition(" llmc ")[2]))
    assert used
    assert used <= known


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_copied_exist(page: str) -> None:
    for path in re.findall(r"\bdeploy/[\w./-]*\w", "\n".join(commands(page, "text"))):
        assert (ROOT / path).is_file(), path


def test_nginx_fits_the_unit_and_the_server() -> None:
    found = re.search(r"--host (\S+) --port (\d+)", UNIT)
    assert found
    assert f"server {found[1]}:{found[2]};" in NGINX
    serve = typer.main.get_command(build_app("serve")).commands["serve"]  # type: ignore[attr-defined]
    default = {param.name: param.default for param in serve.params}
    assert default["max_body_size"] == "4MiB"
    assert "client_max_body_size 4m;" in NGINX
    for setting in re.findall(r"^\| `([^`]+)` \|", PAGES["serve-behind-nginx"], re.MULTILINE):
        assert setting in NGINX, setting


@pytest.fixture
def nginx(tmp_path: Path) -> str:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    certificate = tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=llm.example.com",
         "-keyout", certificate.with_suffix(".key"), "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return program


@contextmanager
def served_by_nginx(program: str, folder: Path, upstream: str, *, is_local: bool = True) -> Iterator[str]:
    """The URL of an nginx with the deployed site, changed in its certificate, ports and folders alone.

    is_local: whether clients here count as of this machine.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    site = NGINX.replace("server 127.0.0.1:8000;", f"server {upstream};")
    site = site.replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;").replace("listen [::]:443 ssl;", "")
    site = re.sub(r"ssl_certificate \S+;", f"ssl_certificate {folder}/certificate.pem;", site)
    site = re.sub(r"ssl_certificate_key \S+;", f"ssl_certificate_key {folder}/certificate.key;", site)
    if not is_local:
        assert "allow 127.0.0.1;" in site
        site = site.replace("allow 127.0.0.1;", "")
    (folder / "site.conf").write_text(site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"daemon off; {user} pid {folder}/pid; error_log {folder}/errors; events {{}} "
        f"http {{ access_log off; {folders} include {folder}/site.conf; }}"
    )
    configuration = ["-c", str(folder / "nginx.conf"), "-e", str(folder / "errors")]
    checked = subprocess.run([program, "-t", *configuration], capture_output=True, text=True)
    assert "test is successful" in checked.stderr, checked.stderr
    process = subprocess.Popen([program, *configuration])
    try:
        until(lambda: process.poll() is not None or (folder / "pid").is_file())
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_a_stream_through_nginx(
    nginx: str, tmp_path: Path, english_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "She was", "max_tokens": 30, "ignore_eos": True, "seed": 1}
    with (
        running_server(english_artifact, api_keys=("hush",)) as running,
        served_by_nginx(nginx, tmp_path, running.url.removeprefix("http://")) as url,
        httpx.Client(base_url=url, verify=False, timeout=60) as client,
    ):
        until(lambda: _answers(client))
        assert client.get("/v1/models").status_code == 401
        client.headers.update({"Authorization": "Bearer hush", "Host": "llm.example.com"})
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.post("/v1/completions", content=b"x" * (5 << 20)).status_code == 413
        assert "llmc_graphs" in client.get("/metrics").text
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        slow_down(running.engine, monkeypatch, 0.05)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            events = [next(lines)]
            assert running.engine.engine.stats.num_running == 1  # the first token came before the last was drawn
            events += [line for line in lines if line]
        texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in events[:-1]]
        assert "".join(texts) == whole


def test_metrics_are_for_the_machine_of_nginx(nginx: str, tmp_path: Path, english_artifact: Path) -> None:
    with (
        running_server(english_artifact) as running,
        served_by_nginx(nginx, tmp_path, running.url.removeprefix("http://"), is_local=False) as url,
        httpx.Client(base_url=url, verify=False, timeout=60, headers={"Host": "localhost"}) as client,
    ):
        until(lambda: _answers(client))
        assert client.get("/v1/models").status_code == 200
        for path in ("/metrics", "/metrics/", "/metrics%2f", "//metrics", "/metrics?a"):
            assert client.get(url + path).status_code == 403, path


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.ConnectError:
        return False
