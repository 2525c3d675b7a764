"""Every device runs the artifacts of every target that this machine runs, as device.h promises: bits compared."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.targets.registry import native_target, resolve_target
from llmc.quantize import QuantConfig
from llmc.runtime.binding import device_kinds

from support.artifacts import TinyArtifact
from support.compiled import compile_tiny
from support.paths import ROOT
from support.tiny_models import ModelFields, make_tiny_model

BUILD = ROOT / "build" / "native"
# Rows and contexts that no tile, partition or block divides.
LADDER = "prefill=[1,3]x[16,80],decode=[1,5]x[32,80],mixed=[4]x[48]"
MODELS: dict[str, tuple[str, ModelFields, dict[str, Any]]] = {
    "f32": ("llama", {}, {"dtype": "f32"}),
    "bf16, norms of q and k": ("qwen3", {}, {"dtype": "bf16"}),
    "a window": ("mistral", {"sliding_window": 24}, {"dtype": "bf16"}),
    "w8a8": ("llama", {}, {"dtype": "bf16", "quant": QuantConfig("w8a8")}),
    "w4a16": ("qwen2", {}, {"dtype": "f32", "quant": QuantConfig("w4a16")}),
}
"""Kind, fields of its config, and how it is compiled."""
OPTIONS = {"cpu": ({"threads": "1"}, {"threads": "3", "pin": "0"})}
"""Ways to open each kind of device; a kind that is not here is opened with its defaults."""


@pytest.fixture(scope="module")
def suite() -> Path:
    """The program, built where `make native-test` builds it."""
    scripts = Path(sysconfig.get_path("scripts"))
    cmake, ninja = scripts / "cmake", scripts / "ninja"
    made: list[str | Path] = [
        "-S",
        ROOT / "runtime" / "native",
        "-B",
        BUILD,
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
    ]
    subprocess.run([cmake, *made, "-DLLMC_BUILD_TESTS=ON"], check=True, capture_output=True)
    subprocess.run([cmake, "--build", BUILD, "--target", "device_conformance"], check=True, capture_output=True)
    return BUILD / "device_conformance"


def targets() -> list[str]:
    return [native_target().name, "reference"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", targets())
def test_devices_keep_their_promises(suite: Path, target: str, name: str, tmp_path: Path, kernel_cache: Path) -> None:
    if not resolve_target(target).runs_here():
        pytest.skip("its code is of another architecture")
    kind, overrides, options = MODELS[name]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    with compile_tiny(
        model, tmp_path / "out", kernel_cache, buckets=LADDER, target=target, tokenizer="none", **options
    ) as artifact:
        wanted = artifact.info.target_kind
    kinds = [one.name for one in device_kinds() if one.name == wanted]
    assert kinds
    for ways in OPTIONS.get(wanted, ({},)):
        given = [f"{key}={value}" for key, value in ways.items()]
        run = subprocess.run([suite, wanted, tmp_path / "out", *given], capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr[:4000]}"
        assert " 0 failures" in run.stdout


@pytest.mark.parametrize("defect", ["copy", "late", "company", "spill"])
def test_the_suite_notices_a_mistake(suite: Path, tiny_artifact: TinyArtifact, defect: str) -> None:
    run = subprocess.run([suite, "cpu", tiny_artifact.artifact, f"defect={defect}"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "CHECK failed" in run.stderr


def test_the_suite_says_what_it_takes(suite: Path, tmp_path: Path) -> None:
    assert subprocess.run([suite, "cpu"], capture_output=True).returncode == 2
    run = subprocess.run([suite, "cpu", tmp_path], capture_output=True, text=True)
    assert (run.returncode, "is not an artifact" in run.stderr) == (1, True)
