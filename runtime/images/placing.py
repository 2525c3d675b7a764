"""Puts images into a prompt: their texts take the place of placeholders, and their rows that of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import ROPE_AXES
from llmc.images.form import ImageForm
from llmc.images.kinds.registry import kind_of
from llmc.images.tiling import Tile
from llmc.runtime.images.image_error import ImageError
from llmc.runtime.images.rows_cache import Rows
from llmc.runtime.images.tower import SeenPicture

if TYPE_CHECKING:
    from llmc.runtime.binding.placed_rows import PlacedRows


def expanded(text: str, seen: Sequence[SeenPicture], form: ImageForm, where: str = "the prompt") -> str:
    """`text` with each placeholder replaced by the text of its image, in order. Raises ImageError unless there are as
    many of both."""
    first, *rest = text.split(form.placeholder)
    if len(rest) != len(seen):
        raise ImageError(
            f"{where} has {len(rest)} times {form.placeholder} and {len(seen)} images: write it once for each image"
        )
    return first + "".join(one.text + part for one, part in zip(seen, rest, strict=True))


def runs_of(ids: Sequence[int], seen: Sequence[SeenPicture], form: ImageForm) -> list[tuple[int, int]]:
    """(first, count) of each run of placeholders among the ids of an expanded text. Nothing need part two of them, as
    where an image follows another one. Raises ImageError if they are not those of the images, as where a tokenizer does
    not know the placeholder."""
    places = [at for at, token in enumerate(ids) if token == form.placeholder_id]
    expected = [run for one in seen for tile in one.tiling.tiles for run in tile.runs]
    found, begin = list[tuple[int, int]](), 0
    for count in expected:
        run = places[begin : begin + count]
        if len(run) == count and run[-1] - run[0] == count - 1:
            found.append((run[0], count))
        begin += count
    if len(places) != begin or len(found) != len(expected):
        raise ImageError(
            f"the prompt has {len(places)} placeholders of images where {begin} are expected, those of an image "
            f"side by side: the tokenizer must have {form.placeholder} as one token"
        )
    return found


def places_on_axes(tile: Tile, form: ImageForm) -> tuple[npt.NDArray[np.int32], int]:
    """(int32 [rows, 3], positions of a tile's rows in time, height and width; how much further the text goes on)."""
    lines, columns = (count // form.merge for count in tile.grid)
    places = np.zeros((lines, columns, ROPE_AXES), np.int32)
    places[..., 1], places[..., 2] = np.arange(lines)[:, None], np.arange(columns)
    return places.reshape(-1, ROPE_AXES), max(lines, columns)


def placed_rows(
    ids: Sequence[int], seen: Sequence[SeenPicture], rows: Sequence[Rows], form: ImageForm
) -> tuple[PlacedRows, ...]:
    """The rows of all images at their places among the ids. rows: of each image."""
    from llmc.runtime.binding.placed_rows import PlacedRows

    runs, on_axes = iter(runs_of(ids, seen, form)), kind_of(form).ON_AXES
    placed = []
    for one, its in zip(seen, rows, strict=True):
        begin = 0
        runs_of_tiles = [(tile, run) for tile in one.tiling.tiles for run in tile.runs]
        for number, (tile, count) in enumerate(runs_of_tiles):
            first, _ = next(runs)
            identity = hashlib.sha256(one.identity + number.to_bytes(4, "little")).digest()
            positions, advance = places_on_axes(tile, form) if on_axes else (None, 0)
            placed.append(PlacedRows(first, its[begin : begin + count], identity, positions, advance))
            begin += count
    return tuple(placed)
