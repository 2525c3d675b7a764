"""Sampling parameters are values: they are compared, hashed, pickled and copied as such."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from llmc.runtime.beams import BeamSearchParams
from llmc.runtime.guided.constraint import Guided
from llmc.runtime.params import SamplingParams


def made(**changes: Any) -> SamplingParams:
    given: dict[str, Any] = {
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "logit_bias": {5: 1.5, 6: -2},
        "guided": Guided.json_schema({"type": "object"}),
    }
    return SamplingParams(**{**given, **changes})


@pytest.mark.parametrize("other", [made(), made(logit_bias={6: -2.0, 5: 1.5}), made(stop=("a", "b"))])
def test_equal_parameters_have_equal_hashes(other: SamplingParams) -> None:
    assert other == made()
    assert hash(other) == hash(made())
    assert {made(): 1}[other] == 1


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"logit_bias": {5: 1.5}}, {"stop": ["a"]}, {"guided": Guided.choice(["a"])}]
)
def test_other_parameters_are_other_keys(changes: dict[str, Any]) -> None:
    assert len({made(), made(**changes), SamplingParams(), SamplingParams()}) == 3


@pytest.mark.parametrize("params", [made(), SamplingParams(), made(logit_bias={})])
def test_copies_are_equal(params: SamplingParams) -> None:
    copies = [pickle.loads(pickle.dumps(params, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    copies += [copy.copy(params), copy.deepcopy(params), dataclasses.replace(params)]
    for one in copies:
        assert one == params
        assert hash(one) == hash(params)
        with pytest.raises(TypeError, match="cannot be changed: make other parameters"):
            one.logit_bias[7] = 1.0
    fields = dataclasses.asdict(params)
    assert json.loads(json.dumps(fields["logit_bias"])) == {str(key): value for key, value in params.logit_bias.items()}


def test_biases_cannot_be_changed() -> None:
    biases: Any = made().logit_bias
    changes = (biases.clear, biases.popitem, lambda: biases.pop(5), lambda: biases.update({7: 1.0}))
    for change in (*changes, lambda: biases.setdefault(8, 1.0), lambda: biases.__delitem__(5)):
        with pytest.raises(TypeError, match="logit_bias cannot be changed"):
            change()
    assert biases == {5: 1.5, 6: -2}
    with pytest.raises(TypeError):
        biases |= {7: 1.0}


def test_beam_search_has_a_hash() -> None:
    listed: Any = [1, 2]
    assert len({BeamSearchParams(2, stop_token_ids=listed), BeamSearchParams(2, stop_token_ids=(1, 2))}) == 1
