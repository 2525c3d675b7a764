"""Profiles one bucket command by command, with timed replays and the machine's measured limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import FAMILIES
from llmc.graphs_records import Graph, Tables
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.binding.machine_limits import LIMITS, Probe
from llmc.runtime.graph_view import commands_of, op_of
from llmc.runtime.profile.costs import Cost, arithmetic, command_cost, kernel_params
from llmc.runtime.profile.steps import Step

Times = npt.NDArray[np.float64]
_WARM_UPS = 2


@dataclass(frozen=True)
class Replay:
    """One replay; all times in nanoseconds.

    start, end: [threads, commands], since the replay began.
    imbalance: wait for the last thread to reach the barrier after the command.
    sync: time to leave the barrier after that.
    total: wall time.
    """

    start: Times
    end: Times
    imbalance: Times
    sync: Times
    total: float

    @property
    def kernel(self) -> Times:
        return self.end - self.start

    def overhead(self, thread: int = 0) -> float:
        """A thread's time outside kernels and barriers: inputs, waking the team, fetching commands."""
        spent = self.kernel[thread].sum() + self.imbalance[thread].sum() + self.sync[thread].sum()
        return float(self.total - spent)


def as_replay(times: npt.NDArray[np.uint64], barriers: npt.NDArray[np.bool_], total: float) -> Replay:
    """times: [threads, commands, 3] from Replayer.command_times. barriers: [commands]. The team also meets at the
    end."""
    start, end, leave = (times[:, :, i].astype(np.float64) for i in range(3))
    last = end.max(axis=0)
    meets = barriers.copy()
    meets[-1] = True
    # Each thread reads its own core's clock: differences may be off by a few nanoseconds; clip at zero.
    imbalance = np.where(meets, np.maximum(last - end, 0), 0)
    sync = np.where(barriers, np.maximum(leave - np.maximum(last, end), 0), 0)
    sync[:, -1] = 0
    return Replay(start, end, imbalance, sync, total)


@dataclass(frozen=True)
class CommandProfile:
    """A command of the profiled bucket. name, layer: as in CommandView. start_ns (since the replay began), kernel_ns,
    imbalance_ns, sync_ns: one value per thread.

    limit: the binding limit; None for a command that neither reads weights or KV cache nor multiplies. share: the
    fraction of it reached.
    """

    index: int
    name: str
    symbol: str
    family: str
    layer: int
    barrier: bool
    cost: Cost
    start_ns: tuple[float, ...]
    kernel_ns: tuple[float, ...]
    imbalance_ns: tuple[float, ...]
    sync_ns: tuple[float, ...]
    limit: str | None
    share: float | None

    @property
    def op(self) -> str:
        return op_of(self.symbol)

    @property
    def ns(self) -> float:
        """Time in the kernel, averaged over threads."""
        return sum(self.kernel_ns) / len(self.kernel_ns)


@dataclass(frozen=True)
class SumTimes:
    """Sums over the ranks in a replay, on rank 0, averaged over the replays.

    count: sums. exposed_ns: time that the rank spent in them, with its wait for others. hidden_ns: time in which they
    were on their way beside kernels. least_rows: rows from which on a step runs in two parts to that end; 0: none does.
    """

    count: float
    exposed_ns: float
    hidden_ns: float
    least_rows: int


def _sum_times(before: Mapping[str, int], after: Mapping[str, int], replays: int) -> SumTimes | None:
    """From device statistics around the replays; None without ranks."""
    if "ranks" not in after:
        return None
    count, exposed, hidden = (
        (after[name] - before[name]) / replays for name in ("all_reduces", "all_reduce_ns", "all_reduce_hidden_ns")
    )
    return SumTimes(count, exposed, hidden, after.get("overlap_rows", 0))


@dataclass(frozen=True)
class Profile:
    """One bucket, its median replay by wall time, and the limits per second (None where the CPU lacks it)."""

    bucket: str
    step: Step
    num_threads: int
    limits: dict[str, float | None]
    step_ns: tuple[float, ...]
    replay: Replay
    commands: tuple[CommandProfile, ...]
    sums: SumTimes | None = None
    """Of an artifact with ranks."""


