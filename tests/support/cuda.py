"""CUDA in tests, without a GPU: a driver that checks its calls, a compiler in place of nvcc, kernels on the host."""

from __future__ import annotations

import ctypes
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmc.compiler.targets.gpu import nvcc
from llmc.compiler.targets.gpu.cuda_prelude import PORTABLE
from llmc.compiler.targets.gpu.cuda_wgmma import MATRICES
from llmc.cuda_code import unpack

from support.paths import ROOT

_SUPPORT = ROOT / "tests" / "support"
_FAKE = """\
#!{python} -IS
# Stands in for nvcc: its PTX is the text it was given, behind what a driver reads of a kernel.
import re, sys
options, made, given = sys.argv[1:-3], sys.argv[-2], sys.argv[-1]
if sys.argv[1:] == ["--version"]:
    print("Cuda compilation tools, release 0.0, V0.0.1")
    sys.exit()
text = open(given).read()
machine = re.search(r"-arch=\\w+_(\\d+)", " ".join(options)).group(1)
if "-ptx" in options:
    items, name, arguments = re.search(r"__launch_bounds__\\((\\d+), 1\\) (\\w+)\\(([^)]*)\\)", text).groups()
    parameters = ",".join(" .param .u64 p" if "*" in one else " .param .u32 p" for one in arguments.split(","))
    text = ".target sm_" + machine + "\\n.entry " + name + "(" + parameters + ") .maxntid " + items + " {{\\n" + text
else:
    text = "CUBIN" + re.sub(r"\\.target sm_\\d+", ".target sm_" + machine, text, count=1)
open(made, "w").write(text + chr(0))  # the stub reads it as text
"""
_TEXT = re.compile(r'extern "C" __global__ void __launch_bounds__\(\d+, 1\) (\w+)\(')


def stub_library(folder: Path) -> Path:
    """The library of stub_cuda/, built below `folder`."""
    return _shared(sorted((_SUPPORT / "stub_cuda").glob("*.cc")), folder / "libstub_cuda.so")


def nccl_stub_library(folder: Path) -> Path:
    """The library of stub_nccl.cc, built below `folder`."""
    return _shared([_SUPPORT / "stub_nccl.cc"], folder / "libstub_nccl.so")


def _shared(sources: Sequence[Path], library: Path) -> Path:
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", f"-I{_SUPPORT}"]
    subprocess.run(["c++", *flags, "-o", library, *sources, "-ldl"], check=True, capture_output=True)
    return library


@contextmanager
def fake_nvcc(folder: Path) -> Iterator[None]:
    """Compiling for CUDA gives the text of kernels in place of code, also where there is no nvcc."""
    tool = folder / "nvcc"
    tool.write_text(_FAKE.format(python=sys.executable))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        nvcc.find_nvcc.cache_clear()
        nvcc.nvcc_version.cache_clear()
        yield
    nvcc.find_nvcc.cache_clear()
    nvcc.nvcc_version.cache_clear()


def kernels_on_host(artifact: Path, folder: Path, *others: Path) -> Path:
    """A library of the kernels of artifacts that `fake_nvcc` compiled, for STUB_CUDA_KERNELS."""
    # PTX if a kernel has some: it comes last.
    texts: set[str] = set()
    for one in (artifact, *others):
        images = {
            image.kernel: image.code.rstrip(b"\0").decode() for image in unpack((one / "kernels.cuda").read_bytes())
        }
        texts.update(text[text.index('extern "C"') :] for text in images.values())
    return host_library(sorted(texts), folder)


def host_library(texts: Sequence[str], folder: Path) -> Path:
    """A library of kernels in CUDA C++ without their prelude: `run_` before the name of each."""
    names = [match[1] for text in texts if (match := _TEXT.search(text))]
    assert len(names) == len(texts)
    runs = [
        f'extern "C" void run_{name}(void** a, unsigned g, unsigned i) {{ cuda_on_host::Run({name}, a, g, i); }}'
        for name in names
    ]
    source = folder / "kernels.cc"
    # What only a GPU has these headers have under the same names.
    heads = [f'#include "{name}_on_host.h"' for name in ("cuda", "wgmma")]
    source.write_text("\n".join([*heads, *PORTABLE, MATRICES, *texts, *runs]))
    return _shared([source], folder / "kernels.so")


def pointers(text: str) -> list[tuple[str, str, bool]]:
    """The type and name of each operand of a kernel and of its scalars, and whether it says that nobody else writes
    it."""
    head = text[: text.index("{")]
    return [(of, name, bool(kept)) for of, kept, name in re.findall(r"(\w+)\* (__restrict__ )?(\w+)", head)]


class Stub:
    """What the stub's library says of the calls that it had."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._native = ctypes.CDLL(str(library))
        for name in ("stub_cuda_report", "stub_cuda_launches"):
            getattr(self._native, name).restype = ctypes.c_char_p
        self._native.stub_cuda_failed.restype = ctypes.c_longlong

    def report(self) -> str:
        """Mistakes, and what was not given back."""
        said: bytes = self._native.stub_cuda_report()
        return said.decode()

    def launches(self) -> list[tuple[str, int, str]]:
        """Kernels that ran since the last call: name, groups, launched or replayed; with a plus if they begin early."""
        said: bytes = self._native.stub_cuda_launches()
        rows = [line.split() for line in said.decode().splitlines()]
        return [(name, int(groups), how) for name, groups, how in rows]

    def num_failed(self) -> int:
        """Calls that failed by chance, or as the one that was ordered to."""
        return int(self._native.stub_cuda_failed())

    def recover(self) -> None:
        """As in a new process."""
        self._native.stub_cuda_recover()


class NcclStub:
    """What the stub of NCCL says of the calls that it had in this process."""

    def __init__(self, library: Path) -> None:
        self._native = ctypes.CDLL(str(library))
        self._native.stub_nccl_report.restype = ctypes.c_char_p
        self._native.stub_nccl_gathered.restype = ctypes.c_ulonglong

    def report(self) -> str:
        """Mistakes, and communicators that were not given back."""
        said: bytes = self._native.stub_nccl_report()
        return said.decode()

    def gathered(self) -> int:
        """Calls that have gathered something."""
        return int(self._native.stub_nccl_gathered())

    def recover(self) -> None:
        """As in a new process."""
        self._native.stub_nccl_recover()
