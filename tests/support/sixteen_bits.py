"""What models in 16 bits are judged by: their weights in float32, and texts whose experts no rounding changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from llmc.models import expert_ops
from llmc.models.blocks.decoder import Decoder
from llmc.models.config import Experts
from llmc.models.eager import load_model

from support.compiled import random_tokens
from support.paged_reference import PagedRunner

# Of a clear choice: the least difference of scores that decides it, in units of what 16 bits change of a score. Two
# scores that approach each other by that change meet at 2; a compiled model may round in another order.
CLEAR = 4.0


def in_float32(path: Path, dtype: str) -> Decoder:
    """The checkpoint with weights rounded to dtype; all else is float32."""
    model = load_model(path)
    model.load_state_dict({name: value.float() for name, value in load_model(path, dtype).state_dict().items()})
    return model


def clear_text(path: Path, dtype: str, length: int, seed: int = 3) -> list[int]:
    """Random tokens. Where the model has experts, those of each token are clear in float32: `CLEAR` says how clear."""
    exact, rounded = in_float32(path, dtype), load_model(path, dtype)
    vocab = exact.config.vocab_size
    if exact.config.experts is None:
        return random_tokens(vocab, length, seed)
    rng = np.random.default_rng(seed)
    noise = torch.zeros(())
    while True:
        before, text = noise, list[int]()
        runners = [PagedRunner(model) for model in (exact, rounded)]
        while len(text) < length:
            token = int(rng.integers(3, vocab))
            (of_exact, margins), (of_rounded, _) = (_routed(runner, token) for runner in runners)
            found = torch.maximum(noise, (of_exact - of_rounded).abs().amax())
            if margins.amin() > CLEAR * found:
                text.append(token)
                noise = found
            else:
                for runner in runners:
                    runner.undo()
        if noise == before:
            return text


def clear_length(path: Path, dtype: str, text: list[int]) -> int:
    """How many tokens at the start of a text are ones that `clear_text` would have kept."""
    models = in_float32(path, dtype), load_model(path, dtype)
    if models[0].config.experts is None:
        return len(text)
    runners, noise = [PagedRunner(model) for model in models], torch.zeros(())
    for count, token in enumerate(text):
        (of_exact, margins), (of_rounded, _) = (_routed(runner, token) for runner in runners)
        noise = torch.maximum(noise, (of_exact - of_rounded).abs().amax())
        if margins.amin() <= CLEAR * noise:
            return count
    return len(text)


def _routed(runner: PagedRunner, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What experts of the next token are chosen by, float32 [layers, E], and the margin of each choice [layers]."""
    experts = runner.model.config.experts
    assert experts is not None
    with _choices(experts) as seen:
        runner.step([[token]])
    return torch.cat([choice for choice, _ in seen]), torch.cat([margin for _, margin in seen])


@contextmanager
def _choices(experts: Experts) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """What layers choose experts by, and the margins of their choices, layer by layer."""
    seen, choose = list[tuple[torch.Tensor, torch.Tensor]](), expert_ops.choose_experts

    def listening(choice: torch.Tensor, scores: torch.Tensor, *how: Any) -> torch.Tensor:
        margin = _margin(choice, *how[:4])
        if experts.scores == "mixer":
            margin = torch.minimum(margin, _margin_of_nearness(choice, experts.mixer_noise))
        seen.append((choice, margin))
        return choose(choice, scores, *how)

    with patch.object(expert_ops, "choose_experts", listening):
        yield seen


def _margin(choice: torch.Tensor, top_k: int, groups: int, top_groups: int, best_of_group: int) -> torch.Tensor:
    """By how much the last choice [T, E] or group that is taken is better than the first that is not: float32 [T]."""
    margin = torch.full(choice.shape[:1], float("inf"))
    if top_groups < groups:
        members = choice.view(len(choice), groups, -1)
        ranked = members.topk(best_of_group, dim=-1).values.mean(-1).sort(descending=True)
        margin = ranked.values[:, top_groups - 1] - ranked.values[:, top_groups]
        barred = torch.ones_like(ranked.values, dtype=torch.bool).scatter(
            1, ranked.indices[:, :top_groups], value=False
        )
        choice = members.masked_fill(barred[..., None], float("-inf")).reshape(choice.shape)
    if top_k < choice.shape[1]:
        best = choice.sort(descending=True).values
        margin = torch.minimum(margin, best[:, top_k - 1] - best[:, top_k])
    return margin


def _margin_of_nearness(logits: torch.Tensor, noise: float) -> torch.Tensor:
    """By how much a logit [T, E] is near one of the best two or is not, as sparse mixing asks: float32 [T]."""
    best = logits.topk(2, dim=-1).values[..., None]
    below = best - logits[:, None]
    margins = (below - 2.0 * noise * torch.maximum(logits.abs()[:, None], best)).abs()
    return margins.masked_fill(below <= 0.0, float("inf")).flatten(1).amin(-1)
