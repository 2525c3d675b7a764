"""What lies at the output of `llmc compile` outlives refusals, killed compilations and full disks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.cli import main as cli
from llmc.compiler import pipeline
from llmc.compiler.state import CompileState
from llmc.graphs_format import VERSION_WITHOUT_ADAPTERS
from llmc.runtime.binding import Artifact

from support.artifacts import TINY_LADDER, TinyArtifact
from support.damage import flip, keep, snapshot
from support.failing import fails
from support.manifests import edit_manifest


@pytest.fixture
def artifact(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact.artifact, tmp_path / "artifact")


def compile_argv(tiny: TinyArtifact, output: Path) -> list[str]:
    options = ["--buckets", TINY_LADDER, "--dtype", "f32", "--no-tokenizer", "--cache-dir", tiny.cache]
    return [str(argument) for argument in ("compile", tiny.model, "-o", output, *options)]


def test_output_of_others_is_refused_untouched(
    tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    file.write_text("precious")
    before = snapshot(tmp_path)
    for output in (folder, file):
        fails(capsys, 1, compile_argv(tiny_artifact, output), str(output), "is not an llmc artifact")
    fails(capsys, 1, compile_argv(tiny_artifact, file / "below"), str(file / "below"))
    assert snapshot(tmp_path) == before
    # The model itself is not an artifact either.
    weights = (tiny_artifact.model / "model.safetensors").read_bytes()
    fails(capsys, 1, compile_argv(tiny_artifact, tiny_artifact.model), "is not an llmc artifact")
    assert (tiny_artifact.model / "model.safetensors").read_bytes() == weights


def test_artifact_is_replaced_also_through_a_link(tiny_artifact: TinyArtifact, artifact: Path, tmp_path: Path) -> None:
    edit_manifest(artifact, format_version=2, kernels=[])
    link = tmp_path / "link"
    link.symlink_to(artifact)
    opened = Artifact(artifact)  # a reader of the old one keeps it
    assert cli.main(compile_argv(tiny_artifact, link)) == 0
    assert link.is_symlink()
    assert json.loads((artifact / "manifest.json").read_text())["format_version"] == VERSION_WITHOUT_ADAPTERS
    assert opened.info.vocab_size == 515
    assert sorted(p.name for p in tmp_path.iterdir()) == ["artifact", "link"]


def test_compiling_again_mends_damaged_weights(tiny_artifact: TinyArtifact, artifact: Path) -> None:
    weights = artifact / "weights.safetensors"
    good = weights.read_bytes()
    before = weights.stat().st_ino
    assert cli.main(compile_argv(tiny_artifact, artifact)) == 0
    assert weights.stat().st_ino == before  # whole ones are kept

    def rot() -> None:
        times = weights.stat()
        flip(weights, len(good) - 100)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))

    damages: list[Callable[[], object]] = [
        lambda: keep(weights, -64),
        lambda: flip(weights, len(good) - 100),
        rot,
        weights.unlink,
    ]
    for damage in damages:
        damage()
        assert cli.main(compile_argv(tiny_artifact, artifact)) == 0
        assert weights.read_bytes() == good


def test_killed_compilation_leaves_nothing_broken(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    output = tmp_path / "out"
    # Killed with everything but the manifest written, and the staging directory there.
    code = (
        "import os, signal, sys\n"
        "from llmc.cli.main import main\n"
        "from llmc.compiler import pipeline\n"
        "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "pipeline.write_manifest = die\n"
        "main(sys.argv[1:])\n"
    )
    cache = shutil.copytree(tiny_artifact.cache, tmp_path / "cache")
    argv = compile_argv(TinyArtifact(tiny_artifact.model, tiny_artifact.artifact, cache), output)
    killed = subprocess.run([sys.executable, "-P", "-c", code, *argv], capture_output=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not output.exists()
    (left,) = tmp_path.glob("out.tmp-*")
    assert not (left / "manifest.json").exists()
    bystanders = [tmp_path / "out.tmp-notes", tmp_path / "out2.tmp-00000000", tmp_path / "out.tmp-00000000"]
    for folder in bystanders:
        folder.mkdir()
        (folder / "precious.txt").write_text("x")
    assert cli.main(["cache", "verify", "--cache-dir", str(cache)]) == 0
    assert cli.main(argv) == 0
    assert not left.exists()
    assert all((folder / "precious.txt").is_file() for folder in bystanders)
    for name in ("graphs.bin", "weights.safetensors", "kernels.so"):
        assert (output / name).read_bytes() == (tiny_artifact.artifact / name).read_bytes()


@pytest.mark.parametrize("step", ["write_weights", "graphs_bin", "write_manifest"])
def test_killed_compilation_leaves_the_old_artifact(
    step: str, tiny_artifact: TinyArtifact, artifact: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tiny_artifact.cache / "packed", ignore_errors=True)  # so that weights are not reused
    before = snapshot(artifact)
    code = (
        "import os, signal, sys\n"
        "from llmc.cli.main import main\n"
        "from llmc.compiler import pipeline\n"
        f"assert hasattr(pipeline, {step!r})\n"
        f"pipeline.{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(sys.argv[1:])\n"
    )
    argv = compile_argv(tiny_artifact, artifact)
    killed = subprocess.run([sys.executable, "-P", "-c", code, *argv], capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert snapshot(artifact) == before
    with Artifact(artifact) as opened:
        opened.verify()
    assert len(list(tmp_path.glob("artifact.tmp-*"))) == 1
    assert cli.main(argv) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


def test_staging_of_a_living_compilation_stays(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    from llmc.compiler.store.staging import staged_directory

    output = tmp_path / "out"
    with staged_directory(output) as first:
        (first / "graphs.bin").write_text("first")
        (first / "manifest.json").write_text('{"files": []}')
        with staged_directory(output) as second:
            (second / "graphs.bin").write_text("second")
            (second / "manifest.json").write_text('{"files": []}')
        assert (output / "graphs.bin").read_text() == "second"
        assert first.is_dir()
    assert (output / "graphs.bin").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_replacing_works_without_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.store import staging

    monkeypatch.setattr(staging, "_exchange", lambda one, other: False)
    for text in ("first", "second"):
        with staging.staged_directory(tmp_path / "out") as staged:
            (staged / "graphs.bin").write_text(text)
            (staged / "manifest.json").write_text('{"files": []}')
    assert (tmp_path / "out" / "graphs.bin").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_artifact_that_came_meanwhile_is_not_replaced(
    tiny_artifact: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, other = tmp_path / "out", tmp_path / "other"
    argv = compile_argv(tiny_artifact, output)
    assert cli.main([*argv[:3], str(other), *argv[4:], "--dtype", "bf16"]) == 0
    write_files = pipeline.write_files

    def meanwhile(state: CompileState) -> None:
        write_files(state)
        shutil.copytree(other, output)

    monkeypatch.setattr(pipeline, "write_files", meanwhile)
    fails(capsys, 1, argv, f"{output} is an artifact of another model or other options", "--overwrite")
    assert snapshot(output) == snapshot(other)
    shutil.rmtree(output)
    assert cli.main([*argv, "--overwrite"]) == 0
    assert snapshot(output) != snapshot(other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


# ---- full disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write_weights", "copy_files", "write_manifest"])
def test_full_disk_leaves_the_old_artifact(
    step: str,
    tiny_artifact: TinyArtifact,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pipeline, step, full)
    shutil.rmtree(tiny_artifact.cache / "packed", ignore_errors=True)  # so that weights are not reused
    before = snapshot(artifact)
    for output in (artifact, tmp_path / "new"):
        fails(capsys, 1, compile_argv(tiny_artifact, output), "No space left on device", str(output), "free space")
    assert snapshot(artifact) == before
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


def test_limit_on_file_size_leaves_the_old_artifact(
    tiny_artifact: TinyArtifact, artifact: Path, tmp_path: Path
) -> None:
    """The system itself refuses the write, wherever tests run."""
    weights = artifact / "weights.safetensors"
    shutil.rmtree(tiny_artifact.cache / "packed", ignore_errors=True)  # so that weights are not reused
    before = snapshot(artifact)
    code = (
        "import resource, sys\n"
        "from llmc.cli.main import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({weights.stat().st_size // 2},) * 2)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    argv = [sys.executable, "-P", "-c", code, *compile_argv(tiny_artifact, artifact)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"llmc: error: cannot write {artifact}: File too large"), done.stderr
    assert snapshot(artifact) == before
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


def test_full_file_system(tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        fails(capsys, 1, compile_argv(tiny_artifact, disk / "out"), "No space left on device", str(disk / "out"))
        assert not list(disk.iterdir())
        cacheless = [*compile_argv(tiny_artifact, tmp_path / "out")[:-1], str(disk / "cache")]
        (disk / "ballast").write_bytes(b"\0" * (400 << 10))
        fails(capsys, 1, cacheless, "No space left on device", "LLMC_CACHE_DIR")
        assert not list(tmp_path.glob("out*"))
    finally:
        subprocess.run(["umount", disk], check=True)
