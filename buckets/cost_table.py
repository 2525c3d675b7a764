"""The file of measured costs: what replays of an artifact's graphs take on one machine.

JSON, written in one step by whoever measures (`llmc warmup`, `llmc buckets measure`):

    {"llmc_cost_table": 1,
     "machine": "…",            fingerprint of the machine that measured: another one must measure again
     "artifact": "…",           key of the artifact whose graphs were measured
     "model": "…",              name for people, "" if unknown
     "threads": 2,              of the team that replayed
     "padding": "skipped",      what the target does with rows of padding: "skipped" or "computed"
     "step_s": 1.1e-05,         time of a step around its replay: to schedule, prepare, publish
     "token_s": 3e-07,          the same for each token that is sampled
     "costs": [{"phase": "decode", "batch": 4, "seq": 512,
                "sequences": 4, "tokens": 4, "context": 512, "seconds": 0.0021, "repeats": 5}, …]}

phase, batch and seq name the bucket; sequences, tokens (of all of them) and context (tokens that each of them has in the
KV cache after the step) the load that it carried. A bucket's full load is (batch, batch × seq, seq) in prefill and
(batch, batch, seq) in decode; where padding is skipped, partial loads of a bucket are measured, too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from .bucket import MAX_DIM, Bucket, BucketError

VERSION = 1
PADDING = ("skipped", "computed")
_MAX_FILE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load in one bucket. seconds: median of `repeats` replays. Raises BucketError for values out of range."""

    bucket: Bucket
    sequences: int
    tokens: int
    context: int
    seconds: float
    repeats: int = 1

    def __post_init__(self) -> None:
        for name in ("sequences", "tokens", "context", "repeats"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIM:
                raise BucketError(f"a cost of {self.bucket} has {name} {value!r}: use a whole number from 1 on")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, (int, float)) or not 0 < self.seconds < 1e9:
            raise BucketError(f"a cost of {self.bucket} is {self.seconds!r}: a table needs seconds, more than 0")

    @classmethod
    def full(cls, bucket: Bucket, seconds: float, repeats: int = 1) -> Measurement:
        """`bucket` without padding."""
        return cls(bucket, bucket.batch, bucket.max_tokens, bucket.seq, seconds, repeats)

    @property
    def is_full(self) -> bool:
        """True when the bucket carried no padding."""
        return self.tokens == self.bucket.max_tokens and self.context >= self.bucket.seq


@dataclass(frozen=True, slots=True)
class CostTable:
    """The measured costs of one artifact on one machine; the fields are those of the file."""

    machine: str
    artifact: str
    costs: tuple[Measurement, ...]
    model: str = ""
    threads: int = 0
    padding: str = "computed"
    step_s: float = 0.0
    token_s: float = 0.0
    _by_bucket: dict[Bucket, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.costs:
            raise BucketError("the cost table is empty: measure at least one bucket of each phase")
        if self.padding not in PADDING:
            raise BucketError(f"the cost table has padding {self.padding!r}: use one of {', '.join(PADDING)}")
        for name in ("step_s", "token_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BucketError(f"the cost table has {name} {getattr(self, name)!r}: use seconds, 0 or more")
        fullest = sorted(self.costs, key=lambda one: (one.tokens, one.context))
        object.__setattr__(self, "_by_bucket", {one.bucket: one.seconds for one in fullest})

    def by_bucket(self) -> Mapping[Bucket, float]:
        """Seconds of each measured bucket under its fullest load."""
        return self._by_bucket

    def of_phase(self, phase: str) -> list[Measurement]:
        """The measurements in buckets of one phase."""
        return [one for one in self.costs if one.bucket.phase == phase]


def read_cost_table(path: Path) -> CostTable:
    """Reads a cost table, or the short form {"prefill:1x128": seconds, …}. Raises BucketError naming file and entry."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise BucketError(f"cost table {path} is larger than {_MAX_FILE_BYTES} bytes: give a smaller one")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BucketError(f"cannot read cost table {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, BucketError):
            raise
        raise BucketError(f"cost table {path} is not valid JSON: {error}") from error
    if not isinstance(data, dict) or not data:
        raise BucketError(f'cost table {path} must map buckets to seconds, as in {{"prefill:1x128": 0.0031}}')
    if "llmc_cost_table" not in data:
        short = tuple(Measurement.full(Bucket.parse(name), seconds) for name, seconds in data.items())
        return CostTable("", "", short)
    if data["llmc_cost_table"] != VERSION:
        raise BucketError(f"cost table {path} is of version {data['llmc_cost_table']!r}: this llmc reads {VERSION}")
    return _parse(data, path)


def write_cost_table(path: Path, table: CostTable) -> None:
    """Writes the file in one step. Raises BucketError when it cannot be written."""
    fields = asdict(table)
    del fields["costs"], fields["_by_bucket"]
    rows = []
    for one in table.costs:
        row = {"phase": one.bucket.phase, "batch": one.bucket.batch, "seq": one.bucket.seq}
        rows.append(json.dumps(row | {name: getattr(one, name) for name in _MEASURED}))
    head = json.dumps({"llmc_cost_table": VERSION, **fields}, indent=1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(head[:-2] + ',\n "costs": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BucketError(f"cannot write cost table {path}: {error.strerror or error}") from error


_MEASURED = ("sequences", "tokens", "context", "seconds", "repeats")
_BUCKET = ("phase", "batch", "seq")
_FIELDS = ("machine", "artifact", "model", "threads", "padding", "step_s", "token_s")


def _parse(data: dict[str, Any], path: Path) -> CostTable:
    unknown = sorted(data.keys() - {*_FIELDS, "costs", "llmc_cost_table"})
    if unknown:
        raise BucketError(f"cost table {path} has the unknown field {unknown[0]!r}: it holds {', '.join(_FIELDS)}")
    types = get_type_hints(CostTable)
    given = {name: data[name] for name in _FIELDS if name in data}
    for name, value in given.items():
        kinds = (int, float) if types[name] is float else (types[name],)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise BucketError(f"cost table {path} has {name} {str(value)[:40]!r}: a {types[name].__name__} is needed")
    rows = data.get("costs")
    if not isinstance(rows, list):
        raise BucketError(f"cost table {path} has no list of costs: measure again")
    costs = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.keys() != {*_BUCKET, *_MEASURED}:
            raise BucketError(
                f"cost {number} of {path} is {str(row)[:60]!r}: give exactly {', '.join((*_BUCKET, *_MEASURED))}"
            )
        try:
            bucket = Bucket(*(row[name] for name in _BUCKET))
            costs.append(Measurement(bucket, *(row[name] for name in _MEASURED)))
        except BucketError as error:
            raise BucketError(f"cost {number} of {path}: {error}") from None
    try:
        return CostTable(costs=tuple(costs), **{"machine": "", "artifact": "", **given})
    except BucketError as error:
        raise BucketError(f"{path}: {error}") from None
