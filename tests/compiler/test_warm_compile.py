"""A warm compilation imports neither torch nor TVM; a new bucket needs TVM, but neither torch nor a trace."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.artifacts import TINY_LADDER, TinyArtifact
from support.compiled import assert_same_bytes

HEAVY = ("torch", "tvm", "transformers", "onnx", "ml_dtypes")
COMPILE = f"""
import json, sys
from llmc.cli.main import main
code = main(["compile", *sys.argv[1:], "--json", "--no-tokenizer"])
print("LOADED", json.dumps(sorted({HEAVY!r} & sys.modules.keys())))
sys.exit(code)
""".replace(repr(HEAVY), f"set({HEAVY!r})")


def compile_in_a_process(*arguments: object) -> tuple[dict[str, object], set[str]]:
    """The report, and which of HEAVY the process had imported."""
    command = [sys.executable, "-P", "-c", COMPILE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report, _, loaded = done.stdout.rpartition("LOADED")
    return json.loads(report), set(json.loads(loaded))


@pytest.fixture
def cache(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_artifact.cache, tmp_path / "cache"))


def test_warm_compile_imports_no_compiler_stack(tiny_artifact: TinyArtifact, cache: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = (tiny_artifact.model, "-o", output, "--buckets", TINY_LADDER, "--dtype", "f32", "--cache-dir", cache)
    for _ in ("a fresh output", "the same again"):
        report, loaded = compile_in_a_process(*arguments)
        assert report["kernels_compiled"] == 0
        assert loaded == {"ml_dtypes"}
        assert_same_bytes(output, tiny_artifact.artifact)


@pytest.mark.slow
def test_a_new_bucket_needs_no_torch(tiny_artifact: TinyArtifact, cache: Path, tmp_path: Path) -> None:
    buckets = "prefill=[1,2]x[16,32,48],decode=[1,2]x[64]"
    arguments = ("--buckets", buckets, "--dtype", "f32", "-o")
    report, loaded = compile_in_a_process(tiny_artifact.model, *arguments, tmp_path / "warm", "--cache-dir", cache)
    assert (report["num_graphs"], report["kernels_compiled"]) == (8, 0)
    assert loaded == {"ml_dtypes", "tvm"}
    # The lowered model that was read back binds to what a fresh trace binds to. Elsewhere, of files of another day,
    # with an empty cache and one process, every byte of the artifact is the same.
    model = shutil.copytree(tiny_artifact.model, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    cold = (tmp_path / "cold", "--cache-dir", tmp_path / "empty", "--jobs", 1)
    report, loaded = compile_in_a_process(model, *arguments, *cold)
    assert report["kernels_compiled"] == report["num_kernels"]
    assert {"torch", "tvm"} <= loaded
    assert_same_bytes(tmp_path / "warm", tmp_path / "cold")


def test_report_accounts_for_time_and_memory(tiny_artifact: TinyArtifact, cache: Path, tmp_path: Path) -> None:
    model = tiny_artifact.model
    report, _ = compile_in_a_process(model, "-o", tmp_path / "out", "--cache-dir", cache, "--dtype", "f32",
                                     "--buckets", TINY_LADDER)  # fmt: skip
    phases = report["phase_seconds"]
    assert isinstance(phases, dict)
    assert list(phases) == ["start", "load", "trace", "graphs", "kernels", "weights", "link", "publish"]
    assert phases["start"] > 0
    assert isinstance(report["peak_memory_bytes"], int)
    # An interpreter with numpy cannot be smaller; the models' files are tiny.
    assert 10 << 20 < report["peak_memory_bytes"] < 1 << 30
