"""The record of a CPU target in manifests."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from llmc.compiler.targets.base import TargetError
from llmc.compiler.targets.cpu.record import Record
from llmc.compiler.targets.cpu.target import TARGETS, Target
from llmc.compiler.targets.registry import resolve_target, target_of


def test_the_record_has_the_fields_of_a_target() -> None:
    assert {field.name for field in dataclasses.fields(Target)} == Record.model_fields.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_a_recorded_target_is_read_again(name: str) -> None:
    target = resolve_target(name)
    assert target_of(json.loads(json.dumps(target.record()))) == target


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lanes": 0}, "lanes is 0: "),
        ({"lanes": "16"}, "lanes is '16': "),
        ({"instruction_sets": []}, r"instruction_sets is \[\]: "),
        ({"sockets": 2}, "sockets is 2: "),
        ({"row_tile": None}, "row_tile is None: "),
    ],
)
def test_what_is_no_record(changes: dict[str, Any], why: str) -> None:
    record = {**json.loads(json.dumps(resolve_target("x86-64-v3").record())), **changes}
    with pytest.raises(TargetError, match=f"a CPU target is not recorded so: {why}.*; compile the model again$"):
        target_of(record)
    del record["mcpu"]
    with pytest.raises(TargetError, match="a CPU target is not recorded so: "):
        target_of(record)
