"""NVIDIA's compiler, needed only to compile for its GPUs: from PATH, its usual place, or PyPI."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from llmc.compiler.config import CompileError
from llmc.compiler.targets.base import LinkError

_USUAL = Path("/usr/local/cuda/bin/nvcc")
_EXACT = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
"""Flags to build as OpenCL does: no contraction, IEEE 754 division and roots, subnormals kept.

PTX states each operation's rounding, which neither its assembler nor a driver changes.
"""


@cache
def find_nvcc() -> str | None:
    """Path of nvcc; None if it is not installed."""
    found = shutil.which("nvcc")
    if found is not None:
        return found
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvcc"))
    return next((str(path) for path in (_USUAL, *wheels) if path.is_file()), None)


def need_nvcc() -> str:
    """Path of nvcc. Raises CompileError if it is not installed."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompileError(
            "compiling for CUDA needs nvcc, and there is none on PATH: install a CUDA toolkit, or the package "
            "nvidia-cuda-nvcc with pip; artifacts that are compiled run without it"
        )
    return nvcc


@cache
def nvcc_version() -> str:
    """Release and build of nvcc, on which its code depends. Raises CompileError."""
    said = _run([need_nvcc(), "--version"])
    match = re.search(r"V(\d+(?:\.\d+)+)", said)
    if match is None:
        raise CompileError(f"{need_nvcc()} --version says no version: {said.strip()[:200]!r}; install another nvcc")
    return match[1]


def build_ptx(text: str, architecture: str) -> bytes:
    """PTX of CUDA C++ for a virtual architecture such as compute_80. Raises CompileError or LinkError."""
    return _build("cu", text.encode(), ("-ptx", f"-arch={architecture}", *_EXACT))[0]


def build_cubin(ptx: bytes, architecture: str) -> tuple[bytes, str]:
    """(machine code of PTX, the assembler's report on registers and spills). Raises CompileError or LinkError."""
    return _build("ptx", ptx, ("-cubin", f"-arch={architecture}", "-Xptxas", "-v"))


def _build(ending: str, source: bytes, options: Sequence[str]) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="llmc-nvcc-") as folder:
        given, made = Path(folder) / f"kernel.{ending}", Path(folder) / "kernel.out"
        given.write_bytes(source)
        # Warnings only concern names that TVM generates.
        said = _run([need_nvcc(), *options, "-w", "-o", str(made), str(given)])
        return made.read_bytes(), said


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}; install another nvcc") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[:2000]
        raise LinkError(f"nvcc failed with {' '.join(command[1:-3])}: {said}")
    return done.stdout + done.stderr
