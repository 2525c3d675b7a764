"""Cost tables of artifacts: where they are stored, found by artifact and machine, and filled while a warm-up
measures."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.cost import MeasuredCost
from llmc.buckets.cost_table import (
    CostTable,
    ReplayCost,
    artifact_key,
    find_tables,
    is_cost_table,
    load_table,
    read_json,
    table_name,
)
from llmc.buckets.cost_trust import doubtful, falls, trusted
from llmc.buckets.step_cost import StepCosts
from llmc.cache_root import cost_folder
from llmc.machine import PADDING, machine_facts
from llmc.manifest import read_manifest

if TYPE_CHECKING:
    from llmc.runtime.binding import GraphInfo
    from llmc.runtime.warm_up.warm_up import WarmStep

_WRITE_EVERY_S = 2.0


def step_costs(where: Path) -> StepCosts:
    """The costs in a file, or those measured for an artifact. A table in short form describes full buckets only and is
    read as that of a target that computes padding. Raises BucketError."""
    if where.is_dir():
        return StepCosts.of_table(measured_table(where), f"measured, {where.name}")
    data = read_json(where)
    if is_cost_table(data):
        return StepCosts.of_table(CostTable.from_data(data, f"cost table {where}"), f"measured, {where.name}")
    return StepCosts.of_model(MeasuredCost.read(where), f"measured, {where.name}")


def measured_table(artifact: Path) -> CostTable:
    """The costs measured for an artifact: on this machine if there are any, else the latest from any machine.

    Raises BucketError when there are none.
    """
    tables = find_tables(cost_folder(), artifact_key(read_manifest(artifact)))
    tables = [table for table in tables if table.costs]
    if not tables:
        raise BucketError(
            f"no costs of {artifact} have been measured: run llmc warmup {artifact}, or give a cost table"
        )
    return min(tables, key=lambda table: not _is_here(table.machine))


def table_warnings(table: CostTable) -> list[str]:
    """Warnings about a table: costs that fall as buckets grow, which predictions refuse, and disturbed measurements."""
    fallen = falls(table.costs)
    under_load = trusted(table.costs)[1]
    lines = [f"{fallen[0]}: predictions refuse such costs, measure again with llmc warmup --again"] if fallen else []
    return [*lines, *([under_load] if under_load else [])]


def bucket_of(graph: GraphInfo) -> Bucket:
    """The bucket that a graph was compiled for."""
    return graph.bucket


class CostRecorder:
    """The cost table of an artifact on this machine, filled step by step. It is written periodically, so an interrupted
    warm-up keeps what it measured. Methods raise CostTableError when it cannot be written."""

    def __init__(self, artifact: Path, folder: Path, graphs: Sequence[GraphInfo], num_threads: int) -> None:
        """num_threads: of the engine. Raises BucketError when the artifact's manifest does not identify it."""
        key, machine = artifact_key(read_manifest(artifact)), machine_facts(num_threads)
        self.path = folder / table_name(key, machine)
        known = load_table(folder, key, machine)
        self.table = CostTable(machine, key, known.costs, PADDING, known.step_s, known.token_s)
        self._graphs = graphs
        self._pending: list[ReplayCost] = []
        self._written = time.monotonic()

    def unknown(self) -> frozenset[int]:
        """Indices of graphs whose bucket has no cost yet, or one to measure again: measured under load, or falling as
        buckets grow."""
        known = self.table.buckets - {cost.bucket for cost in doubtful(self.table)}
        return frozenset(i for i, graph in enumerate(self._graphs) if bucket_of(graph) not in known)

    def check_writable(self) -> None:
        """Writes a table beside its own and removes it, before anything is measured in vain."""
        beside = self.path.with_suffix(f".{os.getpid()}")
        self.table.write(beside)
        beside.unlink(missing_ok=True)

    def take(self, step: WarmStep) -> None:
        """Records the measurements of a warm-up step."""
        for one in step.measured:
            load, bucket = one.load, bucket_of(self._graphs[one.graph])
            self._pending.append(
                ReplayCost(
                    bucket, load.num_seqs, load.tokens, load.context, one.seconds, one.repeats, one.deviation_s,
                    one.disturbed,
                )
            )  # fmt: skip
        if time.monotonic() - self._written > _WRITE_EVERY_S:
            self.flush()

    def take_overhead(self, step_s: float, token_s: float) -> None:
        """Records the time of a step around its replay, and of each sampled token; then writes all records."""
        self.table = replace(self.table.with_costs(self._pending), step_s=step_s, token_s=token_s)
        self._pending = []
        self.table.write(self.path)

    def flush(self) -> None:
        """Writes the records."""
        self._written = time.monotonic()
        if self._pending:
            self.table, self._pending = self.table.with_costs(self._pending), []
            self.table.write(self.path)


def _is_here(machine: Mapping[str, str]) -> bool:
    """Whether costs were measured on a machine like this one, with any number of threads."""
    here = machine_facts(0)
    return {**machine, "threads": ""} == {**here, "threads": ""}
