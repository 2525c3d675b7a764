"""What a tower reads: the model that makes rows of images, for a text model."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = 4
"""Of the places on a square table between which a patch lies."""


@dataclass(frozen=True)
class Tower:
    """The input of a tower: a row of numbers for each patch of an image, in place of tokens.

    channels, frames, patch_size: a patch is [channels][frames][patch_size][patch_size] numbers. rotation: numbers at
    the end of a row by which its queries and keys are rotated, cosines, then sines; 0 for none. patch_bias: of the
    linear that reads a patch. places: rows of a learned table of positions, which input ids pick; 0 for none.
    merged: consecutive patches that make one row.
    places_side: of a square table, from which a patch takes four neighbouring rows, the first by its id, weighted by
    WEIGHTS numbers behind its own; 0 for one row. stacked: layers whose results become rows as well, each by layers
    like those at the end; these rows stand behind the last one's.
    """

    channels: int
    patch_size: int
    merged: int
    frames: int = 1
    rotation: int = 0
    patch_bias: bool = False
    places: int = 0
    places_side: int = 0
    stacked: tuple[int, ...] = ()

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def rotation_begin(self) -> int:
        """Where the numbers of the rotation begin in a row."""
        return self.patch_width + (WEIGHTS if self.places_side else 0)

    @property
    def states_width(self) -> int:
        """Numbers of a row that is read."""
        return self.rotation_begin + self.rotation
