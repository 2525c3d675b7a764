"""docs/adding-a-device.md, followed to the end: its toy is built and registered, and passes the conformance suite."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llmc.compiler.targets.reference.backend import ReferenceTarget
from llmc.compiler.targets.registry import resolve_target
from llmc.runtime.binding import Artifact
from llmc.runtime.graphs_file import read_graphs

from support.compiled import compile_tiny
from support.conformance import LADDER
from support.guide import changed, read_guide
from support.native_build import NATIVE, native_program, objects_of
from support.paths import ROOT
from support.tiny_models import make_tiny_model

REGISTRY = "runtime/native/device/registry.cc"
# As runtime/native/CMakeLists.txt compiles the library.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-ffp-contract=off")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suite with the page's device: its file and the changed registry, and all other objects as they are."""
    guide, folder = read_guide("adding-a-device.md"), tmp_path_factory.mktemp("toy")
    assert list(guide.changes) == [REGISTRY]
    compiler = shutil.which("c++")
    assert compiler is not None
    sources = {guide.file("toy_device.cc"): guide.files[guide.file("toy_device.cc")]}
    sources[REGISTRY] = changed((ROOT / REGISTRY).read_text(encoding="utf-8"), guide.changes[REGISTRY])
    native_program("device_conformance")
    objects = [one for one in objects_of("llmc_objects") if not one.match("device/registry.cc.o")]
    assert len(objects) == len(objects_of("llmc_objects")) - 1
    for name, code in sources.items():
        file = folder / Path(name).name
        file.write_text(code, encoding="utf-8")
        objects.append(file.with_suffix(".o"))
        includes = (f"-I{NATIVE}", f"-I{NATIVE / 'include'}")
        subprocess.run([compiler, *FLAGS, *includes, "-c", file, "-o", objects[-1]], check=True)
    program = folder / "suite"
    subprocess.run(
        [compiler, *objects, *objects_of("device_conformance"), "-pthread", "-ldl", "-o", program], check=True
    )
    return program


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """Of the reference target, for toys: they look at no code."""
    if not resolve_target("reference").runs_here():
        pytest.skip("the reference target's code is of another architecture")
    folder = tmp_path_factory.mktemp("for-toys")
    model = make_tiny_model(folder / "model", "llama", num_hidden_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceTarget, "device", "toy")
        compile_tiny(
            model, folder / "out", kernel_cache, buckets=LADDER, target="reference", dtype="f32", tokenizer="none"
        ).close()
    assert read_graphs(folder / "out").target.kind == "toy"
    return folder / "out"


def run(suite: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([suite, *arguments], capture_output=True, text=True, timeout=600)


def test_the_toy_passes_the_suite(suite: Path, artifact: Path) -> None:
    done = run(suite, "toy", artifact)
    assert done.returncode == 0, done.stderr[:4000]
    assert " 0 failures" in done.stdout


@pytest.mark.parametrize("defect", ["copy", "late", "company", "spill", "stray"])
def test_the_suite_notices_a_mistake_of_the_toy(suite: Path, artifact: Path, defect: str) -> None:
    done = run(suite, "toy", artifact, f"defect={defect}")
    assert done.returncode == 1
    assert "CHECK failed" in done.stderr


def test_the_kinds_beside_it_are_as_before(suite: Path, artifact: Path) -> None:
    # Artifacts for toys are none for the CPU, and a library without toys says so.
    done = run(suite, "cpu", artifact)
    assert done.returncode == 1
    assert "is for devices of kind 'toy'" in done.stderr
    done = run(suite, "abacus", artifact)
    assert "There is no kind of device called 'abacus'; this library has cpu, opencl, cuda, toy." in done.stderr
    with Artifact(artifact) as opened:
        assert opened.info.target_kind == "toy"