def bound(cost: Cost, products: str, limits: dict[str, float | None]) -> tuple[str | None, float]:
    """(binding limit, its minimum nanoseconds) for a cost whose products run at limit `products`."""
    peak = limits.get(products) or 0.0
    read = limits.get("read") or 0.0
    times = {
        "read": cost.memory_bytes / read * 1e9 if read else 0.0,
        products: cost.flops / peak * 1e9 if peak else 0.0,
    }
    name = max(times, key=lambda limit: times[limit])
    return (name, times[name]) if times[name] > 0 else (None, 0.0)


def measure_limits(probe: Probe, names: Iterable[str], seconds: float) -> dict[str, float | None]:
    """Each limit once."""
    return {name: probe.measure(name, seconds) for name in names}


def _mean(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else (first + second) / 2


def profile_bucket(
    artifact: Artifact,
    tables: Tables,
    manifest: dict[str, Any],
    graph_index: int,
    step: Step,
    *,
    num_threads: int = 0,
    weight_memory: str = "copied",
    repeat: int = 10,
    probe_seconds: float = 0.2,
    overlap_sums: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """Replays `step` in graph `graph_index` `repeat` times; measures the limits before and after.

    overlap_sums: as in `OPTION_NAMES`.

    Raises LlmcError when the graph cannot run the step.
    """
    graph, model = tables.graphs[graph_index], tables.model
    replays = []
    num_blocks = step.num_blocks(model.block_size)
    with Replayer(
        artifact,
        num_threads=num_threads,
        num_blocks=num_blocks,
        weight_memory=weight_memory,
        overlap_sums=overlap_sums,
    ) as replayer:
        threads = replayer.stats.num_threads
        with Probe(threads) as probe:
            before = measure_limits(probe, LIMITS, probe_seconds)
            replayer.set_profiling(True)
            barriers = np.array([command.barrier for command in tables.commands_of(graph)])
            for i in range(_WARM_UPS + repeat):
                if i == _WARM_UPS:
                    counted = replayer.device_stats()
                total = replayer.stats.total_ns
                step.run(replayer, graph_index, model.block_size, model.vocab_size, seed=i)
                total = replayer.stats.total_ns - total
                if i < _WARM_UPS:
                    continue
                times = np.stack([replayer.command_times(thread) for thread in range(threads)])
                replays.append(as_replay(times, barriers, total))
                if progress is not None:
                    progress(len(replays))
            sums = _sum_times(counted, replayer.device_stats(), repeat)
            after = measure_limits(probe, LIMITS, probe_seconds)
    limits = {name: _mean(before[name], after[name]) for name in LIMITS}
    median = sorted(replays, key=lambda replay: replay.total)[(len(replays) - 1) // 2]
    return Profile(
        bucket=graph.name,
        step=step,
        num_threads=threads,
        limits=limits,
        step_ns=tuple(replay.total for replay in replays),
        replay=median,
        commands=_commands(tables, manifest, graph, step, median, limits),
        sums=sums,
    )


def _commands(
    tables: Tables, manifest: dict[str, Any], graph: Graph, step: Step, replay: Replay, limits: dict[str, float | None]
) -> tuple[CommandProfile, ...]:
    params, found = kernel_params(manifest), []
    views, stages = commands_of(tables, graph), tables.stages_of(graph)
    for index, command in enumerate(tables.commands_of(graph)):
        if 0 not in stages[index]:
            continue  # other ranks run it
        symbol, family = tables.name_of(command), FAMILIES[command.family]
        mine = params.get(symbol, {})
        cost = command_cost(tables, graph, command, mine, step)
        kernel = replay.kernel[:, index]
        limit, least = bound(cost, arithmetic(family, mine, tables.target), limits)
        if family not in ("linear", "attention"):
            limit = None  # their few bytes are cached
        time = float(kernel.mean())
        found.append(
            CommandProfile(
                index=index,
                name=views[index].name,
                symbol=symbol,
                family=family,
                layer=views[index].layer,
                barrier=command.barrier,
                cost=cost,
                start_ns=tuple(map(float, replay.start[:, index])),
                kernel_ns=tuple(map(float, kernel)),
                imbalance_ns=tuple(map(float, replay.imbalance[:, index])),
                sync_ns=tuple(map(float, replay.sync[:, index])),
                limit=limit,
                share=least / time if limit is not None and time > 0 else None,
            )
        )
    return tuple(found)
