"""Idefics3 and SmolVLM: square tiles of one size, and the whole picture as one more of them.

A picture is resized so that square tiles fill it; each tile is a sequence of the tower. In the text, tokens name the
row and column of every tile, and rows end with a line break. `transformers` has the same rules in
image_processing_pil_idefics3.py and processing_idefics3.py.
"""

from __future__ import annotations

import math
from typing import ClassVar

from llmc.images.checkpoint import Checkpoint
from llmc.images.form import MOST_PATCHES, ImageForm, ImageFormError
from llmc.images.kinds.kind import Kind
from llmc.images.tiling import Size, Tile, Tiling

_LANCZOS = 1
_HALF = (0.5, 0.5, 0.5)
_EDGE = 364
_LARGEST_SIDE = 4096
"""Of a picture, whatever the files say."""


class Idefics3(Kind):
    NAME = "idefics3"
    MODEL_TYPES = ("idefics3", "smolvlm")
    SETTINGS: ClassVar = {"longest_edge": int, "tile_edge": int, "splits": bool, "around": str, "whole": str}
    """longest_edge: of the resized picture. tile_edge: side of a tile. splits: whether pictures are cut into tiles.
    around: the token before each tile and at the end. whole: the token of the tile that shows all of the picture."""

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> ImageForm:
        config, vision, told = checkpoint.config, checkpoint.vision, checkpoint.pictures
        patch, merge = vision.integer("patch_size", 32), config.integer("scale_factor", 2)
        edge = told.longest_edge("max_image_size", _EDGE)
        side, seen = edge // patch, vision.integer("image_size", 224) // patch
        if side != seen or side % merge or side == 0:
            raise ImageFormError(
                f"{told.origin}: tiles of {edge} pixels have {side} patches on a side, but the model's table of places "
                f"has {seen}, and {merge} of them are merged: both must fit"
            )
        if side * side > MOST_PATCHES:
            raise ImageFormError(f"{told.origin}: tiles of {edge} pixels have more than {MOST_PATCHES} patches")
        rows = (side // merge) ** 2
        if checkpoint.processor.integer("image_seq_len", rows) != rows:
            raise ImageFormError(f"{checkpoint.processor.origin} does not say that a tile has {rows} rows, as it has")
        placeholder = checkpoint.special_text("image_token", "<image>")
        form = ImageForm(
            kind=cls.NAME,
            placeholder=placeholder,
            placeholder_id=checkpoint.token_id(placeholder, config.optional_integer("image_token_id")),
            patch_size=patch,
            merge=merge,
            **checkpoint.picture_values(_HALF, _HALF, _LANCZOS),
            most_patches=side * side,
            usual_patches=(side * side,),
            settings={
                "longest_edge": told.longest_edge("size", 4 * _EDGE),
                "tile_edge": edge,
                "splits": told.flag("do_image_splitting", True),
                "around": checkpoint.special_text("fake_image_token", "<fake_token_around_image>"),
                "whole": checkpoint.special_text("global_image_token", "<global-img>"),
            },
        )
        form.check(told.origin)
        return form

    def tiling(self, width: int, height: int) -> Tiling:
        edge = self._integer("tile_edge")
        first = _at_most(_with_longest(width, height, self._integer("longest_edge")))
        if not self._setting("splits"):
            return Tiling((first, (edge, edge)), (self._tile((0, 0)),))
        second = _of_tiles(*first, edge)
        columns, rows = second[0] // edge, second[1] // edge
        if (rows, columns) == (1, 1):
            return Tiling((first, second), (self._tile((0, 0)),))
        parts = [self._tile((column * edge, row * edge)) for row in range(rows) for column in range(columns)]
        return Tiling((first, second), (*parts, self._tile(None)), rows, columns)

    def _tile(self, corner: tuple[int, int] | None) -> Tile:
        edge, merge = self._integer("tile_edge"), self.form.merge
        side = edge // self.form.patch_size
        box = None if corner is None else (*corner, corner[0] + edge, corner[1] + edge)
        return Tile((edge, edge), (side, side), ((side // merge) ** 2,), box)

    def text(self, tiling: Tiling) -> str:
        around, whole = f"{self._setting('around')}", f"{self._setting('whole')}"
        *parts, last = (self.form.placeholder * tile.num_rows for tile in tiling.tiles)
        found = ""
        for row in range(tiling.rows):
            for column in range(tiling.columns):
                found += f"{around}<row_{row + 1}_col_{column + 1}>{parts[row * tiling.columns + column]}"
            found += "\n"
        return f"{found}{chr(10) if parts else ''}{around}{whole}{last}{around}"


def _with_longest(width: int, height: int, longest: int) -> Size:
    """With the longer side that long; the shorter one even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _at_most(size: Size) -> Size:
    """Within the largest side."""
    width, height = size
    ratio = width / height
    if width >= height and width > _LARGEST_SIDE:
        width, height = _LARGEST_SIDE, int(_LARGEST_SIDE / ratio)
    elif height > width and height > _LARGEST_SIDE:
        width, height = int(_LARGEST_SIDE * ratio), _LARGEST_SIDE
    return max(width, 1), max(height, 1)


def _of_tiles(width: int, height: int, edge: int) -> Size:
    """Both sides multiples of `edge`, none smaller than before."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    return width, height
