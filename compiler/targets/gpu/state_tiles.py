"""How the items of a group share the states of heads. Sizes alone decide it, and with it how sums are added. Imports no
tvm."""

from __future__ import annotations

from dataclasses import dataclass

ITEMS = 64
"""Work items per group."""
PIECE = 4
"""Neighbouring elements of a line, which one item has."""
LINES = 2
"""Neighbouring lines of which an item has elements."""
_LEAST_SHARING, _MOST_SHARING = 8, 32
_PART = 16  # elements of a line that an item has, before more items share it


@dataclass(frozen=True)
class StateTile:
    """The lines of a head's state that a group has. A line is what a token's result adds up.

    size: elements of a line: of a column for the delta rule, of a row for Mamba-2. lines: of a head's state.
    """

    size: int
    lines: int

    @property
    def sharing(self) -> int:
        """Neighbouring items that share lines, a team: a power of two."""
        items = _LEAST_SHARING
        while items < _MOST_SHARING and items * _PART < self.size:
            items *= 2
        return items

    @property
    def pieces(self) -> int:
        """Of a line that an item has. Neighbouring items have neighbouring pieces."""
        return -(-self.size // (PIECE * self.sharing))

    @property
    def padded(self) -> int:
        """Elements of a line in all pieces."""
        return self.pieces * PIECE * self.sharing

    @property
    def teams(self) -> int:
        """Of a group. Each prepares a token for all, so they are also the tokens of a turn."""
        return ITEMS // self.sharing

    @property
    def tile_lines(self) -> int:
        """Lines of a group."""
        return self.teams * LINES

    @property
    def tiles(self) -> int:
        """Groups of a head."""
        return -(-self.lines // self.tile_lines)
