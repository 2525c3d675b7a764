"""bench/limits.py: what the machine can do, by numbers of threads."""

from __future__ import annotations

import json
from math import isfinite

import pytest

from bench import limits
from bench.peers.machine_limits import by_threads, thread_counts
from llmc.runtime.binding.machine_limits import LIMITS

pytestmark = pytest.mark.native

QUICK = ["--seconds", "0.01"]


def test_every_number_of_threads_has_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    limits.main(["--threads", "2", "--rounds", "2", "--json", *QUICK])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["1", "2"]
    for row in found.values():
        assert {"read", "f32"} <= row.keys() <= set(LIMITS)
        assert all(at["min"] <= at["median"] <= at["max"] and at["rounds"] == 2 for at in row.values())
        assert all(at["min"] > 0 and isfinite(at["max"]) for at in row.values())


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    limits.main(["--threads", "1", "--rounds", "1", *QUICK])
    printed = capsys.readouterr().out
    assert "threads" in printed
    assert "read, GB/s" in printed


def test_of_many_threads_powers_of_two() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(3) == [1, 2, 3]
    assert thread_counts(48) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 48]


def test_one_limit_by_threads() -> None:
    found = list(by_threads([1, 2], ["read"], 0.01))
    assert [(threads, limit) for threads, limit, _ in found] == [(1, "read"), (2, "read")]
    assert all(rate is not None and rate > 0 and isfinite(rate) for _, _, rate in found)


@pytest.mark.parametrize("option", ["--threads", "--rounds", "--seconds"])
def test_bad_options_are_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        limits.main([option, "0"])
    assert caught.value.code == 2
    assert f"{option} is 0" in capsys.readouterr().err
