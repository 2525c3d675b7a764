"""Options of `llmc buckets plan`, `simulate` and `scale`: what they refuse, and what long models cost them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llmc.buckets import fixed
from llmc.buckets.trace import Trace, write_trace
from llmc.cli.buckets_plan import plan_command
from llmc.cli.buckets_scale import scale_command
from llmc.cli.buckets_simulate import simulate_command
from llmc.cli.main import main

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def float_options() -> list[tuple[str, str]]:
    commands: dict[str, Callable[..., None]] = {
        "plan": plan_command,
        "simulate": simulate_command,
        "scale": scale_command,
    }
    return [
        (name, "--" + option.replace("_", "-"))
        for name, command in commands.items()
        for option, parameter in inspect.signature(command).parameters.items()
        if "float" in str(parameter.annotation)
    ]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "trace.jsonl"
    write_trace(path, Trace("two", np.array([0.0, 1.0]), np.array([374, 100]), np.array([44, 20])))
    return path


def test_there_are_float_options() -> None:
    options = float_options()
    assert ("simulate", "--speed") in options
    assert ("plan", "--max-padding") in options


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("command", "option"), float_options())
def test_numbers_that_are_not_finite_are_refused(
    command: str, option: str, value: str, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ladder = ["--buckets", "prefill=1x512,decode=[1,4]x512"] if command != "plan" else []
    ladder += ["--model", "llama", "--ranks", "2"] if command == "scale" else []
    assert main(["buckets", command, "--trace", str(trace_file), *ladder, f"{option}={value}"]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert option in error
    assert value in error


def test_ladders_by_rule_are_computed_not_searched_for() -> None:
    """A search for the step would run as many lines as there are lengths, for each of hundreds of ladders."""
    lines = 0

    def trace_lines(frame: FrameType, event: str, _argument: object) -> TraceFunction | None:
        nonlocal lines
        lines += event == "line"
        return trace_lines if frame.f_code.co_filename == fixed.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace_lines)
    try:
        ladders = fixed.length_ladders("ramp-up, tuned", 24, 1 << 20, 32)
    finally:
        sys.settrace(before)
    assert all(ladder[-1] == 1 << 20 and len(ladder) <= 24 for ladder in ladders)
    assert len(ladders) > 10
    assert 0 < lines < 5000
