"""docs/how-to/ is true: what is marked as sh runs, in order; what cannot run here names flags and files that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from llmc.cli.main import build_app, main
from llmc.runtime.binding.abi import library_candidates

from support.paths import ROOT

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


def test_nginx_accepts_the_file(tmp_path: Path) -> None:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    certificate = tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=llm.example.com",
         "-keyout", certificate.with_suffix(".key"), "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    site = re.sub(r"ssl_certificate \S+;", f"ssl_certificate {certificate};", NGINX)
    site = re.sub(r"ssl_certificate_key \S+;", f"ssl_certificate_key {certificate.with_suffix('.key')};", site)
    (tmp_path / "site.conf").write_text(site)
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; events {{}} http {{ access_log off; include {tmp_path}/site.conf; }}"
    )
    checked = subprocess.run([program, "-t", "-c", tmp_path / "nginx.conf"], capture_output=True, text=True)
    # Beyond the syntax it wants folders of its own, which an installation has.
    assert "syntax is ok" in checked.stderr
