"""Runs a HumanEval completion with its tests, in a separate process and a temporary folder; not a sandbox."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

_SECONDS = 10


def process_results(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """Whether the first completion passes; lm_eval calls it for a task."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    with tempfile.TemporaryDirectory(prefix="llmc-eval-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-"],
                input=program.encode(errors="replace"),
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"pass_at_1": 0.0}
    return {"pass_at_1": float(done.returncode == 0)}
