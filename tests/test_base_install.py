"""The base install runs, inspects and serves artifacts where nothing of the compiler is installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from llmc.distribution import install_compiler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
COMPILER_ONLY = ("torch", "tvm", "tvm_ffi", "transformers", "safetensors", "ml_dtypes", "onnx", "scipy")


def base_distributions() -> dict[str, importlib.metadata.Distribution]:
    """llmc's requirements without its extras, and theirs, as installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    # Not of the installed metadata, which an editable install writes once.
    waiting = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            waiting += found[name].requires or []
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with a wheel of this tree and links to its requirements, nothing else."""
    root = tmp_path_factory.mktemp("base")
    # The build folder is kept between runs: the native library is compiled once.
    build = f"build-dir={ROOT / 'build' / 'base-install'}"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-C", build, "--wheel-dir", root, ROOT], check=True)
    (wheel,) = root.glob("llmc_aot-*.whl")
    venv.create(root / "venv", with_pip=False, symlinks=True)
    (packages,) = (root / "venv" / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    for distribution in base_distributions().values():
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return root / "venv" / "bin" / "python"


def run(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LLMC_"))}
    environment["XDG_CACHE_HOME"] = str(python.parent / "cache")
    command = [str(python), "-P", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def llmc(python: Path, *arguments: str | Path) -> str:
    """stdout of a command that must succeed."""
    result = run(python, "-m", "llmc.cli.main", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refusal(python: Path, *arguments: str | Path) -> str:
    """The one sentence of a command that must fail."""
    result = run(python, "-m", "llmc.cli.main", *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return line


def test_the_compilers_packages_are_absent(python: Path) -> None:
    code = f"import importlib.util as u; print([m for m in {COMPILER_ONLY!r} if u.find_spec(m)])"
    assert run(python, "-c", code).stdout == "[]\n"
    assert not {"torch", "safetensors", "transformers"} & set(base_distributions())


def test_the_wheel_has_the_runtime_and_no_sources_of_it(python: Path) -> None:
    (package,) = (python.parent.parent / "lib").glob("python*/site-packages/llmc")
    shipped = {str(file.relative_to(package)) for file in package.rglob("*")}
    assert {"runtime/libllmc.so", "runtime/native/include/llmc/llmc.h", "py.typed"} <= shipped
    assert not [file for file in shipped if file.endswith((".cc", "CMakeLists.txt"))]


def test_run(python: Path, chat_artifact: Path, tmp_path: Path) -> None:
    options = ["--max-tokens", "8", "--temperature", "0", "--quiet"]
    assert llmc(python, "run", chat_artifact, "--prompt", "Hi", *options).startswith("Hi")
    llmc(python, "run", chat_artifact, "--chat", "--prompt", "Hi", "-o", tmp_path / "out.jsonl", *options)
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["usage"]["prompt_tokens"] == len("<user>Hi<assistant>")


def test_inspect(python: Path, chat_artifact: Path, tmp_path: Path) -> None:
    assert "decode:2x64" in llmc(python, "inspect", chat_artifact)
    assert json.loads(llmc(python, "inspect", chat_artifact, "--format", "json"))["buckets"]
    assert "memory plan" in llmc(python, "inspect", chat_artifact, "--bucket", "decode:2x64")
    dot = llmc(python, "inspect", chat_artifact, "--bucket", "decode:2x64", "--format", "dot")
    assert dot.startswith('digraph "decode:2x64"')
    onnx = ["--bucket", "decode:2x64", "--format", "onnx", "-o", tmp_path / "graph.onnx"]
    assert f"needs the package onnx: {install_compiler()}" in refusal(python, "inspect", chat_artifact, *onnx)
    assert not (tmp_path / "graph.onnx").exists()


def test_cache_ls(python: Path) -> None:
    assert ": 0 entries" in llmc(python, "cache", "ls")


def test_python_api(python: Path, chat_artifact: Path) -> None:
    code = (
        "import sys; from llmc import LLM, SamplingParams\n"
        "with LLM(sys.argv[1]) as llm:\n"
        "    (output,) = llm.generate(['Hi'], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))\n"
        "print(len(output.outputs[0].token_ids))\n"
    )
    result = run(python, "-c", code, chat_artifact)
    assert (result.stdout, result.stderr) == ("8\n", "")


def test_serve(python: Path, chat_artifact: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LLMC_"))}
    command = [str(python), "-P", "-m", "llmc.cli.main", "serve", str(chat_artifact), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "ready:" in line:
                break
        found = re.search(r"at (http\S+)/v1", lines[-1])
        assert found is not None, "".join(lines)
        schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "response_format": schema}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{found[1]}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"] == '"yes"'
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_needs_the_compiler_says_so(python: Path, tmp_path: Path) -> None:
    expected = f"torch is not installed: {install_compiler()}"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    compiled = refusal(python, "compile", model, "-o", tmp_path / "out")
    assert compiled == f"llmc: error: llmc compile needs the compiler, but {expected}"
    served = refusal(python, "run", model, "--prompt", "Hi")
    assert served == f"llmc: error: {model} is a model directory and must be compiled first, but {expected}"
    assert not (tmp_path / "out").exists()
