"""How a group computes a linear layer without tensor cores. Imports no tvm.

A step of few rows lasts as long as its weights are read, so many items have to read at a time: neighbouring items share
a weight row. Each has one chain of the sum, whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

CHAINS = 8
"""Chains of a sum. Items of neighbouring chains read neighbouring parts of a weight row: 128 bytes, if each has 16."""
ITEMS = 128
"""Work items per group."""
PLACES = ITEMS // CHAINS
"""Blocks of sums that a group has side by side."""
_MOST_READS = 8


@dataclass(frozen=True)
class PlainForm:
    """How a group computes layers of up to `most` rows of x, in tiles of as many.

    rows, columns: the block of sums of an item; a gated layer has half of the columns. ahead: bytes of weights that an
    item waits for at a time.
    """

    most: int
    rows: int
    columns: int
    ahead: int

    @property
    def across(self) -> int:
        """Places side by side along the columns; the others are along the rows."""
        return PLACES // (self.most // self.rows)

    def own(self, parts: int) -> int:
        """Columns of an item's block. parts: weight rows of a column."""
        return max(1, self.columns // parts)

    def width(self, parts: int) -> int:
        """Columns of a group."""
        return self.across * self.own(parts)

    def reads(self, parts: int, read_bytes: int) -> int:
        """Reads of a weight row that an item waits for at a time."""
        return max(1, min(_MOST_READS, self.ahead // (read_bytes * parts * self.own(parts))))


FORMS = (PlainForm(1, 1, 1, 128), PlainForm(8, 8, 2, 64), PlainForm(16, 8, 4, 64))
"""The last one is for any number of rows. Few rows have many groups, many rows have blocks of many sums."""
MOST_ROWS = FORMS[-1].most


def most_tiles(columns: int, parts: int) -> int:
    """Tiles side by side, of the form that has the most."""
    return max(-(-columns // form.width(parts)) for form in FORMS)
