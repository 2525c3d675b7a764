"""A profile as plain data, and as a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.replaced_file import write_replaced
from llmc.runtime.graph_view import group_of
from llmc.runtime.profile.costs import NOTHING, Cost

if TYPE_CHECKING:
    from llmc.runtime.profile.profiler import CommandProfile, Profile, SumTimes

SHARES = ("kernels", "imbalance", "sync", "overhead")
"""The components of a thread's time in a replay."""


def _rate(amount: float, ns: float) -> float | None:
    """Amount per nanosecond, that is, G per second."""
    return amount / ns if amount and ns > 0 else None


def _group(name: str, commands: Sequence[CommandProfile], step_ns: float) -> dict[str, Any]:
    """Sums over commands. share: of the limits that bind them, each command by its own."""
    ns = sum(command.ns for command in commands)
    cost = sum((command.cost for command in commands), NOTHING)
    least = sum((command.share or 0.0) * command.ns for command in commands)
    limits = {command.limit for command in commands}
    limit = limits.pop() if len(limits) == 1 else None
    return {
        "name": name,
        "commands": len(commands),
        "us": ns / 1e3,
        "of_step": ns / step_ns,
        **_rates(cost, ns),
        "limit": limit,
        "of_limit": least / ns if least and ns else None,
        "barrier_wait_us": sum(sum(c.imbalance_ns) + sum(c.sync_ns) for c in commands)
        / len(commands[0].kernel_ns)
        / 1e3,
    }


def _rates(cost: Cost, ns: float) -> dict[str, Any]:
    return {
        "bytes": cost.bytes,
        "memory_bytes": cost.memory_bytes,
        "written_bytes": cost.written_bytes,
        "flops": cost.flops,
        "gb_per_s": _rate(cost.bytes, ns),
        "gflop_per_s": _rate(cost.flops, ns),
    }


def _grouped(profile: Profile, key: Callable[[CommandProfile], str]) -> list[dict[str, Any]]:
    groups: dict[str, list[CommandProfile]] = {}
    for command in profile.commands:
        groups.setdefault(key(command), []).append(command)
    return [_group(name, commands, profile.replay.total) for name, commands in groups.items()]


def _slowest_first(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(groups, key=lambda row: -row["us"])


def _threads(profile: Profile) -> list[dict[str, Any]]:
    replay = profile.replay
    return [
        {
            "thread": thread,
            "kernels_us": float(replay.kernel[thread].sum()) / 1e3,
            "imbalance_us": float(replay.imbalance[thread].sum()) / 1e3,
            "sync_us": float(replay.sync[thread].sum()) / 1e3,
            "overhead_us": replay.overhead(thread) / 1e3,
        }
        for thread in range(profile.num_threads)
    ]


def _sums(sums: SumTimes) -> dict[str, Any]:
    return {
        "count": sums.count,
        "exposed_us": sums.exposed_ns / 1e3,
        "hidden_us": sums.hidden_ns / 1e3,
        "overlap_rows": sums.least_rows,
    }


def profile_data(profile: Profile) -> dict[str, Any]:
    """Plain data; times in microseconds, limits in bytes or operations a second."""
    main = _threads(profile)[0]
    total = profile.replay.total / 1e3
    first = next((command.index for command in profile.commands if command.layer >= 0), 0)
    return {
        "bucket": profile.bucket,
        "sequences": [{"start": start, "tokens": count} for start, count in profile.step.sequences],
        "threads": profile.num_threads,
        "limits": profile.limits,
        "step_us": {
            "median": statistics.median(profile.step_ns) / 1e3,
            "min": min(profile.step_ns) / 1e3,
            "max": max(profile.step_ns) / 1e3,
            "replays": len(profile.step_ns),
        },
        "replay": {"us": total, **{f"{name}_share": main[f"{name}_us"] / total for name in SHARES}},
        "per_thread": _threads(profile),
        "sums": None if profile.sums is None else _sums(profile.sums),
        "families": _slowest_first(_grouped(profile, lambda command: command.family)),
        "ops": _slowest_first(_grouped(profile, lambda command: command.op)),
        "kernels": _slowest_first(_grouped(profile, lambda command: command.symbol)),
        "layers": _grouped(profile, lambda command: group_of(command.layer, command.index, first)),
        "commands": [
            {
                "index": command.index,
                "name": command.name,
                "group": group_of(command.layer, command.index, first),
                "symbol": command.symbol,
                "op": command.op,
                "family": command.family,
                "layer": command.layer,
                "barrier": command.barrier,
                "us": command.ns / 1e3,
                "start_us_per_thread": [ns / 1e3 for ns in command.start_ns],
                "us_per_thread": [ns / 1e3 for ns in command.kernel_ns],
                "imbalance_us_per_thread": [ns / 1e3 for ns in command.imbalance_ns],
                "sync_us_per_thread": [ns / 1e3 for ns in command.sync_ns],
                **_rates(command.cost, command.ns),
                "limit": command.limit,
                "of_limit": command.share,
            }
            for command in profile.commands
        ],
    }


def trace_data(profile: Profile) -> dict[str, Any]:
    """The profiled replay in the Chrome trace event format; one track a thread, times in microseconds."""
    replay = profile.replay
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": f"llmc {profile.bucket}"}}
    ]
    for thread in range(profile.num_threads):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": f"thread {thread}"}})
        for command in profile.commands:
            i = command.index
            start, end = float(replay.start[thread, i]), float(replay.end[thread, i])
            wait = float(replay.imbalance[thread, i] + replay.sync[thread, i])
            events.append(
                {
                    "ph": "X",
                    "name": command.op,
                    "cat": command.family,
                    "pid": 0,
                    "tid": thread,
                    "ts": start / 1e3,
                    "dur": (end - start) / 1e3,
                    "args": {
                        "command": i,
                        "symbol": command.symbol,
                        "layer": command.layer,
                        "bytes": command.cost.bytes,
                        "flops": command.cost.flops,
                    },
                }
            )
            if wait:
                events.append(
                    {
                        "ph": "X",
                        "name": "wait",
                        "cat": "barrier",
                        "pid": 0,
                        "tid": thread,
                        "ts": end / 1e3,
                        "dur": wait / 1e3,
                        "args": {"command": i, "imbalance_us": float(replay.imbalance[thread, i]) / 1e3},
                    }
                )
    return {"displayTimeUnit": "ns", "traceEvents": events}


def write_trace(profile: Profile, path: Path) -> None:
    """Writes the trace. Raises OSError."""
    write_replaced(path, json.dumps(trace_data(profile)) + "\n")
