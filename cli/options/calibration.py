"""The options of `llmc quantize -o`, and reading of texts named on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WriteOptions:
    """Values of the command line. method None: the scheme's default. target_kl None: a scheme was given instead."""

    method: str | None
    layout: str
    calibration: Path | None
    samples: int
    sample_tokens: int
    damping: float
    jobs: int
    target_kl: float | None
    dry_run: bool
    as_json: bool
