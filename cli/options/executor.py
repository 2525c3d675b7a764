"""Options that choose what starts the ranks of an artifact: llmc itself or mpirun, or a Ray cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmc.cli.render.terminal_text import exact
from llmc.mpi_loader import mpi_rank


def _one_of(*words: str) -> Callable[[str], str]:
    def check(word: str) -> str:
        if word not in words:
            raise typer.BadParameter(f"{word!r} is unknown: use {' or '.join(words)}")
        return word

    return check


@dataclass(frozen=True)
class ExecutorFlags:
    """What starts ranks, and where."""

    distributed_executor: Annotated[
        str,
        typer.Option(
            "--distributed-executor",
            metavar="local|ray",
            callback=_one_of("local", "ray"),
            help="What starts ranks; ray: they run on the nodes of a Ray cluster.",
        ),
    ] = "local"
    rank_placement: Annotated[
        str,
        typer.Option(
            "--rank-placement",
            metavar="pack|spread",
            callback=_one_of("pack", "spread"),
            help="With ray: ranks on as few nodes as possible, or on many.",
        ),
    ] = "pack"


def run_on_ray(flags: ExecutorFlags, artifact: Path, threads: int, *, reads_stdin: bool) -> None:
    """Runs this command line as the ranks of `artifact` on a Ray cluster and raises typer.Exit, if the flags ask for it
    and this process is no rank yet.

    threads: of each rank. reads_stdin: rank 0 has this process's stdin, and signals interrupt it. Raises BadParameter
    and PlacementError.
    """
    if flags.distributed_executor == "local":
        return
    if mpi_rank() is not None:
        from llmc.runtime.die_with_parent import signal_when_parent_dies

        # A node that Ray gives up kills the proxy of mpiexec, which then cannot end its ranks.
        signal_when_parent_dies(signal.SIGKILL)
        if reads_stdin:  # a server ends well on this signal
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        return
    num_ranks, gpus = _needs(artifact, threads)
    try:
        from llmc.runtime.rank_placement.cluster import ray_placement
    except ImportError as error:
        raise typer.BadParameter(
            f"Ray cannot be imported ({error}): install llmc's extra `ray`, or start the ranks with mpirun",
            param_hint="--distributed-executor",
        ) from error
    from llmc.runtime.rank_placement.mpiexec import find_mpiexec
    from llmc.runtime.rank_placement.run import run_placed

    program = find_mpiexec()
    stdout = exact(sys.stdout).buffer

    def write(data: bytes) -> None:
        stdout.write(data)
        stdout.flush()

    # The ranks know from mpiexec's environment that they are placed.
    command = [sys.executable, "-P", "-m", "llmc.cli.main", *sys.argv[1:]]
    spread = flags.rank_placement == "spread"
    with ray_placement(num_ranks, cpus=threads or 1, gpus=gpus, spread=spread) as placement:
        _say(", ".join(f"{host.ranks} on {host.address}" for host in placement.hosts))
        if placement.hosts[0].address != placement.address:
            _say(f"rank 0 is not on this node: what it writes and serves is on {placement.hosts[0].address}")
        stdin = None if reads_stdin else subprocess.DEVNULL
        code = run_placed(placement, program, command, stdin=stdin, write=write, say=_say, interrupts=reads_stdin)
    raise typer.Exit(code)


def _needs(artifact: Path, threads: int) -> tuple[int, int]:
    """Ranks of the artifact, and GPUs of each. Raises BadParameter and LlmcError."""
    hint = "--distributed-executor"
    if not (artifact / "graphs.bin").is_file():
        raise typer.BadParameter(
            f"ray needs an artifact that all nodes have at the same path, and {artifact} is none: compile it first",
            param_hint=hint,
        )
    from llmc.runtime.binding import Artifact

    with Artifact(artifact) as opened:
        info = opened.info
    if info.num_ranks == 1:
        raise typer.BadParameter(
            "ray places ranks, of which this artifact has none: compile it with --tensor-parallel or "
            "--pipeline-parallel, or use llmc deploy for replicas",
            param_hint=hint,
        )
    if info.target_kind == "cpu" and threads == 0:
        raise typer.BadParameter("ray reserves CPUs for the threads of each rank: give --threads", param_hint=hint)
    return info.num_ranks, 0 if info.target_kind == "cpu" else 1


def _say(line: str) -> None:
    print(f"llmc: {line}", file=sys.stderr, flush=True)
