"""--num-states of the commands that make an engine: what reaches it, what the budget says, what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmc.cli import main as cli
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.server.config import ServerConfig

from support.state_artifact import state_artifact

COMMANDS = {
    "run": (),
    "chat": (),
    "serve": ("--port", "0"),
    "bench latency": ("--input-len", "4", "--output-len", "2", "--warmup", "0", "--repeats", "1"),
    "bench throughput": ("--input-len", "4", "--output-len", "2", "--warmup", "0", "--num-prompts", "2"),
}


@pytest.fixture
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    return state_artifact(tmp_path_factory, kernel_cache)


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    return ("--prompts", str(path), "--max-tokens", "2")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_without_states_has_no_slots(
    command: str, chat_artifact: Path, prompts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    others = prompts if command == "run" else COMMANDS[command]
    assert cli.main([*command.split(), str(chat_artifact), "--num-states", "2", *others]) == 1
    says = "llmc: error: --num-states is 2 but no layer of this model has a state; leave it out."
    assert capsys.readouterr().err.splitlines()[-1] == says


@pytest.mark.parametrize(
    ("code", "flags", "says"),
    [
        (1, ("--num-states", "2147483647"), r"--num-states is 2147483647; use at most \d+\."),
        (1, ("--num-states", "5000000000"), r"--num-states is 5000000000; use a whole number from 0 to 4294967295\."),
        (2, ("--num-states", "-1"), r"--num-states.*-1 is not in the range x>=0"),
        (
            1,
            ("--num-states", "9", "--kv-bytes", "10000"),
            r"--kv-bytes is 10000 but .* the states of 9 sequences take \d+ bytes, .*; use at least \d+, or a smaller "
            r"--num-states\.",
        ),
        (1, ("--num-states", "2147483647", "--memory-utilization", "0.5"), r"num-states is 2147483647; use at most"),
        (1, ("--num-states", "1000000", "--memory-utilization", "0.001"), r"raise it, lower num-states 1000000 or"),
    ],
)
def test_numbers_that_cannot_be(
    code: int,
    flags: tuple[str, ...],
    says: str,
    artifact: Path,
    prompts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["run", str(artifact), *prompts, *flags]) == code
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize("command", ["run", "bench latency", "bench throughput"])
def test_engines_get_it(
    command: str, artifact: Path, prompts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    native_options = Engine._native_options

    def watched(options: Mapping[str, Any]) -> Any:
        given.append(options["num_states"])
        return native_options(options)

    monkeypatch.setattr(Engine, "_native_options", staticmethod(watched))
    others = prompts if command == "run" else COMMANDS[command]
    assert cli.main([*command.split(), str(artifact), "--num-states", "2", *others]) == 0
    assert given == [2]


@pytest.mark.parametrize(
    ("flags", "states"),
    [
        ((), 9),
        (("--max-num-seqs", "1"), 3),
        (("--num-states", "5"), 5),
        (("--num-states", "2", "--max-num-seqs", "1"), 2),
    ],
)
@pytest.mark.parametrize("command", ["run", "serve"])
def test_budgets_tell_the_states_of_the_engine(
    command: str,
    flags: tuple[str, ...],
    states: int,
    artifact: Path,
    prompts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three for each sequence that may run."""
    served: list[ServerConfig] = []
    monkeypatch.setattr("llmc.runtime.server.run.serve", lambda config, **_: served.append(config))
    others = prompts if command == "run" else COMMANDS[command]
    assert cli.main([command, str(artifact), "--memory-utilization", "0.5", *flags, *others]) == 0
    assert f", and states of {states} sequences\n" in capsys.readouterr().err
    for config in served:
        options: dict[str, Any] = {name: getattr(config, name) for name in ("num_states", "max_num_seqs", "kv_bytes")}
        with Artifact(artifact) as opened, Engine(opened, num_threads=1, **options) as engine:
            assert engine.stats.num_states == states
    assert len(served) == (command == "serve")
