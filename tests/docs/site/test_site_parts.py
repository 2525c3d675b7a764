"""What the site's pages go through: links that lead to where the site has things, and checks that must find faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site import outside
from docs.site.assets import loaded_from_elsewhere
from docs.site.dialect import read_otherwise
from docs.site.markdown import cell, prose
from docs.site.schema_types import shown_type


@pytest.fixture
def linker(tmp_path: Path) -> outside.Linker:
    for name in ("docs/a.md", "examples/embed.c", "deploy/x/y.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\n")
    return outside.Linker(tmp_path)


@pytest.mark.parametrize(
    ("origin", "page", "link", "meant"),
    [
        ("README.md", "index.md", "docs/a.md#b", "a.md#b"),
        ("docs/a.md", "a.md", "b.md", "b.md"),
        ("docs/how-to/c.md", "how-to/c.md", "../../runtime/FORMAT.md#d", "../format.md#d"),
        ("docs/how-to/c.md", "how-to/c.md", "../../examples/embed.c", "../source/examples/embed.c.md"),
        ("runtime/FORMAT.md", "format.md", "../docs/a.md", "a.md"),
        ("docs/a.md", "a.md", "../deploy", "source/deploy/index.md"),
        ("docs/a.md", "a.md", "../lost.c", "../lost.c"),
    ],
)
def test_links_lead_to_where_the_site_has_things(
    linker: outside.Linker, origin: str, page: str, link: str, meant: str
) -> None:
    assert linker.rewrite(f"See [it]({link}).", origin, page) == f"See [it]({meant})."


def test_links_in_code_and_to_elsewhere_stay(linker: outside.Linker) -> None:
    text = "`[a](docs/a.md)` [b](https://x.org/docs/a.md)\n\n```\n[c](docs/a.md)\n```\n\n    [d](docs/a.md)\n"
    assert linker.rewrite(text, "README.md", "index.md") == text
    assert not linker.sources


def test_sources_are_noted_and_shown(linker: outside.Linker, tmp_path: Path) -> None:
    linker.rewrite("[a](../examples/embed.c) [b](../deploy)", "docs/a.md", "a.md")
    assert linker.sources == {"source/examples/embed.c.md": "examples/embed.c", "source/deploy/index.md": "deploy"}
    shown = outside.source_page(tmp_path, "examples/embed.c", lambda folder: [])
    assert shown.endswith("# examples/embed.c\n\n````c\ntext\n````\n")
    assert "- `deploy/x/y.json`" in outside.source_page(tmp_path, "deploy", lambda folder: [f"{folder}/x/y.json"])


def test_lists_in_lists_are_indented_as_the_site_reads_them() -> None:
    assert outside.for_the_site("- a\n  - b\n\n1. c\n\n   d\n") == "- a\n    - b\n\n1. c\n\n    d\n"
    assert outside.for_the_site("```\n- a\n  - b\n```\n") == "```\n- a\n  - b\n```\n"


def test_what_is_loaded_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "fine.html").write_text('<a href="https://x.org">x</a><link rel="canonical" href="https://x.org">')
    assert list(loaded_from_elsewhere(tmp_path)) == []
    (tmp_path / "bad.html").write_text(
        '<script async src="https://x.org/a.js"></script><link rel="stylesheet" href=//x.org/b.css><img src="c.png">'
    )
    (tmp_path / "bad.css").write_text("@font-face { src: url('https://x.org/d.woff2') }")
    assert list(loaded_from_elsewhere(tmp_path)) == [
        "bad.css loads https://x.org/d.woff2",
        "bad.html loads https://x.org/a.js",
        "bad.html loads //x.org/b.css",
    ]


def test_what_another_reader_sees_otherwise_is_found() -> None:
    text = "# A\n\ntext\n- an item\n"
    assert list(read_otherwise(text, "<article><h1>A</h1><p>text</p><ul><li>an item</li></ul></article>")) == []
    assert list(read_otherwise(text, "<article><h1>A</h1><p>text - an item</p></article>")) == [
        "0 ul where there are 1",
        "0 li where there are 1",
    ]


def test_text_is_no_markup() -> None:
    assert prose("*a_b* [c] `d_e`") == r"\*a\_b\* \[c\] `d_e`"
    assert cell("a |\nb `c|d`") == r"a \| b `c\|d`"


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2147483648.0}, "integer from 0 below 2147483648"),
        ({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}, "string of 1 or more characters or null"),
        ({"type": "array", "maxItems": 4, "items": {"$ref": "#/components/schemas/A"}}, "list of up to 4: ([A](#A))"),
        ({"enum": ["a", 1]}, '`"a"`, `1`'),
        ({"enum": [None, False, "", [], {}]}, "refused unless empty"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object: (number)"),
        ({"const": True}, "`true`"),
        ({}, ""),
    ],
)
def test_types_of_schemas_in_words(schema: dict[str, object], meant: str) -> None:
    assert shown_type(schema) == meant
