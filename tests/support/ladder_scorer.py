"""Scores ladders one step at a time in plain Python: what the planner's and the simulation's figures are held to.

It shares no code with them; how the scheduler chooses is written down once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True)
class Scored:
    """Tokens that the steps asked for and that their buckets computed; steps that no bucket held; steps by bucket."""

    asked: int
    computed: int
    missed: int
    steps: dict[Pair, int]

    @property
    def padding(self) -> float:
        return 1 - self.asked / self.computed


def blocks(length: int, block_size: int) -> int:
    return (length + block_size - 1) // block_size


def scored(phase: str, steps: Iterable[tuple[int, int, int]], ladder: list[Pair], block_size: int) -> Scored:
    """steps: (sequences, tokens of the longest, how often); ladder: (batch, seq), in prefill one of them of batch 1
    that holds every length. A prefill step that no bucket holds runs there, a sequence at a time."""
    asked = computed = missed = 0
    used = dict.fromkeys(ladder, 0)
    for sequences, length, count in steps:
        best, least = None, None
        for batch, seq in ladder:
            if phase == "decode":
                fits = length <= blocks(seq, block_size) * block_size
                order = (batch, blocks(seq, block_size))
            else:
                fits, order = length <= seq, (batch * seq, batch)
            if fits and sequences <= batch and (least is None or order < least):
                best, least = (batch, seq), order
        asked += count * sequences * length
        if best is None:
            assert phase == "prefill"
            longest = max(seq for batch, seq in ladder if batch == 1)
            computed += count * sequences * longest
            missed += count
            continue
        batch, seq = best
        computed += count * batch * (blocks(seq, block_size) * block_size if phase == "decode" else seq)
        used[best] += count
    return Scored(asked, computed, missed, used)
