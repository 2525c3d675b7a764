"""The files of deploy/: what systemd and Docker read in them, and that the flags they pass exist."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llmc.runtime.server.config import ServerConfig

from support.paths import ROOT

UNIT = ROOT / "deploy" / "llmc.service"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def unit_settings() -> dict[str, list[str]]:
    """Setting → its values in order, of all sections."""
    settings: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def docker_instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined and comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name, arguments) for name, arguments in parts]


def last_stage() -> dict[str, list[str]]:
    stage: dict[str, list[str]] = {}
    for name, arguments in docker_instructions():
        if name == "FROM":
            stage = {}
        stage.setdefault(name, []).append(arguments)
    return stage


def serve_flags() -> set[str]:
    command = [sys.executable, "-P", "-m", "llmc.cli.main", "serve", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={"COLUMNS": "200", "PATH": ""})
    return set(re.findall(r"--[a-z][a-z0-9-]*", result.stdout))


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # The program need not be installed where the tests run.
    (tmp_path / "llmc.service").write_text(UNIT.read_text().replace("/opt/llmc/bin/llmc", sys.executable))
    result = subprocess.run(["systemd-analyze", "verify", tmp_path / "llmc.service"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", tmp_path / "llmc.service"],
        capture_output=True,
        text=True,
    )
    assert rated.returncode == 0, rated.stdout


def test_the_unit_is_hardened_and_stops_gracefully() -> None:
    settings = unit_settings()
    for name in ("NoNewPrivileges", "DynamicUser", "ProtectHome", "PrivateTmp", "MemoryDenyWriteExecute"):
        assert settings[name] == ["yes"], name
    assert settings["ProtectSystem"] == ["strict"]
    assert settings["CapabilityBoundingSet"] == [""]
    assert settings["KillSignal"] == ["SIGTERM"]
    assert settings["Restart"] == ["on-failure"]
    (command,) = settings["ExecStart"]
    words = shlex.split(command)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    drain_s = int(words[words.index("--drain-timeout") + 1])
    assert int(settings["TimeoutStopSec"][0]) > drain_s, "systemd would kill what still drains"


def test_the_image_runs_as_nobody_and_tells_when_it_is_ready() -> None:
    stage = last_stage()
    assert stage["FROM"] == ["python:${PYTHON}-slim"]
    (user,) = stage["USER"]
    assert user.partition(":")[0].isdigit()
    assert int(user.partition(":")[0]) > 0
    assert "/ready" in stage["HEALTHCHECK"][0]
    assert stage["STOPSIGNAL"] == ["SIGTERM"]
    assert stage["ENTRYPOINT"] == ['["llmc", "serve"]'], "a shell between would keep signals from the server"
    assert any("--no-index" in run and 'python -c "import torch"' in run for run in stage["RUN"])
    installs = " ".join(arguments for name, arguments in docker_instructions() if name == "RUN")
    assert "compiler" not in installs


def test_the_build_sees_every_package_and_no_secrets() -> None:
    patterns = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in patterns if line and not line.startswith("#")]
    assert rules[0] == "*"

    def seen(path: str) -> bool:
        shown = False
        for rule in rules:
            pattern = rule.removeprefix("!")
            parts = path.split("/")
            heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
            if any(fnmatch.fnmatch(head, pattern) for head in heads):
                shown = rule.startswith("!")
        return shown

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    for folder in packages.values():
        assert seen(f"{folder}/__init__.py"), folder
    for path in ("pyproject.toml", project["project"]["readme"], "runtime/native/CMakeLists.txt"):
        assert seen(path), path
    for path in (".git/config", "out/tiny/weights.safetensors", ".env", "tests/conftest.py"):
        assert not seen(path), path


def test_flags_in_the_files_exist() -> None:
    known = serve_flags()
    used = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", unit_settings()["ExecStart"][0]))
    used |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', last_stage()["CMD"][0]))
    assert {"--host", "--port", "--drain-timeout"} <= used
    assert used <= known


def test_the_server_listens_on_this_machine_only_by_default() -> None:
    config = ServerConfig(Path("artifact"), ("model",))
    assert config.host == "127.0.0.1"
    assert config.allowed_origins == ()


def test_an_engine_runs_where_memory_cannot_become_code(chat_artifact: Path) -> None:
    """What MemoryDenyWriteExecute refuses, the kernel refuses here."""
    code = (
        "import ctypes, mmap, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.prctl(65, 1, 0, 0, 0): print('unsupported'); sys.exit()\n"
        "try: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC); print('not enforced'); sys.exit()\n"
        "except PermissionError: pass\n"
        "from llmc.runtime.llm import LLM\n"
        "from llmc.runtime.params import SamplingParams\n"
        "import llmc.runtime.server.app\n"
        "with LLM(sys.argv[1]) as llm:\n"
        "    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)\n"
        "    print(len(llm.generate('Hi', params)[0].outputs[0].token_ids))\n"
    )
    command = [sys.executable, "-P", "-c", code, str(chat_artifact)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.stdout in ("unsupported\n", "not enforced\n"):
        pytest.skip(f"this kernel's PR_SET_MDWE is {result.stdout.strip()}")
    assert (result.returncode, result.stdout) == (0, "4\n"), result.stderr
