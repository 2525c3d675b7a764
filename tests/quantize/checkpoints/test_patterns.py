"""Which modules the lists of a checkpoint's settings mean."""

from __future__ import annotations

import re

import pytest

from llmc.quantize import QuantizeError
from llmc.quantize.checkpoints.patterns import Parts, expression, matches

LAYER = "model.layers.1.mlp.gate_proj"


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "language_model.lm_head", True),
        ("gate", "model.layers.1.mlp.gate", True),
        ("gate", LAYER, False),
        ("mlp", LAYER, True),
        ("mlp.gate_proj", LAYER, True),
        ("model.layers.1", LAYER, True),
        ("model.layers.1.", LAYER, True),
        ("model.layers.1", "model.layers.10.mlp.gate_proj", False),
        ("layers.1.mlp", LAYER, True),
        ("model.layers.1*", LAYER, True),
        ("model.layers.1*", "model.layers.2.mlp.gate_proj", False),
        ("model.layers.*.mlp", LAYER, True),
        ("model.layers.*.self_attn", LAYER, False),
        ("*.mlp.*", LAYER, True),
        ("*.ml.*", LAYER, False),
        ("*gate_proj", LAYER, True),
        ("*gate", LAYER, False),
        ("mtp*", LAYER, False),
        ("*", LAYER, True),
        ("", LAYER, False),
        ("proj", LAYER, False),
    ],
)
def test_paths(path: str, name: str, found: bool) -> None:
    assert Parts([path]).find(name) == found


@pytest.mark.parametrize(
    ("pattern", "found"), [("re:.*mlp.*", True), ("re:mlp", False), ("mlp", False), (LAYER, True), ("re:model", True)]
)
def test_names_and_expressions(pattern: str, found: bool) -> None:
    assert matches(LAYER, pattern, "ignore") == found


# As recipes and published checkpoints have them.
@pytest.mark.parametrize(
    "pattern",
    [
        r".*mlp\.(gate|up|gate_up|down)_proj.*", r".*self_attn.*", r"model\.layers\.[0-9]+\.experts\.\d+\..*_proj$",
        r"^(?!.*(vision|lm_head)).*$", r"(?:.*\.)?layers\.(?:1[0-9]|2)\.", r".*\.(?:q|k|v)_proj", r"[^.]+\.layers",
        r"a{2}b", r"(gate|up)?_proj", r"\(a\+\)\+", r"[(a+)+]*",
    ],
)  # fmt: skip
def test_expressions_that_end_soon(pattern: str) -> None:
    assert expression(pattern, "ignore").pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a+)+$", "a repeated group"), ("(a|a)*$", "a repeated group"), ("(?:a*b)*", "a repeated group"),
        ("((a+))+", "a repeated group"), ("(?:(?:a|b)c)*", "a repeated group"), ("(a{1,9}){9}", "a repeated group"),
        ("(a+)+?", "a repeated group"), (r"(a)\1", "refers back"), (".*" * 7, "7 repetitions, more than 6"),
        ("a" * 3000, "has 3000 characters"), ("(", "not a regular expression"), ("*", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
    ],
)  # fmt: skip
def test_expressions_that_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(QuantizeError, match=f"^ignore: the pattern .* is refused: .*{re.escape(why)}"):
        expression(pattern, "ignore")
