"""The reference target's code for another architecture runs there: in the same C runtime, built for it and emulated."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.compiler.targets.base import LinkError
from llmc.compiler.targets.elf.link import link_shared
from llmc.runtime.binding.library import library_candidates

from support.compiled import compile_tiny
from support.paths import ROOT
from support.tiny_models import make_tiny_model

TOOLS = ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "qemu-aarch64")
LADDER = "prefill=[1]x[16],decode=[1]x[64]"
PROMPT = ["24", "20", "301", "128", "96"]  # tokens to write, then the ids of the prompt


def cross_build(folder: Path) -> Path:
    """libllmc.so for aarch64."""
    tools = Path(sys.executable).parent
    toolchain = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": "aarch64-linux-gnu-gcc",
        "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
        "CMAKE_MAKE_PROGRAM": str(tools / "ninja"),
        "CMAKE_CXX_FLAGS_RELEASE": "-O1",
    }
    options = [f"-D{name}={value}" for name, value in toolchain.items()]
    cmake = str(tools / "cmake")
    made = [cmake, "-S", str(ROOT / "runtime" / "native"), "-B", str(folder), "-G", "Ninja", *options]
    subprocess.run(made, check=True, capture_output=True)
    subprocess.run([cmake, "--build", str(folder), "--target", "llmc"], check=True, capture_output=True)
    return folder / "libllmc.so"


def embed(compiler: str, library: Path, program: Path) -> Path:
    """examples/embed.c against a library."""
    include = ROOT / "runtime/native/include"
    rpath = f"-Wl,-rpath,{library.parent}"
    command = [
        compiler,
        str(ROOT / "examples" / "embed.c"),
        "-I",
        str(include),
        str(library),
        rpath,
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    return program


@pytest.mark.slow
def test_a_whole_model_writes_the_same_on_another_architecture(tmp_path: Path, kernel_cache: Path) -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    model = make_tiny_model(tmp_path / "model", "llama")
    targets, dtypes = ("reference", "reference-aarch64"), ("f32", "f16")
    for target, dtype in itertools.product(targets, dtypes):
        out = tmp_path / f"{target}-{dtype}"
        compile_tiny(model, out, kernel_cache, buckets=LADDER, target=target, dtype=dtype).close()
    here = embed("cc", next(path for path in library_candidates() if path.is_file()), tmp_path / "here")
    there = embed("aarch64-linux-gnu-gcc", cross_build(tmp_path / "build"), tmp_path / "there")
    emulator: list[str | Path] = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
    commands: list[list[str | Path]] = [[here], [*emulator, there]]
    for dtype in dtypes:
        wrote = []
        for command, target in zip(commands, targets, strict=True):
            artifact = tmp_path / f"{target}-{dtype}"
            done = subprocess.run([*command, artifact, *PROMPT], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            wrote.append(done.stdout.split())
        assert len(wrote[0]) > 0
        assert wrote[0] == wrote[1]
    # And neither takes the other's.
    foreign = tmp_path / "reference-aarch64-f32"
    done = subprocess.run([str(here), str(foreign), *PROMPT], capture_output=True, text=True)
    assert done.returncode == 1
    assert "aarch64" in done.stderr or "reference" in done.stderr, done.stderr


def test_a_linker_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LinkError, match=r"no `riscv64-linux-gnu-gcc`.*install gcc-riscv64-linux-gnu"):
        link_shared([], tmp_path / "kernels.so", "riscv64")
