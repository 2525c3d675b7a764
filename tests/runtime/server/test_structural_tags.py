"""Structural tags: text is free up to a trigger, and from there on what the tag says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmc.runtime.request_error import RequestError
from llmc.runtime.server.structural_tags import structural_tag

from support.guides import COMPILER, EOS, allowed

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
STRUCTURES = [
    {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
    {"begin": "<f=y>", "schema": SCHEMA, "end": ""},
]
OLDER = {"triggers": ["<f="], "structures": STRUCTURES}


def newer(**options: Any) -> dict[str, Any]:
    tags = [
        {"begin": one["begin"], "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": one["end"]}
        for one in STRUCTURES
    ]
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **options}
    return {"type": "structural_tag", "format": form}


def reads(form: Any, text: str) -> tuple[str, bool]:
    """How much of a text is allowed, and whether it may end there."""
    guide = COMPILER.compile(structural_tag(form))()
    taken = ""
    for token in COMPILER._tokenizer.tokenize_str(text):
        if token not in allowed(guide):
            return taken, False
        guide.accept(token)
        taken += COMPILER._tokenizer.decode_str([token])
    return taken, EOS in allowed(guide)


@pytest.mark.parametrize("form", [OLDER, json.dumps(OLDER), newer()], ids=["older", "as text", "newer"])
def test_tags_in_free_text(form: Any) -> None:
    for whole in ("no tag < f at all", 'so <f=x>{"n": 3}</f> and <f=y>{"n": 4}, yes', '<f=x>{"n": 3}</f>'):
        assert reads(form, whole) == (whole, True)
    assert reads(form, "so <f=z>") == ("so <f=", False)
    assert reads(form, '<f=x>{"m": 3}')[0] in ('<f=x>{"', "<f=x>{")
    assert reads(form, '<f=x>{"n": 3}</g>')[0].startswith('<f=x>{"n": 3}')
    assert reads(form, '<f=x>{"n": 3}') == ('<f=x>{"n": 3}', False)


def test_how_many_tags_there_are() -> None:
    tag = '<f=x>{"n": 3}</f>'
    assert reads(newer(at_least_one=True), "none") == ("none", False)
    assert reads(newer(at_least_one=True), tag + " " + tag) == (tag + " " + tag, True)
    assert reads(newer(at_least_one=True, stop_after_first=True), tag) == (tag, True)
    assert reads(newer(stop_after_first=True), "none") == ("none", True)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("{", "not valid JSON"),
        (3, "no form that is supported"),
        ({}, "lacks its lists"),
        ({**OLDER, "triggers": "<f="}, "lacks its lists"),
        ({**OLDER, "triggers": [""]}, "lacks its lists"),
        ({**OLDER, "triggers": ["<"] * 129}, "129 triggers"),
        ({**OLDER, "triggers": ["<g="]}, "tag 0 of the structural tag begins with none of the triggers"),
        ({**OLDER, "structures": []}, "lacks its lists"),
        ({**OLDER, "structures": [None]}, "tag 0 of the structural tag lacks begin, schema or end"),
        ({**OLDER, "structures": [{**STRUCTURES[0], "schema": "x"}]}, "lacks begin, schema or end"),
        ({**OLDER, "structures": [{**STRUCTURES[0], "schema": {"type": "strin"}}]}, "tag 0: .* Invalid type: strin"),
        ({"format": {"type": "sequence"}}, "no form that is supported"),
        (newer(tags=[{"begin": "<f=", "content": {"type": "regex", "pattern": "a"}, "end": ""}]), "lacks begin"),
    ],
)
def test_what_is_refused(form: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        COMPILER.compile(structural_tag(form))
    assert "\n" not in str(raised.value)
