"""Commands that several processes run: started by mpirun, or by the command itself."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from llmc.cli.main import main

from support.live_server import LiveServer, serving
from support.mpi import MPIS, Mpi, each_mpi
from support.processes import descendants, gone, until

LLMC = [sys.executable, "-P", "-m", "llmc.cli.main"]
PROMPT = "w5 w6 w7 w8 w9 w10 w11"


def run_llmc(artifact: Path, *launcher: str, flags: tuple[str, ...] = ()) -> Any:
    """What `llmc run --json` prints of one prompt, but for its times."""
    command = [*launcher, *LLMC, "run", str(artifact), "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0"]
    command += flags
    done = subprocess.run([*command, "--logprobs", "2", "--json", "-q"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["results"]


@each_mpi
def test_mpi_gives_the_bits_of_shared_memory(artifacts: dict[int, Path], mpi: Mpi) -> None:
    alone = run_llmc(artifacts[4])
    assert run_llmc(artifacts[4], *mpi.launcher, "-n", "4") == alone
    # With sums that go on beside kernels.
    assert run_llmc(artifacts[4], *mpi.launcher, "-n", "4", flags=("--overlap-sums", "2")) == alone


MEASURED = """
import sys
from llmc.runtime.llm import LLM
with LLM(sys.argv[1], num_threads=1, skip_warmup=True) as llm:
    print({name: count for name, count in llm.engine.device_stats().items() if name.startswith("all_")})
