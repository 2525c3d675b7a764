"""Graphs command by command, every byte looked at: each writes its outputs alone, and reads nothing that none wrote."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.targets.registry import native_target, resolve_target
from llmc.runtime.binding import Artifact, Replayer

from support.artifacts import TinyArtifact
from support.compiled import Pages, random_tokens, replay
from support.conformance import MODELS, shared_artifact
from support.guarded_replay import GuardedReplay, StrayWriteError

pytestmark = pytest.mark.native
BLOCKS = 12


def texts_of(vocab: int) -> list[list[int]]:
    return [random_tokens(vocab, 40, seed) for seed in range(3)]


def steps(graphs: list[Any], vocab: int) -> list[tuple[int, list[tuple[int, list[int], int]]]]:
    """(graph, chunks) of steps that run every graph with padding: prompts first, then what each graph is for."""
    texts = texts_of(vocab)
    found: list[tuple[int, list[tuple[int, list[int], int]]]] = []
    for index, graph in enumerate(graphs):
        if graph.phase == "prefill":
            length = max(1, min(graph.seq, 30) - 3)
            chunks = [(s, texts[s][: length - s], 0) for s in range(min(3, graph.batch))]
        elif graph.phase == "decode":
            chunks = [(s, [texts[s][9 + s]], 9 + s) for s in range(min(3, max(1, graph.batch - 1)))]
        else:
            chunks = [(0, [texts[0][9]], 9), (1, texts[1][9:20], 9)]
        found.append((index, chunks))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", [native_target().name, "reference"])
def test_commands_write_their_outputs_alone(
    target: str, name: str, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> None:
    if not resolve_target(target).runs_here():
        pytest.skip("its code is of another architecture")
    path = shared_artifact(name, target, tmp_path_factory, kernel_cache)
    with Artifact(path) as artifact:
        graphs, size = artifact.graphs(), artifact.info.block_size
        # Numbers, and what is not a number: neither may find its way into a result.
        replays = [GuardedReplay(path, BLOCKS, 0x3A), GuardedReplay(path, BLOCKS, 0xFF)]
        with Replayer(artifact, num_threads=2, num_blocks=BLOCKS) as replayer:
            pages = [Pages(BLOCKS, size, seed=3) for _ in range(3)]
            big = max(range(len(graphs)), key=lambda i: graphs[i].max_tokens if graphs[i].phase == "prefill" else 0)
            prompts = [(s, text[:16], 0) for s, text in enumerate(texts_of(artifact.info.vocab_size))]
            for graph, chunks in [(big, [prompt]) for prompt in prompts] + steps(graphs, artifact.info.vocab_size):
                expected = replay(replayer, graph, pages[0], chunks)
                for one, own in zip(replays, pages[1:], strict=True):
                    assert replay(one, graph, own, chunks).tobytes() == expected.tobytes(), graphs[graph]  # type: ignore[arg-type]
    assert np.isfinite(expected).all()
    assert replays[0].num_commands > len(graphs) * 10


@pytest.mark.parametrize("place", ["arena", "weight", "output", ("input", 0), ("k_pool", 1), ("v_pool", 0)])
@pytest.mark.parametrize("where", ["beside", "behind"])
def test_a_stray_byte_is_noticed(
    tiny_artifact: TinyArtifact, place: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = GuardedReplay._call

    def careless(self: GuardedReplay, command: Any, memory: dict[Any, Any], *others: Any) -> None:
        call(self, command, memory, *others)
        if self.num_commands == 5:
            array = memory[place].array
            at = array.ctypes.data + (array.nbytes if where == "behind" else array.nbytes - 1)
            ctypes.c_uint8.from_address(at).value ^= 0x55

    monkeypatch.setattr(GuardedReplay, "_call", careless)
    one = GuardedReplay(tiny_artifact.artifact, BLOCKS, 0x3A)
    with pytest.raises(StrayWriteError, match=place if isinstance(place, str) else place[0]):
        replay(one, 0, Pages(BLOCKS, 32), [(0, [5, 6, 7], 0)])  # type: ignore[arg-type]
