"""A compiled model writes what transformers writes, on every path that a token can take: four texts through prompts in
chunks, steps of prompts beside decodes, and decodes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from llmc.runtime.binding import Artifact, Engine, Replayer

from support.compiled import Pages, compared, relative_error, replay
from support.engine_driver import drive, greedy, random_ids
from support.tiny_models import reference_model

# A graph of each phase, few kernels. A prompt of more than 8 tokens is cut.
LADDER = "prefill=[2]x[4],decode=[4]x[128],mixed=[4]x[8]"
COUNT = 48
"""Ids that each text is continued by."""
TOLERANCE = 1e-4
"""Of logits, relative to the largest."""

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Text:
    """ids: what the engine wrote behind the prompt."""

    prompt: list[int]
    ids: list[int]

    @property
    def inputs(self) -> list[int]:
        """The tokens that a model reads: nothing follows the last id."""
        return self.prompt + self.ids[:-1]


def check_greedy_paths(artifact: Artifact, model: Path) -> None:
    """The engine's greedy ids are those of transformers, and so are the logits of every step, within `TOLERANCE`."""
    texts, length = served(artifact), artifact.info.max_model_len
    expected = expected_logits(model, texts, length)
    for text, rows, found in zip(texts, expected, step_logits(artifact, texts), strict=True):
        if relative_error(found, rows) >= TOLERANCE:
            # transformers errs in float32, too. Which of both is wrong, float64 tells.
            (exact,) = expected_logits(model, [text], length, torch.float64)
            assert relative_error(found, exact) < TOLERANCE
        assert found.argmax(-1).tolist() == text.ids, "the engine's steps have other bits than the same steps by hand"
        check_choices(text.ids, rows)
    assert len({token for text in texts for token in text.ids}) > 12, "the texts repeat themselves: ids say little"
    compared(artifact, what="ids")


def check_choices(ids: Sequence[int], logits: FloatArray) -> None:
    """Each id is the best of its row [count, V]. Where the best two are closer than logits may err, either is right."""
    best = np.sort(logits, -1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 2 * TOLERANCE * np.abs(logits).max()
    assert clear.sum() > 0.8 * len(ids)
    assert logits.argmax(-1)[clear].tolist() == np.array(ids)[clear].tolist()
    behind = best[:, 1] - logits[np.arange(len(ids)), ids]
    assert behind.max() <= 2 * TOLERANCE * np.abs(logits).max()


def served(artifact: Artifact) -> list[Text]:
    """What the engine writes behind four prompts at once. Sees to it that they took every path."""
    room = min(artifact.info.max_model_len, 128) - COUNT
    lengths = (room, 5, 1, room // 2 + 1)
    prompts = [random_ids(seed, length, artifact.info.vocab_size) for seed, length in enumerate(lengths)]
    with Engine(artifact, num_threads=1) as engine:
        engine.take_step_shapes()
        engine.take_request_marks()
        outputs = drive(engine, [(prompt, greedy(COUNT)) for prompt in prompts])
        check_every_path(artifact, engine)
    texts = [Text(prompt, output.ids) for prompt, (output,) in zip(prompts, outputs, strict=True)]
    assert {len(text.ids) for text in texts} == {COUNT}
    return texts


def check_every_path(artifact: Artifact, engine: Engine) -> None:
    """Steps of each phase ran in its graph, and prompts in several chunks: in prefill steps and in mixed ones."""
    phases = [graph.phase for graph in artifact.graphs()]
    shapes, lost = engine.take_step_shapes()
    marks, complete = engine.take_request_marks()
    assert (lost, complete) == (0, True)
    assert {(phase, phase) for phase in phases} <= {(shape.phase, phases[shape.graph]) for shape in shapes}
    chunks = {(phases[mark.graph], mark.start > 0) for mark in marks}
    assert {("prefill", False), ("prefill", True), ("mixed", True)} <= chunks


def expected_logits(
    model: Path, texts: Sequence[Text], length: int, dtype: torch.dtype = torch.float32
) -> list[FloatArray]:
    """By transformers: the rows float32 [count, V] that ids come from, of one run over the whole text.

    If each id is the best behind those before it, they are what a greedy loop would write. length: of the longest text.
    Each is filled up to it, because frequencies that grow with a text are those of the longest in an artifact.
    """
    reference, found = reference_model(model, dtype), list[FloatArray]()
    for text in texts:
        filled = text.inputs + random_ids(9, length - len(text.inputs))
        with torch.no_grad():
            logits: torch.Tensor = reference(torch.tensor([filled]), use_cache=False).logits[0]
        found.append(logits[len(text.prompt) - 1 : len(text.inputs)].float().numpy())
    return found


def step_logits(artifact: Artifact, texts: Sequence[Text]) -> list[FloatArray]:
    """The same rows by the graphs, step by step: the first prompt in prefill steps, the others in mixed ones beside the
    texts before them, which decode, and then all decode."""
    graphs = {graph.phase: index for index, graph in enumerate(artifact.graphs())}
    most = {graph.phase: graph.max_tokens for graph in artifact.graphs()}
    pages = Pages(64, artifact.info.block_size)
    done = [0] * len(texts)
    rows: list[list[FloatArray]] = [[] for _ in texts]
    with Replayer(artifact, num_threads=1, num_blocks=64) as replayer:

        def step(phase: str, counts: dict[int, int]) -> None:
            chunks = [(i, texts[i].inputs[done[i] : done[i] + count], done[i]) for i, count in counts.items()]
            for i, row in zip(counts, replay(replayer, graphs[phase], pages, chunks), strict=True):
                done[i] += counts[i]
                if done[i] >= len(texts[i].prompt):
                    rows[i].append(row)

        def decoding(begun: int) -> dict[int, int]:
            return {i: 1 for i in range(begun) if done[i] < len(texts[i].inputs)}

        for newest, text in enumerate(texts):
            while done[newest] < len(text.prompt):
                others = decoding(newest)
                phase = "mixed" if others else "prefill"
                chunk = min(most[phase] - len(others), len(text.prompt) - done[newest])
                step(phase, {**others, newest: chunk})
        while others := decoding(len(texts)):
            step("decode", others)
    return [np.array(of_text) for of_text in rows]