"""


@each_mpi
def test_sums_that_are_only_measured_are_not_counted(artifacts: dict[int, Path], mpi: Mpi) -> None:
    """Rank 0 times some at the start, to know from how many rows on steps are cut."""
    command = [*mpi.launcher, "-n", "2", sys.executable, "-c", MEASURED, str(artifacts[2])]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = ("all_reduces", "all_reduce_ns", "all_reduce_hidden_ns", "all_gathers", "all_gather_ns")
    assert ast.literal_eval(told) == dict.fromkeys(names, 0)


@each_mpi
def test_stages_have_the_same_bits_over_mpi(staged: dict[tuple[int, int], Path], mpi: Mpi) -> None:
    assert run_llmc(staged[2, 2], *mpi.launcher, "-n", "4") == run_llmc(staged[2, 1])


def test_ranks_that_the_artifact_lacks_end_with_a_sentence(artifacts: dict[int, Path]) -> None:
    done = subprocess.run(
        [*LLMC, "run", str(artifacts[2]), "--ranks", "3", "--prompt", PROMPT],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "llmc: error: ranks '3' is for 3 ranks and the artifact for 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "flags", "said"),
    [
        (0, ["--threads", "1"], "ray needs an artifact that all nodes have at the same path, and"),
        (1, ["--threads", "1"], "ray places ranks, of which this artifact has none: compile it with --tensor-parallel"),
        (2, [], "ray reserves CPUs for the threads of each rank: give --threads"),
        (2, ["--threads", "1"], "Ray cannot be imported (import of ray halted; None in sys.modules): install"),
    ],
)
def test_what_a_ray_cluster_cannot_run_is_refused(
    artifacts: dict[int, Path], tmp_path: Path, number: int, flags: list[str], said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "llmc.runtime.rank_placement.cluster", raising=False)
    artifact = artifacts.get(number, tmp_path)
    assert main(["run", str(artifact), "--prompt", PROMPT, "--distributed-executor", "ray", *flags]) == 2
    assert said in capsys.readouterr().err


@each_mpi
def test_mpirun_must_start_as_many_processes_as_there_are_ranks(artifacts: dict[int, Path], mpi: Mpi) -> None:
    command = [*mpi.launcher, "-n", "3", *LLMC, "run", str(artifacts[2]), "--prompt", PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "mpirun has started 3 processes for an artifact of 2 ranks; start it with -n 2." in done.stderr
    assert "Traceback" not in done.stderr


@each_mpi
@pytest.mark.parametrize(
    ("other", "said"),
    [
        # As many ranks, but other stages, as which they would wait for each other.
        (
            "staged",
            "it has another artifact, or another llmc, than rank 0: install rank 0's llmc and copy its artifact",
        ),
        ("four", "Rank 1 has an artifact of 4 ranks and rank 0 one of 2; copy rank 0's artifact to the same path"),
    ],
)
def test_ranks_of_different_artifacts_end_with_a_sentence(
    artifacts: dict[int, Path], staged: dict[tuple[int, int], Path], other: str, said: str, mpi: Mpi
) -> None:
    commands = (
        ["-n", "1", *LLMC, "run", str(artifact), "--prompt", PROMPT]
        for artifact in (artifacts[2], artifacts[4] if other == "four" else staged[1, 2])
    )
    command = [*mpi.launcher, *next(commands), ":", *next(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@each_mpi
@pytest.mark.parametrize("ends_early", [0, 1])
def test_a_rank_that_never_starts_is_not_waited_for(
    artifacts: dict[int, Path], tmp_path: Path, ends_early: int, mpi: Mpi
) -> None:
    """One host lacks the artifact."""
    code = (
        "from llmc.runtime.binding import mpi_ranks; from llmc.cli.main import main; mpi_ranks._START_S = 1.0; main()"
    )
    commands = [
        ["-n", "1", sys.executable, "-P", "-c", code, "run", str(path), "--prompt", PROMPT]
        for path in ((tmp_path / "none" if rank == ends_early else artifacts[2]) for rank in range(2))
    ]
    done = subprocess.run(
        [*mpi.launcher, *commands[0], ":", *commands[1]], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert f"rank {1 - ends_early}: the other ranks have not started within 1 s" in done.stderr
    assert "Traceback" not in done.stderr


def _ask_until_it_fails(server: LiveServer, answers: list[tuple[int, str]]) -> None:
    while True:
        try:
            body = {"model": "x", "prompt": PROMPT, "max_tokens": 50, "ignore_eos": True}
            answer = server.ask("POST", "/v1/completions", body)
        except (OSError, HTTPException) as error:  # mpirun may end rank 0 in the middle of an answer
            return answers.append((0, str(error)))
        answers.append((answer.status, answer.content.decode()))
        if answer.status != 200:
            return


@pytest.mark.parametrize(
    "mpi", [pytest.param(None, id="llmc"), *(pytest.param(mpi, marks=pytest.mark.slow, id=mpi.name) for mpi in MPIS)]
)
def test_a_server_ends_with_a_rank_that_is_killed(artifacts: dict[int, Path], mpi: Mpi | None) -> None:
    started = () if mpi is None else (*mpi.launcher, "-n", "2")
    flags = ("--threads", "1", "--served-model-name", "x", "--skip-warmup")
    with serving(artifacts[2], *flags, launcher=started, fails=True) as server:
        answers: list[tuple[int, str]] = []
        client = threading.Thread(target=_ask_until_it_fails, args=(server, answers))
        client.start()
        until(lambda: len(answers) > 2)
        ranks = descendants(server.process.pid)
        victim = _rank_one(server, ranks)
        os.kill(victim, signal.SIGKILL)
    client.join()
    log = "".join(server.log)
    if mpi is None:
        assert f"Rank 1 of 2 has failed: its process {victim} was killed by signal 9 (SIGKILL)" in log
    else:  # it ends the others, often before rank 0 has said what it knows
        assert f"rank 1 of 2 is process {victim} on " in log
        assert re.search(mpi.cleans_up.format(pid=victim), log, re.DOTALL), log
    assert answers[0][0] == 200
    assert answers[-1][0] != 200
    until(lambda: all(map(gone, ranks)))


@each_mpi
def test_rank_zero_alone_has_an_address(artifacts: dict[int, Path], mpi: Mpi) -> None:
    """The ranks of a host cannot share a port, and those of other hosts do not have the address of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--threads", "1", "--skip-warmup", "--port", str(port))
    with serving(artifacts[2], *flags, launcher=(*mpi.launcher, "-n", "2")) as server:
        assert server.port == port
        assert server.ask("POST", "/v1/completions", {"prompt": "w5 w6", "max_tokens": 4}).status == 200


def _rank_one(server: LiveServer, processes: list[int]) -> int:
    said = re.search(r"rank 1 of 2 is process (\d+)", "".join(server.log))
    if said is not None:
        return int(said[1])
    (found,) = (pid for pid in processes if b"llmc.runtime.follow" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found
