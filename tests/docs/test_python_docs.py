"""docs/python.md is true: its programs run, its options are those of the class."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.runtime.llm import LLM

from support.paths import ROOT

GUIDE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
MODEL = "examples/tiny-english"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_programs_run(number: int, english_artifact: Path) -> None:
    block = BLOCKS[number]
    assert MODEL in block
    # Compiled already: that a model directory will do is shown by the README's test.
    program = block.replace(MODEL, str(english_artifact))
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300, env={**os.environ}
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "evening passed" in result.stdout or "She was" in result.stdout or "'" in result.stdout


def test_options_are_those_of_the_class() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", GUIDE.partition("## Options")[2], re.MULTILINE)
    described = {name: ast.literal_eval(default.strip("`")) for name, default in rows}
    parameters = inspect.signature(LLM).parameters.values()
    assert described == {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
