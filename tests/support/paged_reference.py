"""Runs an eager model step by step over a paged cache of shuffled blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from llmc.models.blocks.decoder import Decoder
from llmc.models.eager import load_model
from llmc.models.reference import ReferenceCache, use_cache

from support.tiny_models import reference_model


class PagedRunner:
    """Sequences of one eager model. step() takes new tokens of several sequences and returns logits of each row."""

    def __init__(
        self, model: Decoder, num_seqs: int = 1, max_len: int = 128, block_size: int = 16, seed: int = 0
    ) -> None:
        config = model.config
        self.model, self.block_size = model, block_size
        width = -(-max_len // block_size)
        order = torch.randperm(num_seqs * width, generator=torch.Generator().manual_seed(seed)) + 1
        self.tables = order.to(torch.int32).view(num_seqs, width)
        self.lengths = [0] * num_seqs
        self.cache = ReferenceCache.of(config, num_seqs * width + 1, block_size)
        slots = torch.arange(1, num_seqs + 1, dtype=torch.int32)
        nothing = torch.zeros_like(slots)
        self.slots = torch.stack((slots, nothing, nothing), dim=1)
        self._before = self.lengths, self.cache.states

    def step(self, chunks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """chunks: the next tokens of every sequence, none for an idle one. Returns float32 [tokens, V] of each."""
        self._before = list(self.lengths), dict(self.cache.states)
        ids, positions, slots, seqs, starts = [], [], [], [], [0]
        for seq, chunk in enumerate(chunks):
            for token in chunk:
                at = self.lengths[seq]
                block = int(self.tables[seq, at // self.block_size])
                ids.append(token)
                positions.append(at)
                slots.append(block * self.block_size + at % self.block_size)
                seqs.append(seq)
                self.lengths[seq] += 1
            starts.append(len(ids))

        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        with use_cache(self.cache), torch.no_grad():
            logits = self.model(
                tensor(ids),
                tensor(positions),
                tensor(slots),
                self.tables,
                tensor(self.lengths),
                tensor(starts),
                tensor(range(len(ids))),
                tensor(seqs),
                *((self.slots,) if self.model.config.has_states else ()),
            )
        return [logits[a:b] for a, b in itertools.pairwise(starts)]

    def undo(self) -> None:
        """Takes the last step back."""
        self.lengths, self.cache.states = self._before

    def greedy(self, prompt: Sequence[int], count: int, chunk: int = 7) -> tuple[list[int], torch.Tensor]:
        """Greedy ids after `prompt`, prefilled in chunks, and the logits float32 [count, V] they come from."""
        for begin in range(0, len(prompt), chunk):
            row = self.step([prompt[begin : begin + chunk]])[0][-1]
        rows = [row]
        while len(rows) < count:
            rows.append(self.step([[int(rows[-1].argmax())]])[0][-1])
        return [int(r.argmax()) for r in rows], torch.stack(rows)


def check_equals_transformers(path: Path) -> None:
    """48 greedy ids of a float32 model, and the logits that they come from, to 1e-4 of the largest."""
    prompt = torch.randint(3, 515, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    ids, logits = PagedRunner(load_model(path)).greedy(prompt, 48)
    text = torch.tensor([prompt + ids[:-1]])
    with torch.no_grad():
        expected = reference_model(path)(text, use_cache=False).logits[0, len(prompt) - 1 :].float()
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    # Each id is the best behind those before it, so a greedy loop over the whole text writes the same.
    assert ids == expected.argmax(-1).tolist()
    assert len(set(ids)) > 3, "the model repeats itself, so equal ids say little"
