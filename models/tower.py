"""What a tower reads: the model that makes rows of images, for a text model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tower:
    """The input of a tower: a row of numbers for each patch of an image, in place of tokens.

    channels, patch_size: a patch is [channels][patch_size][patch_size] numbers. rotation: numbers behind those of a
    patch by which its queries and keys are rotated, cosines, then sines; 0 for none. patch_bias: of the linear that
    reads a patch. places: rows of a learned table of positions, which input ids pick; 0 for none. merged: consecutive
    patches that make one row.
    """

    channels: int
    patch_size: int
    merged: int
    rotation: int = 0
    patch_bias: bool = False
    places: int = 0

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.patch_size**2

    @property
    def states_width(self) -> int:
        """Numbers of a row that is read."""
        return self.patch_width + self.rotation
