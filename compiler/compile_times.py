"""Durations of compilations from an empty cache, stored beside the cost tables, for later estimates."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.cost_table import CostTableError, read_json, write_text
from llmc.buckets.planner import Resources
from llmc.cache_root import cost_folder
from llmc.machine import machine_facts

if TYPE_CHECKING:
    from llmc.compiler.config import CompileConfig, CompileReport

_FILE = "compile.json"
_MARK = "llmc_compile_times"
_KEPT = 32
# Phases whose duration is per graph; the others run once. Downloads are left out: they say nothing of the machine.
_A_GRAPH, _NOT_COUNTED = ("graphs",), ("download",)


def note(report: CompileReport, config: CompileConfig) -> None:
    """Records a compilation that found no kernel in the cache and used a process per CPU; others say nothing of a first
    one.

    A file that cannot be written costs an estimate, never the compilation.
    """
    if report.kernels_cached or config.jobs:
        return
    seconds = {phase: taken for phase, taken in report.phase_seconds.items() if phase not in _NOT_COUNTED}
    graphs_s = sum(seconds.get(phase, 0.0) for phase in _A_GRAPH)
    row = {
        "machine": machine_facts(0),
        "graphs": report.num_graphs,
        "once_s": round(sum(seconds.values()) - graphs_s, 3),
        "graph_s": round(graphs_s / report.num_graphs, 4),
    }
    path = cost_folder(config.cache_dir / "costs" if config.cache_dir else None) / _FILE
    rows = [*_rows(path), row][-_KEPT:]
    lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in rows)
    with contextlib.suppress(CostTableError):
        write_text(path, f'{{"{_MARK}": 1, "compiles": [\n{lines}\n]}}\n')


def learned(resources: Resources) -> Resources:
    """`resources` with medians of known compilations on machines like this one, if there are any."""
    here = machine_facts(0)
    mine = [row for row in _rows(cost_folder() / _FILE) if row["machine"] == here]
    if not mine:
        return resources
    once_s, graph_s = (statistics.median(row[name] for row in mine) for name in ("once_s", "graph_s"))
    return replace(resources, compile_once_s=once_s, compile_graph_s=graph_s)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The valid rows of the file; empty if it cannot be read, which the next compilation repairs."""
    try:
        data = read_json(path)
    except CostTableError:
        return []
    listed = data.get("compiles") if isinstance(data, Mapping) and data.get(_MARK) == 1 else None
    return [row for row in listed if _is_sound(row)] if isinstance(listed, list) else []


def _is_sound(row: object) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("machine"), dict)
        and all(type(row.get(name)) is float and 0 < row[name] < math.inf for name in ("once_s", "graph_s"))
    )
