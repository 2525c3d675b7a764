"""Steps that run in two parts, so that sums over the ranks go on beside kernels: whether a device may do that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.manifest import read_manifest
from llmc.mpi_loader import mpi_rank
from llmc.runtime.binding import ArtifactInfo
from llmc.runtime.binding.devices import OVERLAP_SUMS, overlap_rows

_LEAST_MEASURED_ROWS = 64
"""The least number that a measurement may find (`device/ranks/overlap_rule.cc`)."""


def least_cut_rows(artifact: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> int:
    """Rows from which on a step may have a second part, which has memory of its own; 0: none has.

    Without a number among the device's options, ranks of several processes of MPI measure it after they have loaded,
    which is too late for a budget. Raises RanksError for an invalid number, and ManifestError.
    """
    if info.num_ranks == 1 or info.target_kind != "cpu" or options.get("eager"):
        return 0
    rows = overlap_rows(options.get(OVERLAP_SUMS))
    if rows is None:
        rows = 0 if mpi_rank() is None else _LEAST_MEASURED_ROWS
    return rows if rows and _in_one_piece(read_manifest(artifact)) else 0


def _in_one_piece(manifest: Mapping[str, Any]) -> bool:
    """Whether steps have neither stages nor hidden states for a draft."""
    return not manifest.get("pipeline_parallel") and (manifest.get("model") or {}).get("states", "none") == "none"
