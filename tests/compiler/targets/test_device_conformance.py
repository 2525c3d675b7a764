"""Every device runs the artifacts of every target that this machine runs, as device.h promises: bits compared."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llmc.compiler.targets.registry import native_target, resolve_target
from llmc.runtime.binding import device_kinds
from llmc.runtime.graphs_file import read_graphs

from support.artifacts import TinyArtifact
from support.conformance import MODELS, check_conformance, conformance_artifact, shared_artifact
from support.cuda import fake_nvcc, kernels_on_host, stub_library
from support.marks import rare
from support.native_build import native_program
from support.opencl import needs_opencl, program_cache
from support.uneven_layers import with_uneven_layers


@pytest.fixture(scope="module")
def suite() -> Path:
    return native_program("device_conformance")


# A device knows no numbers of 16 bits apart: kernels do.
CASES = [rare(native_target().name, name) if name == "f16" else (native_target().name, name) for name in MODELS]
# The device is the CPU's again, and the plain code takes its time.
CASES += [("reference", name) if name == "f32" else rare("reference", name) for name in MODELS]


@pytest.mark.parametrize(("target", "name"), CASES)
def test_devices_keep_their_promises(
    suite: Path, target: str, name: str, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> None:
    if not resolve_target(target).runs_here():
        pytest.skip("its code is of another architecture")
    artifact = shared_artifact(name, target, tmp_path_factory, kernel_cache)
    assert read_graphs(artifact).target.kind in [one.name for one in device_kinds()]
    check_conformance(suite, artifact)


SOME = ("f32", "states")


@needs_opencl
@pytest.mark.parametrize(
    "name",
    [*SOME, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS if name not in SOME)],
)
@pytest.mark.slow
def test_opencl_keeps_them_too(
    suite: Path, name: str, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> None:
    artifact = shared_artifact(name, "opencl", tmp_path_factory, kernel_cache)
    check_conformance(suite, artifact, program_cache(tmp_path_factory))


@pytest.mark.parametrize(
    "name",
    ["bf16, norms of q and k", "states", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS)],
)
@pytest.mark.slow
def test_cuda_keeps_them_behind_a_driver_that_checks_it(
    suite: Path, name: str, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_nvcc(tmp_path):
        artifact = conformance_artifact(name, "cuda:sm_80", tmp_path, kernel_cache)
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub_library(tmp_path)))
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(kernels_on_host(artifact, tmp_path)))
    monkeypatch.setenv("STUB_CUDA_STRICT", "1")
    check_conformance(suite, artifact)


def test_layers_of_different_sizes(
    suite: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> None:
    artifact = shared_artifact("f32", native_target().name, tmp_path_factory, kernel_cache)
    check_conformance(suite, with_uneven_layers(artifact, tmp_path / "uneven"))


@needs_opencl
@pytest.mark.slow
def test_layers_of_different_sizes_on_opencl(
    suite: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> None:
    artifact = shared_artifact("f32", "opencl", tmp_path_factory, kernel_cache)
    check_conformance(suite, with_uneven_layers(artifact, tmp_path / "uneven"), program_cache(tmp_path_factory))


@pytest.mark.slow
def test_layers_of_different_sizes_on_cuda(
    suite: Path, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_nvcc(tmp_path):
        artifact = conformance_artifact("f32", "cuda:sm_80", tmp_path, kernel_cache)
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub_library(tmp_path)))
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(kernels_on_host(artifact, tmp_path)))
    monkeypatch.setenv("STUB_CUDA_STRICT", "1")
    check_conformance(suite, with_uneven_layers(artifact, tmp_path / "uneven"))


@pytest.mark.parametrize("defect", ["copy", "late", "company", "spill", "stray", "beside"])
def test_the_suite_notices_a_mistake(suite: Path, tiny_artifact: TinyArtifact, defect: str) -> None:
    run = subprocess.run([suite, "cpu", tiny_artifact.artifact, f"defect={defect}"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "CHECK failed" in run.stderr
    assert ("in guard block" in run.stderr) == (defect in ("spill", "stray"))
    assert ("wrote beside its operands" in run.stderr) == (defect == "beside")


@pytest.mark.parametrize("defect", ["copy", "leak"])
def test_the_suite_notices_a_mistake_with_states(
    suite: Path, defect: str, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> None:
    artifact = shared_artifact("states", native_target().name, tmp_path_factory, kernel_cache)
    run = subprocess.run([suite, "cpu", artifact, f"defect={defect}"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "CHECK failed" in run.stderr
    assert "in guard block" in run.stderr  # whose state is copied to a slot of its own
    assert ("on a copy" in run.stderr) == (defect == "copy")


def test_the_suite_says_what_it_takes(suite: Path, tmp_path: Path) -> None:
    assert subprocess.run([suite, "cpu"], capture_output=True).returncode == 2
    run = subprocess.run([suite, "cpu", tmp_path], capture_output=True, text=True)
    assert (run.returncode, "is not an artifact" in run.stderr) == (1, True)
