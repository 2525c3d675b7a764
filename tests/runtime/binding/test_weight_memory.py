"""Weights in their mapping, in huge pages, and on the way between them: one request, the same bits; files cut off;
memory nodes."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.machine import available_memory
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer
from llmc.runtime.binding.devices import WEIGHT_MEMORY
from llmc.runtime.llm import LLM
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.async_engine import AsyncEngine
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.run import open_engine

from support.artifacts import TinyArtifact

MIB = 1 << 20
STEPS_BEFORE_MOVE = 16
NUM_TOKENS = 40
PROMPT = [7, 300, 12, 44]


def pad_weights(artifact: Path, size: int) -> None:
    """Makes weights.safetensors `size` bytes long, with zeros that take no disk, and graphs.bin agree."""
    os.truncate(artifact / "weights.safetensors", size)
    tables = bytearray((artifact / "graphs.bin").read_bytes())
    tables[32:40] = struct.pack("<Q", size)
    tables[28:32] = struct.pack("<I", zlib.crc32(tables[32:], zlib.crc32(tables[:28])))
    (artifact / "graphs.bin").write_bytes(tables)


@pytest.fixture
def large(tiny_artifact: TinyArtifact, tmp_path: Path) -> Path:
    """The tiny artifact with a weights file large enough to move in parts."""
    copy = Path(shutil.copytree(tiny_artifact.artifact, tmp_path / "large"))
    pad_weights(copy, 80 * MIB)
    return copy


Scored = tuple[int, float, tuple[tuple[int, float], ...]]
"""A token, its logprob, and the best alternatives."""


def steps(engine: Engine) -> Iterator[list[Scored]]:
    """Runs one request; after each step its tokens with their logprobs."""
    engine.submit(PROMPT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=5)
    while engine.step():
        events = engine.poll()
        assert not [event for event in events if event.kind == "failed"]
        yield [(event.token_id, event.logprob, event.top_logprobs) for event in events if event.kind == "token"]


def test_one_request_has_the_same_bits_wherever_weights_lie(large: Path) -> None:
    found: dict[str, list[Scored]] = {}
    copied: dict[str, list[int]] = {}
    with Artifact(large) as artifact:
        for mode in WEIGHT_MEMORY:
            with Engine(artifact, weight_memory=mode) as engine:
                found[mode], copied[mode] = [], []
                for tokens in steps(engine):
                    found[mode] += tokens
                    copied[mode].append(engine.stats.device["copied_weight_bytes"])
                assert engine.stats.device["weight_bytes"] == 80 * MIB
    assert found["auto"] == found["mapped"] == found["copied"]
    assert len(found["auto"]) == NUM_TOKENS
    assert copied["mapped"] == [0] * NUM_TOKENS
    assert copied["copied"] == [80 * MIB] * NUM_TOKENS
    assert copied["auto"][:STEPS_BEFORE_MOVE] == [0] * STEPS_BEFORE_MOVE
    assert 0 < copied["auto"][STEPS_BEFORE_MOVE] < 80 * MIB
    assert copied["auto"] == sorted(copied["auto"])
    assert copied["auto"][-1] == 80 * MIB


def run_out(engine: Engine) -> None:
    while engine.step():
        pass


def test_small_weights_stay_where_they_are_unless_told(tiny_artifact: TinyArtifact) -> None:
    with Artifact(tiny_artifact.artifact) as artifact:
        for mode, expected in (("auto", 0), ("copied", artifact.info.weight_bytes)):
            with Engine(artifact, weight_memory=mode) as engine:
                assert sum(map(len, steps(engine))) == NUM_TOKENS
                assert engine.stats.device["copied_weight_bytes"] == expected


def test_a_file_cut_off_on_the_way_is_an_error(large: Path) -> None:
    weights = large / "weights.safetensors"
    with Artifact(large) as artifact, Engine(artifact) as engine:
        for number, _ in enumerate(steps(engine), 1):
            if number == STEPS_BEFORE_MOVE + 2:
                break
        before = engine.stats.device["copied_weight_bytes"]
        assert 0 < before < 40 * MIB
        os.truncate(weights, 40 * MIB)
        with pytest.raises(LlmcError, match=r"weights\.safetensors' at byte 41943040: the file ends") as caught:
            run_out(engine)
        assert caught.value.name == "io"
        engine.check_integrity()
        assert [event.kind for event in engine.poll()][-1] == "failed"
        assert before < engine.stats.device["copied_weight_bytes"] <= 40 * MIB
        os.truncate(weights, 80 * MIB)
        assert sum(map(len, steps(engine))) == NUM_TOKENS
        assert engine.stats.device["copied_weight_bytes"] == 80 * MIB


def test_a_file_cut_off_before_the_copy_is_an_error(large: Path) -> None:
    with Artifact(large) as artifact:
        os.truncate(large / "weights.safetensors", 40 * MIB)
        for make in (Engine, Replayer):
            with pytest.raises(LlmcError, match="the file ends before it") as caught:
                make(artifact, weight_memory="copied")
            assert caught.value.name == "io"


def test_more_weights_than_memory_stay_mapped(large: Path) -> None:
    with Artifact(large) as artifact, Engine(artifact, weight_memory="mapped") as engine:
        expected = list(steps(engine))
    pad_weights(large, available_memory() + (1 << 30))
    with Artifact(large) as artifact:
        for mode in ("auto", "copied"):
            with Engine(artifact, weight_memory=mode) as engine:
                assert list(steps(engine)) == expected
                assert engine.stats.device["copied_weight_bytes"] == 0


def test_a_server_copies_weights_and_says_where_it_cannot(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(artifact=large, served_model_names=("tiny",))
    engine = open_engine(config)
    assert engine.stats().device["copied_weight_bytes"] == 80 * MIB
    engine.close()
    assert caplog.messages == []
    size = available_memory() + (1 << 30)
    pad_weights(large, size)
    engine = open_engine(config)
    engine.close()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{size / 2**30:.2f} of {size / 2**30:.2f} GiB of weights stay mapped")


@pytest.mark.parametrize("refusal", [0, errno.EPERM])
def test_a_server_says_that_memory_is_not_spread(
    refusal: int, tiny_artifact: TinyArtifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stats = AsyncEngine.stats
    monkeypatch.setattr(
        AsyncEngine,
        "stats",
        lambda self: dataclasses.replace(
            stats(self), device={**stats(self).device, "memory_nodes": 2, "spread_errno": refusal}
        ),
    )
    open_engine(ServerConfig(artifact=tiny_artifact.artifact, served_model_names=("tiny",))).close()
    expected = "belong to 2 memory nodes, and not all memory is spread over them: mbind: Operation not permitted; allow"
    assert [expected in message for message in caplog.messages] == ([True] if refusal else [])


def test_memory_lies_on_the_nodes_that_the_machine_has(large: Path) -> None:
    """Of one node there is nothing to spread; of more all is, unless the system refuses or was told otherwise."""
    with Artifact(large) as artifact, Engine(artifact, weight_memory="copied") as engine:
        stats = engine.stats
    assert stats.device["memory_nodes"] >= 1
    if stats.device["memory_nodes"] == 1:
        assert (stats.device["spread_bytes"], stats.device["spread_errno"]) == (0, 0)
    elif stats.device["spread_bytes"] > 0:
        assert stats.device["spread_errno"] == 0
        assert stats.device["spread_bytes"] >= 80 * MIB
    else:
        assert stats.device["spread_errno"] != 0, "refused, or these tests run under a memory policy"


def test_other_names_are_refused(tiny_artifact: TinyArtifact) -> None:
    with Artifact(tiny_artifact.artifact) as artifact:
        for make in (Engine, Replayer):
            with pytest.raises(LlmcError, match=r"option weights .* is 'huge'; use auto, mapped or copied"):
                make(artifact, weight_memory="huge")
    with pytest.raises(RequestError, match="weight memory 'huge' is unknown"):
        LLM(tiny_artifact.artifact, weight_memory="huge")  # type: ignore[arg-type]
