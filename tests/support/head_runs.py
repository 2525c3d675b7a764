"""Runs of heads that guess for a model, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmc.runtime.binding import Artifact, Engine, Replayer, SamplingParams
from llmc.runtime.graphs_file import read_graphs

from support.engine_driver import Request, drive, random_ids


class HeadDefinition(Protocol):
    """What a head computes."""

    def states(self, tokens: list[int], states: Tensor) -> Tensor:
        """Its guess behind each of `tokens`; states: of the tokens before. float32 [tokens, D]."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """float32 [..., V]."""
        ...


def left_states(
    artifact: Artifact, graph: int, tokens: Sequence[int], width: int, **options: Any
) -> npt.NDArray[np.float32]:
    """The states that a graph of a prompt leaves of eight tokens, though it computes logits of the last one only.

    options: of the replayer.
    """
    tables = read_graphs(artifact.path)
    commands = tables.commands_of(tables.graphs[graph])
    leaving = next(i for i, c in enumerate(commands) if "gather_rows_leaving" in tables.name_of(c))
    span = np.arange(8)
    with Replayer(artifact, num_blocks=8, **{"num_threads": 1, **options}) as replayer:
        replayer.begin(
            graph,
            input_ids=tokens, positions=span, slot_mapping=16 + span, block_tables=[[1]], context_lens=[8],
            query_start=[0, 8], sample_index=[7],
            state_slots=replayer.own_slots([1]),
        )  # fmt: skip
        for command in range(leaving + 1):
            replayer.run_command(command)
        return replayer.read_operand(leaving, 1, 8 * width * 4).view(np.float32).reshape(8, width)


def mixed_requests(liked: Mapping[int, float]) -> list[Request]:
    """Drawn in every way; prompts share a prefix, and some are read in several steps. liked: biases of tokens."""
    shared, requests = random_ids(60, 70), list[Request]()
    for i in range(6):
        sampled: dict[str, Any] = {"temperature": 0.8, "seed": i, "n": 1 + i % 3, "top_p": 0.95}
        drawn: dict[str, Any] = {"temperature": 0.0} if i % 2 else sampled
        params = SamplingParams(max_tokens=12 + i, ignore_eos=True, num_logprobs=1, logit_bias=dict(liked), **drawn)
        requests.append((shared[: 10 + 9 * i] + random_ids(90 + i, 5), params))
    return requests


def check_guesses(
    model: Artifact,
    head: Artifact,
    definition: HeadDefinition,
    states_of: Callable[[list[int]], Tensor],
    liked: Mapping[int, float],
    vocab: int,
    **options: Any,
) -> None:
    """Guesses of an engine and of the definition, step by step: from the states of the model, then from its own.

    states_of: the model's states of a text. As many guesses must have been made, and been right, as the definition's.
    options: of the engine.
    """
    prompt, most, limit = random_ids(11, 6), 3, 24
    params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, logit_bias=dict(liked))
    options = {"num_threads": 1, **options, "speculate_tokens": most, "speculate_always": 1}
    with Engine(model, draft=head, **options) as engine:
        text = prompt + drive(engine, [(prompt, params)])[0][0].ids
        stats = engine.stats
    left, bias = states_of(text), torch.zeros(vocab)
    for token, value in liked.items():
        bias[token] = value
    size, drafted, accepted, steps = len(prompt) + 1, 0, 0, 1  # the first token comes of the prompt
    while size < len(text):
        known, states = text[1:size], left[: size - 1]
        for _ in range(min(most, len(text) - 1 - size)):
            guessed = definition.states(known, states)
            known = [*known, int((definition.logits(guessed[-1]) + bias).argmax())]
            states = torch.cat((states, guessed[-1:]))
        guesses = known[size - 1 :]
        right = next((i for i, token in enumerate(guesses) if text[size + i] != token), len(guesses))
        drafted, accepted, steps, size = drafted + len(guesses), accepted + right, steps + 1, size + right + 1
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.num_steps) == (drafted, accepted, steps)
    assert 0 < accepted < drafted
