"""What tests of the cuda device run: an artifact, and a driver that checks every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.artifacts import made_once
from support.compiled import compile_tiny
from support.cuda import Stub, fake_nvcc
from support.paths import ROOT


@contextmanager
def checked_stub(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """At the end there was no mistake, and all is given back."""
    stub = Stub(library)
    yield stub
    monkeypatch.delenv("STUB_CUDA", raising=False)
    assert stub.report() == ""
    stub.recover()


def two_buckets(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """An artifact of two graphs with as many kernels, by which the device estimates what an instance takes."""

    def make(root: Path) -> None:
        model = ROOT / "examples" / "tiny-english"
        with fake_nvcc(root):
            compile_tiny(
                model, root / "out", kernel_cache, buckets="prefill=[1]x[16],decode=[2]x[32]", target="cuda:sm_80,sm_90"
            ).close()

    return made_once(tmp_path_factory, "cuda-two-buckets", make) / "out"
