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

    Squares of merge x merge patches stand together, line by line; a patch is [channels, patch_size, patch_size]. The
    numbers behind it are those of `angles_of`. Its place is its number in the tile, line by line, or 0 where angles
    tell it.
    """
    side, merge = form.patch_size, form.merge
    rows, columns = tile.grid
    cut = pixels[:, : rows * side, : columns * side]
    cut = cut.reshape(form.channels, rows // merge, merge, side, columns // merge, merge, side)
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(tile.num_patches, form.patch_width)
    numbers = np.arange(tile.num_patches, dtype=np.int32).reshape(rows // merge, merge, columns // merge, merge)
    places = numbers.transpose(0, 2, 1, 3).reshape(-1)
    first = np.arange(0, tile.num_patches, form.patches_per_row, dtype=np.int32)
    if form.rope_theta is None:
        return Patches(np.ascontiguousarray(cut), places, first)
    angles = angles_of(places // columns, places % columns, form.extra, form.rope_theta)
    return Patches(np.concatenate([cut, angles], axis=1), np.zeros_like(places), first)


def angles_of(
    lines: npt.NDArray[np.int32], columns: npt.NDArray[np.int32], head_dim: int, theta: float
) -> npt.NDArray[np.float32]:
    """float32 [patches, head_dim] for patches at these lines and columns: cosines of head_dim / 2 angles, then their
    sines.

    The frequencies are those of a rope over one dimension; every other one, from the first, turns with the line, and
    these angles stand first. The others turn with the column.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.power(float(theta), exponents.astype(np.float64))).astype(np.float32)
    with_line = lines.astype(np.float32)[:, None] * frequencies[0::2]
    with_column = columns.astype(np.float32)[:, None] * frequencies[1::2]
    angles = np.concatenate([with_line, with_column], axis=1).astype(np.float64)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
