"""Pages and docstrings of the public API are read in a hurry: no sentence has more than 40 words."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import llmc

from support.paths import ROOT
from support.prose import num_words, sentences, sentences_of_tables

MOST_WORDS = 40
# As a rule a sentence has no more. Of a page, two and one in twelve may; of all pages together, one in thirty.
USUAL_WORDS = 25
HEADER = ROOT / "runtime/native/include/llmc/llmc.h"


def pages() -> list[Path]:
    """Every Markdown page of the repository, and not of folders that git ignores."""
    try:
        listed = subprocess.run(
            ["git", "-C", ROOT, "ls-files", "-z", "*.md"], capture_output=True, text=True, check=True
        ).stdout.split("\0")
        return sorted(ROOT / name for name in listed if name and (ROOT / name).is_file())
    except (OSError, subprocess.CalledProcessError):
        return sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "runtime").glob("*.md")))


def too_long(text: str) -> list[str]:
    read = (*sentences(text), *sentences_of_tables(text))
    return [f"{num_words(one)} words: {one}" for one in read if num_words(one) > MOST_WORDS]


def docstrings() -> Iterator[tuple[str, str]]:
    """Those of what `llmc` exports, with public methods."""
    for name in llmc.__all__:
        exported = getattr(llmc, name)
        if not callable(exported):
            continue
        yield name, inspect.getdoc(exported) or ""
        for method, function in inspect.getmembers(exported, inspect.isroutine):
            # Of exceptions and data classes, methods that Python gave them say nothing of llmc.
            if not method.startswith("_") and getattr(function, "__module__", "").startswith("llmc"):
                yield f"{name}.{method}", inspect.getdoc(function) or ""


def comments(source: str) -> Iterator[str]:
    """Comments of C, each a text."""
    for comment in re.findall(r"/\*(.*?)\*/", source, re.DOTALL):
        yield re.sub(r"^[ ]*\* ?", "", comment, flags=re.MULTILINE)


def test_sentences_are_found() -> None:
    text = (
        '# A heading\n\nOne. Two goes on, `a. B c`, to [a\nlink](x.md)? "Three!" Four:\n\n- five\n  six. Seven\n'
        "- eight\n\n      goes on\n\n| not. This |\n\n```sh\nnor. This\n```\n\n> a quotation\n\n"
        "Nine.\n\n    code. Here\n"
    )
    found = list(sentences(text))
    assert found == [
        "One.", "Two goes on, Code, to a link?", '"Three!"', "Four:", "five six.", "Seven", "eight", "goes on", "Nine.",
    ]  # fmt: skip
    assert num_words("It is -- as said -- `code`.") == 5


def test_sentences_of_tables_are_found() -> None:
    table = (
        "Not this.\n\n| head | |\n|---|---|\n| One. Two `a|b`, [a\\|link](x.md) | three |\n\n```\n| nor. This |\n```\n"
    )
    found = [one for one in sentences_of_tables(table) if num_words(one)]
    assert found == ["head", "One.", "Two Code, a\\|link", "three"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_page_is_long(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []


def test_most_sentences_are_short() -> None:
    counts = {}
    for page in pages():
        words = [num_words(one) for one in sentences(page.read_text(encoding="utf-8"))]
        counts[str(page.relative_to(ROOT))] = (sum(number > USUAL_WORDS for number in words), len(words))
    assert {page: found for page, found in counts.items() if found[0] > 2 + found[1] // 12} == {}
    long, all_of_them = (sum(column) for column in zip(*counts.values(), strict=True))
    assert all_of_them > 2000
    assert long < all_of_them / 30


def test_no_sentence_of_a_public_docstring_is_long() -> None:
    found = dict(docstrings())
    assert len(found) > 30
    assert [name for name, text in found.items() if not text] == []
    assert {name: long for name, text in found.items() if (long := too_long(text))} == {}


def test_no_sentence_of_the_header_is_long() -> None:
    texts = list(comments(HEADER.read_text(encoding="utf-8")))
    assert len(texts) > 50
    assert [long for text in texts for long in too_long(text)] == []


def long_ones(texts: Iterable[str]) -> list[str]:
    return [one for text in texts for one in sentences(text) if num_words(one) > USUAL_WORDS]


def test_few_sentences_of_the_public_api_are_long() -> None:
    """The bounds are what was reached: lower them with the next one that is split."""
    assert len(long_ones(text for _, text in docstrings())) <= 4
    assert len(long_ones(comments(HEADER.read_text(encoding="utf-8")))) <= 3
