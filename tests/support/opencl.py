"""OpenCL in tests: the driver of this machine, if it has one, and a library without a device whose calls can fail."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from llmc.runtime.binding import Device, LlmcError

from support.adapter_setting import Setting, make_setting
from support.artifacts import shared
from support.paths import ROOT


@cache
def missing_opencl() -> str:
    """Why nothing runs on OpenCL here; empty where it does."""
    try:
        Device("opencl").close()
    except LlmcError as error:
        return str(error)
    return ""


def program_cache(factory: pytest.TempPathFactory) -> Path:
    """Where all tests of a run keep what the driver built."""
    return shared(factory) / "programs"


needs_opencl = pytest.mark.skipif(bool(missing_opencl()), reason=missing_opencl() or "-")


def opencl_setting(factory: pytest.TempPathFactory, kernel_cache: Path) -> Setting:
    """A small artifact with everything: mixed graphs, adapters, and rows of logits of several pieces."""
    ladder = "prefill=[1,8]x[16],decode=[1,8]x[128],mixed=[8]x[24]"
    return make_setting(factory, kernel_cache, "opencl", ladder, vocab_size=9001, num_hidden_layers=2)


def stub_library(folder: Path) -> Path:
    """The library of stub_opencl.c, built below `folder`."""
    return _shared("stub_opencl.c", folder / "libstub_opencl.so")


def failing_library(folder: Path) -> Path:
    """The library of failing_opencl.cc, built below `folder`: what it lacks, the machine's library has."""
    needs = ["-std=c++17", "-Wl,--no-as-needed", "-l:libOpenCL.so.1", "-ldl"]
    return _shared("failing_opencl.cc", folder / "libfailing_opencl.so", *needs)


def _shared(source: str, library: Path, *flags: str) -> Path:
    path = ROOT / "tests" / "support" / source
    compiler = "c++" if path.suffix == ".cc" else "cc"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, path, *flags], check=True, capture_output=True)
    return library
