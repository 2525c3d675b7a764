"""OpenCL in tests: the driver of this machine, if it has one, and a library without a device whose calls can fail."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from llmc.runtime.binding import Device, LlmcError

from support.paths import ROOT


@cache
def missing_opencl() -> str:
    """Why nothing runs on OpenCL here; empty where it does."""
    try:
        Device("opencl").close()
    except LlmcError as error:
        return str(error)
    return ""


needs_opencl = pytest.mark.skipif(bool(missing_opencl()), reason=missing_opencl() or "-")


def stub_library(folder: Path) -> Path:
    """The library of stub_opencl.c, built below `folder`."""
    library = folder / "libstub_opencl.so"
    source = ROOT / "tests" / "support" / "stub_opencl.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True, capture_output=True)
    return library
