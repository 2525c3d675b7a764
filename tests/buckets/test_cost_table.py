"""The file of measured costs: round trips, merging, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost_table import (
    CostTable,
    CostTableError,
    ReplayCost,
    artifact_key,
    find_tables,
    load_table,
    table_name,
)

MACHINE = {"processor": "one", "threads": "2"}
KEY = "ab" * 32
PREFILL, DECODE = Bucket("prefill", 2, 128), Bucket("decode", 4, 512)
COSTS = (
    ReplayCost(PREFILL, 2, 256, 128, 0.5, 3),
    ReplayCost(PREFILL, 1, 128, 128, 0.25, 3),
    ReplayCost(DECODE, 4, 4, 512, 0.125, 5),
)
TABLE = CostTable(MACHINE, KEY, COSTS, padding="skipped", step_s=1e-5, token_s=1e-7)
ROW: dict[str, Any] = {"phase": "prefill", "batch": 1, "seq": 16, "sequences": 1, "tokens": 16, "context": 16}
ROW |= {"seconds": 0.1, "repeats": 1}
NEW_ROW = ROW | {"deviation_s": 0.01, "disturbed": 0.25}


def manifest(**changes: Any) -> dict[str, Any]:
    kernel = {"op": "linear", "template": "t", "target": "x86", "params": "[]"}
    return {
        "graph_components": {"architecture": "a", "max_model_len": "512"},
        "kernels": [{"components": kernel}, {"components": {**kernel, "params": "[1]"}}],
        "buckets": ["prefill:1x16"],
    } | changes


def test_what_is_written_is_read(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "sub" / "t.json")
    assert CostTable.read(tmp_path / "sub" / "t.json") == TABLE
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["t.json"]


def test_what_a_measurement_was_like_is_written_and_read(tmp_path: Path) -> None:
    table = replace(TABLE, costs=(replace(COSTS[0], deviation_s=0.01, disturbed=0.25),))
    table.write(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["llmc_cost_table"] == 2
    assert CostTable.read(tmp_path / "t.json") == table


def test_tables_of_version_1_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(changed())
    (cost,) = CostTable.read(tmp_path / "t.json").costs
    assert (cost.seconds, cost.deviation_s, cost.disturbed, cost.under_load) == (0.1, 0, 0, False)


def test_a_cost_under_load_replaces_none_that_was_not() -> None:
    clean, loaded = replace(COSTS[0], seconds=0.5), replace(COSTS[0], seconds=0.9, disturbed=0.5)
    table = TABLE.with_costs([loaded])
    assert table.full()[PREFILL] == clean.seconds
    table = replace(TABLE, costs=(loaded,))
    assert table.with_costs([replace(loaded, seconds=0.7, disturbed=0.3)]).costs[0].seconds == 0.7
    assert table.with_costs([replace(loaded, seconds=2.0, disturbed=0.7)]).costs[0].seconds == 0.9
    assert table.with_costs([clean]).costs == (clean,)


def test_the_order_of_costs_does_not_matter() -> None:
    assert replace(TABLE, costs=COSTS[::-1]) == TABLE


def test_an_empty_table_is_one(tmp_path: Path) -> None:
    CostTable(MACHINE, KEY).write(tmp_path / "t.json")
    assert CostTable.read(tmp_path / "t.json").costs == ()


def test_full_is_the_largest_load() -> None:
    assert TABLE.full() == {PREFILL: 0.5, DECODE: 0.125}


def test_a_load_measured_again_replaces_the_old_cost() -> None:
    table = TABLE.with_costs([replace(COSTS[0], seconds=0.75, repeats=9)])
    assert len(table.costs) == 3
    assert table.full()[PREFILL] == 0.75


def test_tables_are_found_by_artifact_and_machine(tmp_path: Path) -> None:
    other = {"processor": "two", "threads": "2"}
    for machine in (MACHINE, other):
        CostTable(machine, KEY, COSTS).write(tmp_path / table_name(KEY, machine))
    assert load_table(tmp_path, KEY, MACHINE).costs
    assert load_table(tmp_path, "cd" * 32, MACHINE).costs == ()
    assert load_table(tmp_path, KEY, {"processor": "three"}).costs == ()
    assert {table.machine["processor"] for table in find_tables(tmp_path, KEY)} == {"one", "two"}
    assert find_tables(tmp_path, "cd" * 32) == []
    assert find_tables(tmp_path / "nowhere", KEY) == []


def test_a_damaged_table_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / table_name(KEY, MACHINE)
    TABLE.write(path)
    path.write_bytes(path.read_bytes()[:-40])
    assert load_table(tmp_path, KEY, MACHINE) == CostTable(MACHINE, KEY)
    assert find_tables(tmp_path, KEY) == []


def test_the_key_ignores_ladder_and_weights() -> None:
    key = artifact_key(manifest())
    assert key == artifact_key(manifest(buckets=["prefill:1x16", "decode:8x64"], weights_key="other"))
    kernels = manifest()["kernels"]
    assert key == artifact_key(manifest(kernels=kernels[:1]))
    assert key != artifact_key(manifest(kernels=[{"components": {**kernels[0]["components"], "template": "u"}}]))
    assert key != artifact_key(manifest(graph_components={"architecture": "b"}))


@pytest.mark.parametrize("broken", [{"graph_components": None}, {"kernels": []}, {"kernels": [{}]}, {"kernels": 3}])
def test_a_manifest_that_does_not_tell_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(CostTableError, match="compile it again"):
        artifact_key(manifest(**broken))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seconds": 0}, "more than 0"),
        ({"seconds": float("nan")}, "NaN is not a JSON number"),
        ({"seconds": 1e300}, "more than 0"),
        ({"seconds": "1"}, "more than 0"),
        ({"repeats": 0}, "repeats .* is 0"),
        ({"tokens": True}, "tokens .* is True"),
        ({"sequences": 17}, "17 sequences and 16 tokens"),
        ({"phase": "warm"}, "unknown phase 'warm'"),
        ({"more": 1}, "give exactly phase"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    data = {"llmc_cost_table": 1, "machine": MACHINE, "artifact": KEY, "costs": [ROW | changes]}
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(CostTableError, match=rf"t\.json.*{says}"):
        CostTable.read(tmp_path / "t.json")


def changed(**changes: Any) -> str:
    return json.dumps({"llmc_cost_table": 1, "machine": MACHINE, "artifact": KEY, "costs": [ROW]} | changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not of version 2"),
        ('{"llmc_cost_table": 3}', "not of version 2"),
        ('{"llmc_cost_table": [2]}', "not of version 2"),
        ('{"llmc_cost_table": true}', "not of version 2"),
        (changed(llmc_cost_table=2), "give exactly .* disturbed"),
        (changed(costs=[NEW_ROW]), "give exactly .* repeats"),
        (changed(llmc_cost_table=2, costs=[NEW_ROW | {"disturbed": 1.5}]), "disturbed .* is 1.5"),
        (changed(llmc_cost_table=2, costs=[NEW_ROW | {"deviation_s": -1}]), "deviation_s .* is -1"),
        ('{"llmc_cost_table": 1}', "lacks machine, artifact or costs"),
        (changed(x=1), "unknown field 'x'"),
        (changed(machine={}), "it needs facts"),
        (changed(machine={"threads": 2}), "it needs facts"),
        (changed(artifact="x"), "64 hex digits"),
        (changed(padding="eaten"), "padding .* is 'eaten'"),
        (changed(step_s=-1), "step_s .* is -1"),
        (changed(token_s="1"), "token_s .* is '1'"),
        (changed(costs=[ROW, ROW]), "two costs"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(CostTableError, match=rf"t\.json.*{says}"):
        CostTable.read(tmp_path / "t.json")


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CostTableError, match="cannot write cost table"):
        CostTable(MACHINE, KEY).write(tmp_path / "file" / "t.json")
