"""The base install runs, inspects and serves artifacts where nothing of the compiler is installed.

Its wheel is built of the source distribution, as packagers build it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from llmc import __version__
from llmc.distribution import install_compiler

from support.paths import ROOT

pytestmark = pytest.mark.slow

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


def source_distribution(folder: Path) -> Path:
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-P", "-c", code, folder], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (path,) = folder.glob("llmc_aot-*.tar.gz")
    return path


def unpack(archive: Path, folder: Path) -> None:
    """Makes `folder` what the archive holds; files that are as they should be keep their times, for the build."""
    wanted: dict[Path, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                wanted[folder.joinpath(*Path(member.name).parts[1:])] = file.read()
    for path in folder.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
    for path, data in wanted.items():
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def built_wheel(folder: Path) -> Path:
    """A wheel of this tree's source distribution. The build folder is kept: the native library is compiled once."""
    kept = ROOT / "build" / "base-install"
    unpack(source_distribution(folder), kept / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    build = f"build-dir={kept / 'native'}"
    subprocess.run([*pip, "-C", build, "--wheel-dir", folder, kept / "source"], check=True)
    (wheel,) = folder.glob("llmc_aot-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    given: Path | None = pytestconfig.getoption("--wheel")
    return given.resolve() if given is not None else built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The interpreter of an environment with the wheel and links to its requirements, nothing else."""
    root = tmp_path_factory.mktemp("base")
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


def test_one_wheel_serves_every_python_of_a_platform(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (.*)$", archive.read(name).decode(), re.MULTILINE)
    assert [tag.rpartition("-")[0] for tag in tags] == ["py3-none"]
    assert tags[0].endswith("_x86_64")
    assert wheel.name == f"llmc_aot-{__version__}-{tags[0]}.whl"


def test_the_source_distribution_has_what_is_built_and_tested(tmp_path: Path) -> None:
    with tarfile.open(source_distribution(tmp_path)) as tar:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in tar.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "tests/conftest.py"} <= names
    assert {"runtime/native/CMakeLists.txt", "runtime/native/exports.map", "llmc/py.typed"} <= names
    assert not [name for name in names if name.startswith((".git/", ".venv", "build/", "out/", "dist/"))]


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
    onnx: list[str | Path] = ["--bucket", "decode:2x64", "--format", "onnx", "-o", tmp_path / "graph.onnx"]
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
    assert served == f"llmc: error: {model} is a model and must be compiled first, but {expected}"
    assert not (tmp_path / "out").exists()
