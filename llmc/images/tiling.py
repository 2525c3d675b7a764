"""How one picture is cut: resized as a whole, then cut into tiles; each tile is one sequence of the tower."""

from __future__ import annotations

from dataclasses import dataclass

Size = tuple[int, int]
"""(width, height) in pixels, as Pillow has it."""
Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels."""


@dataclass(frozen=True)
class Tile:
    """box: the part of the resized picture; None for all of it, resized to `size` once more.

    grid: (rows, columns) of patches, both multiples of the form's `merge`; pixels beyond it are left out.
    runs: how many placeholders follow each other in the text, for each piece that other tokens part.
    """

    size: Size
    grid: tuple[int, int]
    runs: tuple[int, ...]
    box: Box | None = None

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_rows(self) -> int:
        """Of the text model."""
        return sum(self.runs)


@dataclass(frozen=True)
class Tiling:
    """resizes: sizes that the whole picture gets, one after the other. tiles: in the order of the text.

    rows, columns: of the tiles that are cut from the picture; 0 if it is not cut.
    """

    resizes: tuple[Size, ...]
    tiles: tuple[Tile, ...]
    rows: int = 0
    columns: int = 0

    @property
    def num_rows(self) -> int:
        """Placeholders in the text."""
        return sum(tile.num_rows for tile in self.tiles)
