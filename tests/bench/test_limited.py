"""bench/limited.py: a run that hangs is named, and nothing of it is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.limited import HungError, run_limited

from support.processes import gone, until


def test_what_ends_in_time_returns_what_it_said() -> None:
    done = run_limited("a run", [sys.executable, "-c", "import sys; print('out'); sys.exit('error')"], 600)
    assert (done.returncode, done.stdout, done.stderr) == (1, "out\n", "error\n")


def test_what_hangs_is_named_and_ends_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "hung"
    hangs = f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ >{mark}; echo begun; sleep 600'])"
    with pytest.raises(HungError, match=r"^round 1 with off has not ended within 1\.5 seconds(: begun)?$"):
        run_limited("round 1 with off", [sys.executable, "-S", "-c", hangs], 1.5)
    if mark.exists():
        until(lambda: gone(int(mark.read_text())))
