"""Ranks on two hosts, joined by MPICH over TCP: the bits are those of one host, and a link may be slow, and cut.

Sums go on beside kernels there, and not on the one host.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import gone, until
from support.two_hosts import TwoHosts, mpi_command

MPIEXEC = shutil.which("mpiexec.hydra")
PROGRAM = """
import sys, time
from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
overlap = "off" if len(sys.argv) > 2 else 2
with LLM(sys.argv[1], num_threads=1, device_options={"overlap_sums": overlap}) as llm:
    try:
        while True:
            (output,) = llm.generate([[5, 6, 7, 8, 9, 10, 11]], params)
            print("bits", repr(output.outputs[0].token_ids), repr(output.outputs[0].logprobs), flush=True)
            if len(sys.argv) > 2:
                break
    except LlmcError as error:
        print(f"failed: {error}", flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if MPIEXEC is None:
        pytest.skip("MPICH is not here")
    two = TwoHosts()
    try:
        two.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    try:
        yield two
    finally:
        two.__exit__()


@pytest.mark.exhaustive
def test_a_link_may_be_slow_and_cut_for_a_moment_but_not_for_long(
    hosts: TwoHosts, artifacts: dict[int, Path], tmp_path: Path
) -> None:
    program = [sys.executable, "-c", PROGRAM, str(artifacts[2])]
    alone = subprocess.run([*program, "once"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    lines: list[str] = []
    command = mpi_command(str(MPIEXEC), tmp_path, program)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as mpiexec:

        def read() -> None:
            assert mpiexec.stdout is not None
            lines.extend(line.rstrip("\n") for line in mpiexec.stdout)

        reader = threading.Thread(target=read)
        reader.start()

        def until_more(count: int = 2) -> None:
            wanted = len(lines) + count
            until(lambda: len(lines) >= wanted or mpiexec.poll() is not None, 120)
            assert mpiexec.poll() is None, lines

        until_more()
        hosts.delay_s = 0.004
        until_more()
        hosts.delay_s = 0.0
        hosts.cut = True
        frames = hosts.num_frames
        until(lambda: hosts.num_frames > frames + 3)  # lost, and sent once more
        hosts.cut = False
        until_more()
        hosts.cut = True
        until(lambda: lines[-1].startswith("failed"))
        hosts.cut = False  # mpiexec hears of the end of what it has started
        mpiexec.wait(60)
        reader.join()
    assert "Rank 1 of 2 has failed: nothing was heard of " in lines[-1]
    assert set(lines[:-1]) == {alone}
    until(lambda: gone(mpiexec.pid))
