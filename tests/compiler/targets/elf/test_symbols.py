"""What a linked library wants of others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llmc.compiler.targets.base import LinkError
from llmc.compiler.targets.elf.link import link_shared
from llmc.compiler.targets.elf.symbols import undefined_symbols

SOURCE = """
float expf(float);
void* memcpy(void*, const void*, unsigned long);
__attribute__((weak)) void maybe(void);
float weight(float x) { if (maybe) maybe(); return x * expf(x); }
void copy(void* a, const void* b, unsigned long n) { memcpy(a, b, n); }
"""


@pytest.fixture
def compiled(tmp_path: Path) -> bytes:
    (tmp_path / "kernel.c").write_text(SOURCE)
    subprocess.run(["cc", "-O1", "-fno-builtin", "-fPIC", "-c", "kernel.c"], cwd=tmp_path, check=True)
    return (tmp_path / "kernel.o").read_bytes()


def test_what_nm_lists_is_found(compiled: bytes, tmp_path: Path) -> None:
    (tmp_path / "kernel.o").write_bytes(compiled)
    subprocess.run(["cc", "-shared", "-nostartfiles", "-o", "out.so", "kernel.o"], cwd=tmp_path, check=True)
    listed = subprocess.run(["nm", "-D", "out.so"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    wanted = {line.split()[-1].split("@")[0] for line in listed.splitlines() if line.split()[-2] == "U"}
    assert undefined_symbols((tmp_path / "out.so").read_bytes()) == wanted == {"expf", "memcpy"}


def test_a_kernel_that_needs_another_library_is_refused(compiled: bytes, tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"^kernels need symbols outside the C library: expf$"):
        link_shared([compiled], tmp_path / "kernels.so")
    assert not (tmp_path / "kernels.so").exists()
