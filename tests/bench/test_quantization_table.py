"""The table of docs/quantization.md is what was measured, of all that there is, and what the page says is true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.quantization_table import BASE, BEGIN, END, PAGE, RESULTS, Case, cases, table
from llmc.compiler.calibration.request import DEFAULT_METHODS, METHODS, methods_of
from llmc.quantize import SCHEMES

RESULT: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
MODELS: dict[str, Any] = RESULT["models"]


def test_the_page_has_the_table_of_the_results() -> None:
    """python -m bench.quantization_table --write puts it there."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert page.split(BEGIN)[1].split(END)[0] == f"\n{table(RESULT)}"


@pytest.mark.parametrize("model", MODELS)
def test_every_scheme_is_there_by_every_method(model: str) -> None:
    """And nothing that is no case any more."""
    rows = MODELS[model]["rows"]
    assert set(rows) == {case.name for case in cases()}
    found = {(row["scheme"], row["method"]) for row in rows.values()}
    assert found == {(BASE, ""), *((scheme, method) for scheme in SCHEMES for method in methods_of(scheme))}
    for row in rows.values():
        assert Case(row["scheme"], row["method"], row["group_size"], row["asymmetric"] or None).name in rows
        assert row["decode_tokens_per_s"] > 0
        assert row["prefill_tokens_per_s"] > 0
        assert row["tokens"] >= 5000


def test_methods_are_those_that_requests_take() -> None:
    assert {method for scheme in SCHEMES for method in methods_of(scheme)} == set(METHODS)
    assert all(default in methods_of(scheme) for scheme, default in DEFAULT_METHODS.items())


def kl(model: str, scheme: str, method: str, asymmetric: bool = False) -> float:
    found = MODELS[model]["rows"][Case(scheme, method, 64, asymmetric or None).name]["kl"]
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_eight_bits_keep_the_perplexity(model: str) -> None:
    """Within 0.5 % of bf16."""
    rows = MODELS[model]["rows"]
    for name in ("w8a8-rtn", "w8a8-gptq", "w8a8-smoothquant"):
        assert rows[name]["perplexity"] == pytest.approx(rows[BASE]["perplexity"], rel=0.005), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("asymmetric", [False, True])
def test_methods_are_a_quarter_closer_to_the_model_than_rounding(model: str, asymmetric: bool) -> None:
    for scheme, methods in (("w4a16", ("gptq", "awq")), ("w4a8", ("gptq",))):
        nearest = kl(model, scheme, "rtn", asymmetric)
        for method in methods:
            assert kl(model, scheme, method, asymmetric) <= 0.75 * nearest, (scheme, method)
