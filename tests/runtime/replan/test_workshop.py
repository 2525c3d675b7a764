"""Compilations of a server's own proposals: bounded, in folders that go with it, of artifacts that stay held."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from llmc.buckets.bucket import Bucket
from llmc.runtime.misses import aside
from llmc.runtime.replan.workshop import Workshop

LARGE, PROMPT = Bucket("decode", 8, 256), Bucket("prefill", 1, 256)


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Notes what it was asked and what it may use, and copies the artifact. It does not give way: on a busy machine it
    would take long."""
    plain = "import sys; from llmc.runtime.misses import behind; behind.become(sys.argv[1:])"
    monkeypatch.setattr(aside, "_BEHIND", (sys.executable, "-P", "-c", plain))
    note = tmp_path / "note"
    code = (
        "import os, resource, shutil, sys\n"
        f"open({str(note)!r}, 'a').write(repr((sys.argv[1:], len(os.sched_getaffinity(0)), "
        "resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_CPU)[0])) + '\\n')\n"
        "base, out = sys.argv[2], sys.argv[sys.argv.index('-o') + 1]\n"
        "base == out or os.path.exists(out) or shutil.copytree(base, out)\n"
        'print(\'{"phase_seconds": {"kernels": 2.5}}\')'
    )
    monkeypatch.setattr(aside, "_COMPILER", (sys.executable, "-c", code))
    return note


def test_compiling_is_bounded_and_leaves_nothing_behind(tmp_path: Path, fake_compiler: Path) -> None:
    artifact = tmp_path / "model.llmc"
    artifact.mkdir()
    dead = tmp_path / ".model.llmc.replan-dead"
    dead.mkdir()
    shop = Workshop(artifact, memory_bytes=3 << 30, cpu_s=77)
    made = shop.add([LARGE, PROMPT])
    assert made is not None
    assert made[0].is_dir()
    assert made[0].parent.parent == tmp_path
    assert made[1] == 2.5
    assert not dead.exists()  # whoever left it was killed
    assert shop.add([Bucket("decode", 1, 16)]) is not None
    # One that lives keeps its own.
    other = Workshop(artifact, memory_bytes=1 << 31)
    assert other.add([LARGE]) is not None
    assert made[0].exists()
    other.close()
    assert shop.publish([LARGE]) == 2.5
    shop.close()
    assert shop.add([LARGE]) is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.llmc", "note"]
    first, second, _, last = (eval(line) for line in fake_compiler.read_text().splitlines())
    assert first[0][:6] == ["compile", str(artifact), "--add", "decode:8x256", "--add", "prefill:1x256"]
    assert second[0][1] == str(made[0])  # it grows
    assert last[0][1] == str(artifact)
    assert first[1:] == (1, 3 << 30, 77)


def test_a_compiler_that_takes_too_much_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_compiler: Path
) -> None:
    for code, what in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "more than 1 s of CPU time"),
        ("bytearray(1 << 30)", "it may take 256 MiB of memory"),
        ("import sys; sys.exit('llmc: error: the disk is full')", "^the disk is full"),
    ):
        monkeypatch.setattr(aside, "_COMPILER", (sys.executable, "-c", code))
        with pytest.raises(RuntimeError, match=what):
            Workshop(tmp_path / "none", memory_bytes=1 << 28, cpu_s=1).add([LARGE])
    for folder in tmp_path.glob(".none.replan-*"):
        shutil.rmtree(folder)
