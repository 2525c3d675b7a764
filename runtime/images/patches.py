"""Cuts the pixels of a tile into patches, in the order in which a tower takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.images.form import ImageForm
from llmc.images.tiling import Tile


@dataclass(frozen=True)
class Patches:
    """values: float32 [patches, states_width]. places: int32 [patches]. first: int32 [rows], the first patch of each
    row of the result."""

    values: npt.NDArray[np.float32]
    places: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]


def patches_of(pixels: npt.NDArray[np.float32], tile: Tile, form: ImageForm) -> Patches:
    """pixels: float32 [channels, height, width].

    Squares of merge x merge patches stand together, line by line; a patch is [channels, frames, patch_size,
    patch_size]. The numbers behind it are those of `stretched`, then those of `angles_of`. Its place is the one that
    `stretched` says, 0 where angles alone tell it, or its number in the tile, line by line.
    """
    side, merge = form.patch_size, form.merge
    rows, columns = tile.grid
    cut = pixels[:, : rows * side, : columns * side]
    cut = cut.reshape(form.channels, rows // merge, merge, side, columns // merge, merge, side)
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[..., None, :, :]
    cut = np.broadcast_to(cut, (*cut.shape[:5], form.frames, *cut.shape[6:])).reshape(
        tile.num_patches, form.patch_width
    )
    numbers = np.arange(tile.num_patches, dtype=np.int32).reshape(rows // merge, merge, columns // merge, merge)
    places = numbers.transpose(0, 2, 1, 3).reshape(-1)
    first = np.arange(0, tile.num_patches, form.patches_per_row, dtype=np.int32)
    parts, lines, across = [cut], places // columns, places % columns
    if form.places_side:
        places, weights = stretched(lines, across, tile.grid, form.places_side)
        parts.append(weights)
    elif form.rope_theta is not None:
        places = np.zeros_like(places)
    if form.rope_theta is not None:
        parts.append(angles_of(lines, across, form.angles, form.rope_theta, alternates=form.rope_alternates))
    return Patches(np.ascontiguousarray(np.concatenate(parts, axis=1)), places, first)


def stretched(
    lines: npt.NDArray[np.int32], columns: npt.NDArray[np.int32], grid: tuple[int, int], side: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Where patches of a picture lie in a square table over which it is stretched, corner to corner.

    Returns int32 [patches], the place before each one, and float32 [patches, 4], weights of this place, the next one,
    and those in the next line.
    """
    before, shares = [], []
    for at, count in ((lines, grid[0]), (columns, grid[1])):
        where = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
        # The last place has one before it, so that all four are in the table.
        first = np.minimum(np.floor(where), np.float32(side - 2))
        before.append(first.astype(np.int32))
        share = where - first
        shares.append((np.float32(1) - share, share))
    (above, below), (left, right) = shares
    weights = np.stack([above * left, above * right, below * left, below * right], axis=1)
    return before[0] * side + before[1], weights


def angles_of(
    lines: npt.NDArray[np.int32],
    columns: npt.NDArray[np.int32],
    head_dim: int,
    theta: float,
    *,
    alternates: bool = True,
) -> npt.NDArray[np.float32]:
    """float32 [patches, head_dim] for patches at these lines and columns: cosines of head_dim / 2 angles, then their
    sines.

    The frequencies are those of a rope over one dimension; every other one, from the first, turns with the line, and
    these angles stand first. The others turn with the column, or the same ones unless they alternate.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.power(float(theta), exponents.astype(np.float64))).astype(np.float32)
    with_line = lines.astype(np.float32)[:, None] * frequencies[0::2]
    with_column = columns.astype(np.float32)[:, None] * frequencies[int(alternates) :: 2]
    angles = np.concatenate([with_line, with_column], axis=1).astype(np.float64)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
