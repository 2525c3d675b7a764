"""Native test programs, built where `make native-test` builds them; the first worker that asks builds, others wait."""

from __future__ import annotations

import fcntl
import subprocess
import sysconfig
from pathlib import Path

from support.paths import ROOT

NATIVE = ROOT / "runtime" / "native"
BUILD = ROOT / "build" / "native"


def native_program(name: str) -> Path:
    """The program of a target of runtime/native/CMakeLists.txt."""
    scripts = Path(sysconfig.get_path("scripts"))
    cmake, ninja = scripts / "cmake", scripts / "ninja"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made: list[str | Path] = ["-S", NATIVE, "-B", BUILD, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        subprocess.run([cmake, *made, "-DLLMC_BUILD_TESTS=ON"], check=True, capture_output=True)
        subprocess.run([cmake, "--build", BUILD, "--target", name], check=True, capture_output=True)
    return BUILD / name


def objects_of(target: str) -> list[Path]:
    """What a target is built of, once `native_program` has built one that needs it."""
    ninja = Path(sysconfig.get_path("scripts")) / "ninja"
    command: list[str | Path] = [ninja, "-C", BUILD, "-t", "inputs", "all"]
    inputs = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [BUILD / one for one in inputs if one.startswith(f"CMakeFiles/{target}.dir/") and one.endswith(".o")]
