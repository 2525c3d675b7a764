"""docs/troubleshooting.md quotes what llmc says, and each text is in the sources. Flags of pages without code exist."""

from __future__ import annotations

import re

import pytest
import typer

from llmc.cli.main import build_app

from support.paths import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = [" ".join(text.split()) for text in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
# Where a literal ends and the next one begins: both are one text.
_JOINT = re.compile(r"\"\s*(?:\n\s*)?(?:\+\s*)?[rf]{0,2}\"")
# Of pip and Docker.
OTHERS = {"--cap-add", "--cpus", "--extra-index-url", "--force-reinstall", "--no-deps"}
FLAGS_OF = {"troubleshooting": 20, "faq": 3, "tuning": 15}  # so many at least
FOLDERS = ("runtime", "cli", "compiler", "buckets", "models", "quantize", "llmc")


def texts(source: str) -> str:
    """A source in which neighbouring literals are joined, and what they do not say themselves is cut out."""
    return _JOINT.sub("", source.replace('\\"', "'"))


@pytest.fixture(scope="module")
def sources() -> list[str]:
    files = [
        file
        for folder in FOLDERS
        for pattern in ("*.py", "*.cc", "*.h")
        for file in (ROOT / folder).rglob(pattern)
        if "tests" not in file.relative_to(ROOT).parts
    ]
    return [texts(file.read_text(encoding="utf-8")) for file in files]


def test_literals_are_joined() -> None:
    assert 'f"the queue is full, or not"' in texts('f"the queue "\n    f"is full, "\n "or not"')


def test_there_is_much_to_find() -> None:
    assert len(QUOTES) > 30
    assert len(set(QUOTES)) == len(QUOTES)


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: " ".join(re.findall(r"\w{4,}", quote)[:4]))
def test_quoted_texts_are_in_the_sources(quote: str, sources: list[str]) -> None:
    """All parts between names and numbers, in one file; those of a few characters say nothing."""
    parts = [part.strip(" …") for part in quote.split("…")]
    telling = [part for part in parts if len(part) > 6]
    assert any(len(part) > 12 for part in telling), f"{quote} has nothing to recognise it by"
    assert any(all(part in source for part in telling) for source in sources), telling


@pytest.mark.parametrize("page", FLAGS_OF)
def test_flags_that_are_named_exist(page: str) -> None:
    known = set(OTHERS) | {"--debug"}
    groups = [typer.main.get_command(build_app())]
    while groups:
        for command in groups.pop().commands.values():  # type: ignore[attr-defined]
            groups += [command] if hasattr(command, "commands") else []
            known |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
    assert len(named) >= FLAGS_OF[page]
    assert named <= known
