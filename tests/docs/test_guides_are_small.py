"""What is added is one file and one line of a registry, whatever it is: the pages of docs/ that add something."""

from __future__ import annotations

import pytest

from support.guide import read_guide


@pytest.mark.parametrize("page", ["model", "kernel", "format", "target", "device"])
def test_a_page_adds_one_file_and_registers_it(page: str) -> None:
    guide = read_guide(f"adding-a-{page}.md")
    assert len([name for name in guide.files if not name.startswith("tests/")]) == 1
    (registry,) = guide.changes
    assert "/registry." in registry
