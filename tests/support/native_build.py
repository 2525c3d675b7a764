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
    """What a target was built of, once `native_program` has built one that needs it; not what is left of files that
    are no more."""
    folder = BUILD / "CMakeFiles" / f"{target}.dir"
    return sorted(one for one in folder.rglob("*.o") if (NATIVE / one.relative_to(folder).with_suffix("")).is_file())
