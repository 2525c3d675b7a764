"""The options of `llmc quantize -o`, and text that is named on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WriteOptions:
    """As the command line gives them. method: None: the scheme's own. target_kl: None: a scheme is asked for."""

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
