"""examples/background.c: a host in C sees a miss, has its bucket compiled, and serves on with the graph."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.binding.library import library_candidates
from llmc.runtime.graphs_file import read_graphs

from support.paths import ROOT

PROMPTS = [[3 + (i * 7 + j * 5) % 50 for j in range(20)] for i in range(3)]
"""Those of the program."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = next(path for path in library_candidates() if path.is_file())
    path = tmp_path_factory.mktemp("program") / "background"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'runtime/native/include'}"]
    source = ROOT / "examples" / "background.c"
    subprocess.run(["cc", *flags, source, library, f"-Wl,-rpath,{library.parent}", "-o", path], check=True)
    return path


def run(program: Path, artifact: Path, llmc: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLMC_CACHE_DIR": str(cache)}
    command = [program, artifact, llmc]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def greedy(artifact: Path) -> list[list[int]]:
    with Artifact(artifact) as opened, Engine(opened, num_threads=1) as engine:
        ids = [engine.submit(prompt, temperature=0.0, max_tokens=30, ignore_eos=True) for prompt in PROMPTS]
        tokens: dict[int, list[int]] = {one: [] for one in ids}
        while engine.step():
            for event in engine.poll():
                if event.kind == "token":
                    tokens[event.request_id].append(event.token_id)
    return list(tokens.values())


def names(artifact: Path) -> list[str]:
    return [graph.name for graph in read_graphs(artifact).graphs]


def test_a_host_in_c_gets_what_its_steps_lacked(program: Path, holed: Path, kernel_cache: Path, tmp_path: Path) -> None:
    artifact, llmc = Path(shutil.copytree(holed, tmp_path / "artifact")), tmp_path / "llmc"
    expected = greedy(artifact)
    llmc.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m llmc.cli.main "$@"\n')
    llmc.chmod(0o755)
    done = run(program, artifact, llmc, kernel_cache)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    missed = re.fullmatch(r"(\d+) steps missed, adding decode:3x64", lines[0])
    assert missed is not None
    assert int(missed[1]) > 0
    assert lines[-4] == "1 graphs joined, 0 steps missed since"
    assert [[int(token) for token in line.split()] for line in lines[-3:]] == expected
    assert names(artifact)[4:] == ["decode:3x64"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["artifact", "llmc"]
    again = run(program, artifact, llmc, kernel_cache)
    assert (again.returncode, again.stdout) == (0, "every step had its graph\n")


def test_a_compiler_that_fails_changes_nothing(program: Path, holed: Path, kernel_cache: Path, tmp_path: Path) -> None:
    artifact, llmc = Path(shutil.copytree(holed, tmp_path / "artifact")), tmp_path / "llmc"
    llmc.write_text("#!/bin/sh\nexit 3\n")
    llmc.chmod(0o755)
    done = run(program, artifact, llmc, kernel_cache)
    assert done.returncode == 1
    assert done.stderr == "background: the compiler failed\n"
    assert len(names(artifact)) == 4
