"""docs/models.md says of families what the tests verify, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from docs.write_models import NAMES, PAGE, collected, rendered
from llmc.models.registry import FAMILIES

from support import verified
from support.artifacts import TinyArtifact
from support.verified import TARGETS, Claim, verifies

Said = dict[str, dict[str, list[dict[str, str]]]]


@pytest.fixture(scope="module")
def said() -> Said:
    return collected()


def test_the_page_is_as_the_tests_say(said: Said) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page, said), "run python -m docs.write_models"


def test_the_page_says_nothing_that_no_test_does(said: Said) -> None:
    """A test fewer, a cell fewer."""
    page = PAGE.read_text(encoding="utf-8")
    bf16 = {test: [one for one in claims if one["dtype"] != "bf16"] for test, claims in said["verifies"].items()}
    without = rendered(page, {**said, "verifies": bf16})
    assert "bf16" in page.partition("<!-- comparisons")[2]
    assert "bf16" not in without.partition("<!-- comparisons")[2].partition("<!-- end")[0]


@pytest.mark.parametrize("what", ["logits", "ids"])
def test_every_family_is_compared_on_every_target(what: str, said: Said) -> None:
    """Its logits, and its greedy ids if it writes text."""
    claims = [claim for of_test in said["verifies"].values() for claim in of_test if claim["what"] == what]
    families = {name for name, family in FAMILIES.items() if family.generates or what == "logits"}
    for target in TARGETS:
        found = {claim["family"] for claim in claims if claim["dtype"] == "f32" and claim["target"] == target}
        assert sorted(families - found) == [], target


def test_every_family_is_named() -> None:
    assert sorted(json.loads(NAMES.read_text(encoding="utf-8"))) == sorted(FAMILIES)


class Case:
    """A collected case that declares one thing."""

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return verifies(lambda: [Claim("llama")]).mark if name == "verifies" else None


def test_what_is_declared_must_be_checked(tiny_artifact: TinyArtifact) -> None:
    verified.forget()
    case: Any = Case()
    assert verified.missing(case) == [Claim("llama")]
    verified.checked(tiny_artifact.artifact)
    assert verified.missing(case) == []
