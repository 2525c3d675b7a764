"""Cost tables: measured replay times of an artifact's graphs on one machine; one JSON file per (artifact, machine).

    {"llmc_cost_table": 2,
     "machine": {"processor": "…", "threads": "2", …},
     "artifact": "64 hex digits",
     "padding": "skipped",
     "step_s": 1.1e-05, "token_s": 3e-07,
     "costs": [{"phase": "prefill", "batch": 1, "seq": 128, "sequences": 1, "tokens": 128, "context": 128,
                "seconds": 0.0031, "repeats": 5, "deviation_s": 4e-05, "disturbed": 0.02}, …]}

A cost is the typical time of `repeats` replays of one load: `sequences` with `tokens` new tokens in all, and `context`
tokens of context each after the step. `deviation_s` is the standard deviation of the repeats, 0 for a single one.
`disturbed` is the share of time that other programs took or engine threads waited for a CPU, 0 to 1; 0 also if the
system does not tell. Version 1 had neither; both are read as 0.

A row of a bucket with a total context also has `"total": true`. The full load of a bucket is (batch, batch × seq, seq)
in prefill and (batch, batch, seq) in decode, where a total is shared equally in whole blocks. A measured bucket always
has its full load; others may follow. A table may cover part of a ladder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from llmc.regular_file import JsonError, parse_json, read_regular
from llmc.replaced_file import write_replaced
from llmc.shown import shown

from .bucket import MAX_DIM, TOTAL, Bucket, BucketError

VERSION = 2
DISTURBED = 0.1
"""From this share on, a cost counts as measured under load and is measured again."""
PADDING = ("skipped", "computed")
_MARK = "llmc_cost_table"
MAX_TABLE_BYTES = 1 << 24
_MOST_SECONDS = 1e9
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


class CostTableError(BucketError):
    """A cost table cannot be read, written or used; the message names the file and the fault."""


@dataclass(frozen=True, order=True, slots=True)
class ReplayCost:
    """Typical wall time, in seconds, of `repeats` replays of a load in `bucket`. context: tokens per sequence after the
    step.

    deviation_s: standard deviation of the repeats. disturbed: share of time taken by other work, 0 … 1.
    """

    bucket: Bucket
    sequences: int
    tokens: int
    context: int
    seconds: float
    repeats: int = 1
    deviation_s: float = 0.0
    disturbed: float = 0.0

    def __post_init__(self) -> None:
        counts = {"sequences": self.sequences, "tokens": self.tokens, "context": self.context, "repeats": self.repeats}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIM:
                raise CostTableError(f"{name} of a cost of {self.bucket} is {shown(value)}: use 1 to {MAX_DIM}")
        if self.tokens < self.sequences:
            raise CostTableError(
                f"a cost of {self.bucket} has {self.sequences} sequences and {self.tokens} tokens: give each one"
            )
        number = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
        if not number or not 0 < self.seconds <= _MOST_SECONDS:
            raise CostTableError(f"cost of {self.bucket} is {shown(self.seconds)}: a table needs seconds, more than 0")
        for name, share, most in (("deviation_s", self.deviation_s, _MOST_SECONDS), ("disturbed", self.disturbed, 1)):
            number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not number or not 0 <= share <= most:
                raise CostTableError(f"{name} of a cost of {self.bucket} is {shown(share)}: use 0 to {most:g}")

    @property
    def under_load(self) -> bool:
        """Whether other work disturbed the measurement too much to trust it."""
        return self.disturbed >= DISTURBED

    @property
    def load(self) -> tuple[Bucket, int, int, int]:
        """Identifies the replayed load; a table has one cost per load."""
        return self.bucket, self.sequences, self.tokens, self.context


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of one artifact on one machine, sorted, one per load.

    machine: facts by name, including the thread count, but no host name. artifact: `artifact_key` of the artifact.
    padding: whether the target skips or computes padding rows. step_s, token_s: seconds of a step outside its replay,
    and per token sampled in it; 0 if not measured.
    """

    machine: Mapping[str, str]
    artifact: str
    costs: tuple[ReplayCost, ...] = ()
    padding: str = "computed"
    step_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.machine or not all(isinstance(x, str) for item in self.machine.items() for x in item):
            raise CostTableError(f"machine of a cost table is {shown(self.machine)}: it needs facts, texts by name")
        if not isinstance(self.artifact, str) or not _KEY.fullmatch(self.artifact):
            raise CostTableError(f"artifact of a cost table is {shown(self.artifact)}: it needs 64 hex digits")
        if self.padding not in PADDING:
            raise CostTableError(f"padding of a cost table is {shown(self.padding)}: use {' or '.join(PADDING)}")
        for name, seconds in (("step_s", self.step_s), ("token_s", self.token_s)):
            number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
            if not number or not 0 <= seconds <= _MOST_SECONDS:
                raise CostTableError(f"{name} of a cost table is {shown(seconds)}: use seconds, 0 or more")
        if len({cost.load for cost in self.costs}) != len(self.costs):
            raise CostTableError("a cost table has two costs of one load: it needs one each")
        object.__setattr__(self, "machine", dict(self.machine))
        object.__setattr__(self, "costs", tuple(sorted(self.costs)))

    @property
    def buckets(self) -> frozenset[Bucket]:
        """The buckets that were measured."""
        return frozenset(cost.bucket for cost in self.costs)

    def full(self) -> dict[Bucket, float]:
        """Seconds of each measured bucket at full load: most sequences, tokens and context."""
        return {cost.bucket: cost.seconds for cost in full_costs(self.costs)}

    def with_costs(self, costs: Iterable[ReplayCost]) -> CostTable:
        """This table with `costs` replacing those of equal loads.

        A cost under load never replaces one that is not, nor a less disturbed one.
        """
        merged = {cost.load: cost for cost in self.costs}
        for cost in costs:
            known = merged.get(cost.load)
            if known is None or not cost.under_load or cost.disturbed <= known.disturbed:
                merged[cost.load] = cost
        return replace(self, costs=tuple(merged.values()))

    def to_json(self) -> str:
        """The file's text, one line per cost."""
        head = {_MARK: VERSION, "machine": dict(self.machine), "artifact": self.artifact, "padding": self.padding}
        head |= {"step_s": self.step_s, "token_s": self.token_s}
        rows = ",\n".join(f"  {json.dumps(_row(cost))}" for cost in self.costs)
        return f'{json.dumps(head, indent=1, ensure_ascii=False)[:-2]},\n "costs": [\n{rows}\n ]\n}}\n'

    def write(self, path: Path) -> None:
        """Writes the file atomically. Raises CostTableError."""
        write_text(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """Reads a table. Raises CostTableError naming the file and the fault."""
        return cls.from_data(read_json(path), f"cost table {path}")

    @classmethod
    def from_data(cls, data: Any, name: str = "the cost table") -> CostTable:
        """The table in parsed JSON. Raises CostTableError."""
        version = data.get(_MARK) if isinstance(data, dict) else None
        if isinstance(version, bool) or not isinstance(version, int) or version not in _ROW_KEYS:
            raise CostTableError(f'{name} is not of version {VERSION}: it needs "{_MARK}": {VERSION}')
        given = {key: value for key, value in data.items() if key != _MARK}
        if unknown := sorted(set(given) - _FIELDS):
            raise CostTableError(f"{name} has the unknown field {shown(unknown[0])}: measure again with llmc warmup")
        machine, artifact, rows = given.get("machine"), given.get("artifact"), given.get("costs")
        if not isinstance(machine, dict) or not isinstance(artifact, str) or not isinstance(rows, list):
            raise CostTableError(f"{name} lacks machine, artifact or costs: measure again with llmc warmup")
        try:
            return cls(**given | {"costs": tuple(_cost(row, _ROW_KEYS[version]) for row in rows)})
        except BucketError as error:
            raise CostTableError(f"{name}: {error}") from error


def full_costs(costs: Iterable[ReplayCost]) -> list[ReplayCost]:
    """The cost of each bucket's largest load: most sequences, tokens and context."""
    largest: dict[Bucket, ReplayCost] = {}
    for cost in costs:
        best = largest.get(cost.bucket)
        if best is None or cost.load[1:] > best.load[1:]:
            largest[cost.bucket] = cost
    return list(largest.values())


_COUNTS = ("sequences", "tokens", "context")
_BUCKET_KEYS = ("phase", "batch", "seq")
_ROW_KEYS: dict[int, tuple[str, ...]] = {1: (*_BUCKET_KEYS, *_COUNTS, "seconds", "repeats")}
_ROW_KEYS[VERSION] = (*_ROW_KEYS[1], "deviation_s", "disturbed")
_FIELDS = frozenset(field.name for field in fields(CostTable))


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: readers and crashes see the old or the new one. Raises CostTableError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_replaced(path, text)
    except OSError as error:
        why = f"cannot write cost table {path}: {error.strerror or error}"
        raise CostTableError(f"{why}; free some space, or set LLMC_CACHE_DIR to a writable directory") from error


def read_json(path: Path) -> Any:
    """The JSON of a cost table's file. Raises CostTableError."""
    try:
        return parse_json(read_regular(path, MAX_TABLE_BYTES))
    except OSError as error:
        raise CostTableError(f"cannot read cost table {path}: {error.strerror or error}") from error
    except JsonError as error:
        raise CostTableError(f"cost table {path} is not valid JSON: {error}") from error


def is_cost_table(data: Any) -> bool:
    """Whether parsed JSON is marked as a cost table."""
    return isinstance(data, dict) and _MARK in data


def fingerprint(facts: Mapping[str, str]) -> str:
    """SHA-256, 64 hex digits, of facts by name."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def artifact_key(manifest: Mapping[str, Any]) -> str:
    """A key of what bucket costs depend on, 64 hex digits: architecture, dtypes, target and kernels.

    It excludes weight values and the ladder: a fine-tune has the same costs, and adding a bucket keeps the others'
    valid. Raises CostTableError for a manifest that lacks these facts.
    """
    graphs, kernels = manifest.get("graph_components"), manifest.get("kernels")
    try:
        if not isinstance(graphs, dict) or not kernels:
            raise TypeError
        templates = {tuple(str(k["components"][name]) for name in ("op", "template", "target")) for k in kernels}
    except (KeyError, TypeError):
        raise CostTableError("the artifact's manifest does not tell its graphs and kernels: compile it again") from None
    known = {str(name): str(value) for name, value in graphs.items()}
    return fingerprint({"graphs": json.dumps(known, sort_keys=True), "kernels": json.dumps(sorted(templates))})


def table_name(artifact: str, machine: Mapping[str, str]) -> str:
    """The file name of a table within a folder."""
    return f"{artifact[:16]}-{fingerprint(machine)[:16]}.json"


def load_table(folder: Path, artifact: str, machine: Mapping[str, str]) -> CostTable:
    """The table in `folder` for this artifact and machine; empty if there is none that can be read: measuring again
    only costs time."""
    with contextlib.suppress(CostTableError):
        table = CostTable.read(folder / table_name(artifact, machine))
        if table.artifact == artifact and dict(table.machine) == dict(machine):
            return table
    return CostTable(machine, artifact)


def find_tables(folder: Path, artifact: str) -> list[CostTable]:
    """The readable tables in `folder` for an artifact, of any machine; the most recently written first."""
    found: list[tuple[float, CostTable]] = []
    for path in folder.glob(f"{artifact[:16]}-*.json"):
        with contextlib.suppress(CostTableError, OSError):
            table = CostTable.read(path)
            if table.artifact == artifact:
                found.append((path.stat().st_mtime, table))
    return [table for _, table in sorted(found, key=lambda item: -item[0])]


def _row(cost: ReplayCost) -> dict[str, Any]:
    bucket = cost.bucket
    row = {"phase": bucket.phase, "batch": bucket.batch, "seq": bucket.seq, **({TOTAL: True} if bucket.total else {})}
    return row | {name: getattr(cost, name) for name in _ROW_KEYS[VERSION][len(_BUCKET_KEYS) :]}


def _cost(row: Any, keys: tuple[str, ...]) -> ReplayCost:
    total = isinstance(row, dict) and row.get(TOTAL) is True
    if not isinstance(row, dict) or set(row) != {*keys, *([TOTAL] if total else [])}:
        raise CostTableError(f"{shown(row)} is not a cost: give exactly {', '.join(keys)}")
    bucket = Bucket(row["phase"], row["batch"], row["seq"], total)
    return ReplayCost(bucket, *(row[name] for name in keys[len(_BUCKET_KEYS) :]))
