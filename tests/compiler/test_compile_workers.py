"""The processes that compile kernels: no second run of the caller's script, one sentence when one dies, none left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from llmc.compiler import workers
from llmc.compiler.config import CompileError
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.registry import native_target
from llmc.compiler.workers import compile_kernels

from support.artifacts import TINY_LADDER, TinyArtifact
from support.compiled import assert_same_bytes
from support.processes import children, gone, until

VARIANTS = [(KernelSpec.of("gather", "gather_rows", dim=dim), None) for dim in (16, 32, 48)]
TARGET = native_target()
STOPPED = "import time; time.sleep(600)"


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from llmc.compiler import build
        from llmc.compiler.config import CompileConfig
        from llmc.compiler.pipeline import compile_model

        print("RAN")
        build._MIN_KERNELS_A_PROCESS = 1
        config = CompileConfig(Path({str(tiny_artifact.model)!r}), Path("out"), {TINY_LADDER!r}, dtype="f32", jobs=2,
                               cache_dir=Path("cache"))
        print(compile_model(config).kernels_compiled)
        """)
    )
    command = [sys.executable, "-P", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ran, compiled = done.stdout.split()
    assert ran == "RAN"
    assert int(compiled) > 2
    assert_same_bytes(tmp_path / "out", tiny_artifact.artifact)


def test_workers_compile_what_the_caller_would_and_leave() -> None:
    before = children(os.getpid())
    compiled = dict(compile_kernels(VARIANTS, TARGET, 2))
    assert compiled == {variant: TARGET.compile(*variant) for variant in VARIANTS}
    assert children(os.getpid()) <= before


def test_a_kernel_that_cannot_be_compiled_is_named() -> None:
    before = children(os.getpid())
    bad = KernelSpec.of("gather", "gather_rows", width=16)
    with pytest.raises(
        CompileError, match=rf"kernel {bad.symbol()} cannot be compiled: KernelSpecError: .*'dim'"
    ) as error:
        list(compile_kernels([*VARIANTS, (bad, None)], TARGET, 2))
    assert "\n" not in str(error.value)
    assert children(os.getpid()) <= before


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import sys; sys.stdin.buffer.read(8); sys.exit(3)", "ended with status 3"),
        ("print('1234', end='')", "ended with status 0"),
    ],
)
def test_a_worker_that_dies_is_one_sentence(monkeypatch: pytest.MonkeyPatch, program: str, how: str) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", program)
    with pytest.raises(CompileError, match=f"the process that compiled kernel gather_rows_[0-9a-f]{{12}} {how}; "):
        list(compile_kernels(VARIANTS, TARGET, 2))


def test_an_iteration_given_up_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children(os.getpid())
    compiled = compile_kernels(VARIANTS, TARGET, 2)
    next(compiled)
    compiled.close()
    assert children(os.getpid()) <= before


def test_a_worker_ends_with_its_compiler() -> None:
    script = """
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.registry import native_target
from llmc.compiler.workers import compile_kernels
import os, sys
variants = [(KernelSpec.of("gather", "gather_rows", dim=d), None) for d in (16, 32, 48)]
compiled = compile_kernels(variants, native_target(), 2)
next(compiled)
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.read()
"""
    compiler = subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert compiler.stdout is not None
    assert compiler.stdout.readline() == "ready\n"
    while len(left := children(compiler.pid)) < 2:
        time.sleep(0.02)
    os.kill(compiler.pid, signal.SIGKILL)
    compiler.wait()
    until(lambda: all(map(gone, left)))


def test_an_interrupt_ends_the_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", STOPPED)
    before = children(os.getpid()) | {os.getpid()}
    # Sent while the second worker starts, to this process alone, as a terminal would.
    program = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.processes import children

while len(children({os.getpid()}) - {before} - {{os.getpid()}}) < 2:
    time.sleep(0.001)
os.kill({os.getpid()}, signal.SIGINT)
"""
    sender = subprocess.Popen([sys.executable, "-S", "-c", program])
    with pytest.raises(KeyboardInterrupt):
        list(compile_kernels(VARIANTS, TARGET, 2))
    sender.wait()
    assert children(os.getpid()) <= before
