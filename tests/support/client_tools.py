"""Programs of others that talk to a server, as they install from the package index into an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_S = 240


def make_environment(folder: Path) -> Path:
    """A virtual environment that sees this one's packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "theirs.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder


def installed(tool: str, environment: Path) -> Path:
    """The folder of commands with those of `tool`; skips where the package index does not have it.

    One after the other, right before it runs: together they ask for versions that exclude each other. Modules are
    compiled when they are imported, for most never are.
    """
    bin_ = environment / "bin"
    install: list[str | Path] = [bin_ / "python", "-m", "pip", "install", "--quiet", "--no-input", "--no-compile", tool]
    result = subprocess.run(install, capture_output=True, text=True, timeout=PATIENCE_S)
    if result.returncode:
        pytest.skip(f"{tool} does not install here: {result.stderr.strip().splitlines()[-1]}")
    return bin_


def run(tools: Path, command: list[str], folder: Path, **variables: str) -> str:
    """Output of one of the tools, run in `folder`, with these environment variables."""
    environment = {**os.environ, "HF_HOME": str(folder / "hub"), "COLUMNS": "200", **variables}
    words: list[str | Path] = [tools / command[0], *command[1:]]
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout
