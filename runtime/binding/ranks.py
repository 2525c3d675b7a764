"""The other ranks of a multi-rank artifact, as child processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmc.runtime.binding.handle import ERROR_NAMES, LlmcError, call


class RanksError(ValueError):
    """Ranks that the artifact or this machine does not have; the message is one sentence with the offending value."""


def parse_ranks(text: str, num_ranks: int, own: int | None = None) -> list[set[int]] | None:
    """The CPUs of each rank: "0-3,8|4-7" gives rank 0 the CPUs 0 to 3 and 8. None for a number of ranks, such as "2".

    num_ranks: of the artifact. own: the only rank whose CPUs must be available to this process; None if all must.
    Raises RanksError.
    """
    parts = [] if is_number(text.strip()) else [_cpus(part, text) for part in text.split("|")]
    number = len(parts) or int(text)
    if number != num_ranks:
        fit = "leave ranks out, or compile it with --tensor-parallel or --pipeline-parallel"
        raise RanksError(f"ranks {text!r} is for {number} ranks and the artifact for {num_ranks}: {fit}")
    if num_ranks == 1 and parts:
        raise RanksError(f"ranks {text!r} binds a rank and the artifact runs without ranks: use taskset or --threads")
    missing = set().union(*(parts if own is None else parts[own : own + 1])) - os.sched_getaffinity(0)
    if missing:
        raise RanksError(f"ranks {text!r} names CPU {min(missing)}, which this process may not use")
    return parts or None


def _cpus(listed: str, text: str) -> set[int]:
    """The CPUs of a list such as "0-3,8", which is part of the option `text`. Raises RanksError."""
    cpus: set[int] = set()
    for cpu_range in listed.split(","):
        first, _, last = (bound.strip() for bound in cpu_range.partition("-"))
        if not is_number(first) or not is_number(last or first) or int(first) > int(last or first):
            raise RanksError(
                f"ranks {text!r} has {cpu_range!r}: give the number of ranks, or the CPUs of each, such as 0-3|4-7 or "
                "0,2|1,3"
            )
        cpus.update(range(int(first), min(int(last or first), int(first) + _MOST_CPUS) + 1))
    return cpus


def is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20


_MOST_CPUS = 1 << 16  # of a range: more than any machine has
Cores = Sequence[Sequence[int]]
"""The CPUs of each core."""


def shares_of(by_node: Sequence[Cores], num_ranks: int) -> list[set[int]]:
    """Divides CPUs among ranks by memory nodes and whole cores, neighbours together, as far as there are enough."""
    each, rest = divmod(num_ranks, len(by_node))
    if rest == 0 and all(len(cores) >= each for cores in by_node):
        return [share for cores in by_node for share in _shares_of_node(cores, each)]
    if len(by_node) % num_ranks == 0:
        of_rank = len(by_node) // num_ranks
        by_node = [
            [core for cores in by_node[first : first + of_rank] for core in cores]
            for first in range(0, len(by_node), of_rank)
        ]
        return [{cpu for core in cores for cpu in core} for cores in by_node]
    return _shares_of_node([core for cores in by_node for core in cores], num_ranks)


def _shares_of_node(by_core: Cores, num_ranks: int) -> list[set[int]]:
    units = list(by_core) if len(by_core) >= num_ranks else [[cpu] for core in by_core for cpu in core]
    if len(units) < num_ranks:
        return [{cpu for unit in units for cpu in unit}] * num_ranks
    ends = [len(units) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [{cpu for unit in units[first:end] for cpu in unit} for first, end in itertools.pairwise(ends)]


_SYSTEM = Path("/sys/devices/system")


def own_cpus(system: Path = _SYSTEM) -> list[list[list[int]]]:
    """The CPUs available to this process, by memory node and core. system: where the kernel describes them."""
    nodes: dict[str, dict[str, list[int]]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        described = system / "cpu" / f"cpu{cpu}"
        try:
            core = (described / "topology" / "thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        node = next((found.name for found in described.glob("node[0-9]*")), "")
        nodes.setdefault(node, {}).setdefault(core, []).append(cpu)
    return [list(cores.values()) for cores in nodes.values()]


class LocalRanks:
    """Starts ranks 1 … of an artifact after rank 0 has opened its device with `options`, and watches them.

    They end with rank 0's engine or process. Raises RanksError.
    """

    def __init__(self, num_ranks: int, wanted: str | None = None) -> None:
        """wanted: as in `parse_ranks`. Without CPUs there, this process's are divided."""
        cpus = None if wanted is None else parse_ranks(wanted, num_ranks)
        self._cpus = cpus or shares_of(own_cpus(), num_ranks)
        self._num_ranks = num_ranks
        self._memory = os.memfd_create("llmc-ranks")
        self._room = f"/proc/self/fd/{self._memory}"
        self._left = num_ranks
        self._lock = threading.Lock()
        self._own_cpus: set[int] = set()
        self.failure: str | None = None
        self.pids: list[int] = []

    def options(self, rank: int) -> dict[str, str]:
        """Device options of a rank."""
        return {"room": self._room, "rank": str(rank), "ranks": str(self._num_ranks)}

    def start(self, artifact: Path, kind: str, options: Sequence[Mapping[str, str]]) -> None:
        """Starts the processes, after rank 0 has opened its device. options: further device options, by rank."""
        for rank in range(1, self._num_ranks):
            work = {
                "artifact": str(artifact), "kind": kind, "cpus": sorted(self._cpus[rank]),
                "options": {**options[rank], **self.options(rank)},
            }  # fmt: skip
            child = subprocess.Popen(
                [sys.executable, "-m", "llmc.runtime.follow", json.dumps(work)],
                stdin=subprocess.PIPE,  # closes with this process
                stdout=subprocess.DEVNULL,
                pass_fds=(self._memory,),
            )
            self.pids.append(child.pid)
            with self._lock:
                self._left += 1
            threading.Thread(target=self._watch, args=(rank, child), name=f"llmc-rank-{rank}", daemon=True).start()
        self._release(self._num_ranks)

    def _watch(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if child.stdin is not None:
            child.stdin.close()
        if code != 0:
            how = f"ended with exit code {code}"
            if code < 0:
                how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            why = f"its process {child.pid} {how}"
            with self._lock:  # ranks that end because of the first one are not reported
                self.failure = self.failure or f"Rank {rank} of {self._num_ranks} has failed: {why}; start anew."
            call("llmc_room_report", self._room.encode(), rank, why.encode())
        self._release(1)

    def _release(self, count: int) -> None:
        """Closes the shared memory with its last user."""
        with self._lock:
            self._left -= count
            last = self._left == 0
        if last:
            os.close(self._memory)

    def check(self) -> None:
        """Raises LlmcError if a rank has ended."""
        if self.failure is not None:
            raise LlmcError(ERROR_NAMES.index("internal"), self.failure)

    def bind(self) -> None:
        """Binds the calling thread, and threads it starts, to rank 0's CPUs until `unbind`."""
        self._own_cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cpus[0])

    def unbind(self) -> None:
        """Restores the calling thread's CPUs from before `bind`."""
        os.sched_setaffinity(0, self._own_cpus)
