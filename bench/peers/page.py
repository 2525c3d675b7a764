"""docs/benchmarks.md: blocks between markers are written from bench/results, the rest by hand.

<!-- bench/results NAME: PART PART -->      such as: zen-5: limits speed ratios
…
<!-- end -->
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.peers.results import RESULTS, Results

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
END = "<!-- end -->"
_BLOCK = re.compile(rf"<!-- bench/results (?P<name>\S+): (?P<parts>[^\n]+?) -->\n.*?{END}", re.DOTALL)


def shown(page: str) -> dict[str, list[str]]:
    """Parts that a page shows, by name of results."""
    found: dict[str, list[str]] = {}
    for block in _BLOCK.finditer(page):
        found.setdefault(block["name"], []).extend(block["parts"].split())
    return found


def filled(page: str, folder: Path = RESULTS) -> str:
    """The page with every block filled from results. Raises StoreError for a block without results."""

    def block(found: re.Match[str]) -> str:
        return _block(Results.load(found["name"], folder), found["parts"].split())

    return _BLOCK.sub(block, page)


def write_page(names: list[str] | None = None, path: Path = PAGE, folder: Path = RESULTS) -> None:
    """Fills the blocks of a page. names: results that get a section at its end if the page does not show them."""
    page = path.read_text(encoding="utf-8")
    for name in names or []:
        if name not in shown(page):
            page = f"{page.rstrip()}\n\n{_section(Results.load(name, folder))}\n"
    path.write_text(filled(page, folder), encoding="utf-8")


def _section(results: Results) -> str:
    stated = results.document
    about = f"The machine: {stated['machine']}, {stated['date']}. tok/s are medians of the rounds."
    return f"## {stated['title']}\n\n{about}\n\n{_block(results, results.parts())}"


def _block(results: Results, parts: list[str]) -> str:
    marker = f"<!-- bench/results {results.name}: {' '.join(parts)} -->"
    return "\n\n".join([marker, *(results.markdown(part) for part in parts), END])
