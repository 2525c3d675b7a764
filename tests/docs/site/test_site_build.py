"""`make docs` refuses what it must: a copy of the pages with one fault of each kind."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

pytest.importorskip("mkdocs", reason="mkdocs belongs to the extra docs")
FAULTS = """
A line before a list:
- [lost](nowhere.md), [no such heading](buckets.md#nothing)

<script src="https://example.org/a.js"></script>
"""


@pytest.mark.slow
def test_faults_fail_the_build(tmp_path: Path) -> None:
    for entry in ROOT.iterdir():
        if entry.name not in ("docs", "out", "build") and not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "docs" / "precision.md").open("a") as page:
        page.write(FAULTS)
    (tmp_path / "docs" / "lost.md").write_text("# In no list\n")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^docs: .*\n\t(.*)$", makefile, re.MULTILINE)
    assert found
    command = found[1].replace("$(BIN)/python", sys.executable)
    built = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert built.returncode == 1, built.stderr
    for fault in (
        r'not included in the "nav" configuration:\n\s+- lost\.md',
        r"'precision\.md' contains a link 'nowhere\.md'",
        r"'precision\.md' contains a link 'buckets\.md#nothing'",
        r"docs/precision\.md is read otherwise by the site: .* ul where",
        r"precision\.html loads https://example\.org/a\.js",
    ):
        assert re.search(fault, built.stderr), built.stderr
    assert built.stderr.count("WARNING -") == 5, built.stderr
