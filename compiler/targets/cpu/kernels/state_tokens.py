"""The tokens of a sequence in a step of a layer with a state, and the slots in which its state lies.

A step finds the state in the sequence's slot, and leaves it there behind its last token. The state behind one of the
tokens may also go to another slot.
"""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.graphs_format import STATE_FIELDS

BUFFERS = ("state_slots", "query_start", "positions")
"""Inputs that say where sequences and their slots are, int32."""

NUM_SEQS = 1  # scalar


class Tokens:
    """A sequence's tokens of a step: rows `first` to `end`.

    position: of the first token; before position 0 there is no state. slot: of the state. keep_row: the state behind
    that row also goes to keep_slot; none of the rows if it is not to.
    """

    def __init__(self, k: b.Kernel, sequence: b.Expr) -> None:
        self.first, self.end = b.let(k["query_start"][sequence]), b.let(k["query_start"][sequence + 1])
        self.position = b.let(k["positions"][self.first])
        self.slot, keep_tokens, self.keep_slot = (
            b.let(k["state_slots"][sequence * STATE_FIELDS + field]) for field in range(STATE_FIELDS)
        )
        self.keep_row = b.let(self.first + (keep_tokens - 1 - self.position))
