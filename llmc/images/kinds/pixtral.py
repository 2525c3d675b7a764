"""Mistral 3 with Pixtral's tower: the whole picture in one piece, in its own proportions.

Each line of merged patches is a run of placeholders that a token ends. `transformers` has the same rules in
image_processing_pil_pixtral.py and processing_pixtral.py.
"""

from __future__ import annotations

import math
from typing import ClassVar

from llmc.images.checkpoint import Checkpoint
from llmc.images.form import MOST_PATCHES, ImageForm, ImageFormError
from llmc.images.kinds.kind import Kind
from llmc.images.tiling import Tile, Tiling

_BICUBIC = 3
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_THETA = 10000.0
_USUAL = (16, 8, 4, 2, 1)
"""Parts of the largest picture that are worth a graph each."""


class Pixtral(Kind):
    NAME = "pixtral"
    MODEL_TYPES = ("mistral3",)
    SETTINGS: ClassVar = {"longest_edge": int, "line_end": str, "image_end": str}
    """longest_edge: of the resized picture. line_end, image_end: tokens."""

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> ImageForm:
        config, vision, told, texts = checkpoint.config, checkpoint.vision, checkpoint.pictures, checkpoint.processor
        patch, merge = vision.integer("patch_size", 16), config.integer("spatial_merge_size", 2)
        for name, value in (("patch_size", patch), ("spatial_merge_size", merge)):
            if texts.integer(name, value) != value:
                raise ImageFormError(f"{texts.origin} has another {name} than the model's {value}: both must agree")
        longest = told.longest_edge("size", 1024)
        side = math.ceil(longest / (patch * merge)) * merge
        most = side * side
        if most > MOST_PATCHES:
            raise ImageFormError(f"{told.origin}: images of {longest} pixels have more than {MOST_PATCHES} patches")
        placeholder, row = texts.text("image_token", "[IMG]"), merge * merge
        rope = vision.table("rope_parameters")
        heads, width = vision.integer("num_attention_heads", 16), vision.integer("hidden_size", 1024)
        stated = config.optional_integer("image_token_id")
        form = ImageForm(
            kind=cls.NAME,
            placeholder=placeholder,
            placeholder_id=checkpoint.token_id(
                placeholder, config.optional_integer("image_token_index") if stated is None else stated
            ),
            patch_size=patch,
            merge=merge,
            **checkpoint.picture_values(_MEAN, _STD, _BICUBIC),
            most_patches=most,
            usual_patches=tuple(sorted({max(most // part // row, 1) * row for part in _USUAL})),
            extra=vision.integer("head_dim", max(width // heads, 1)),
            rope_theta=rope.number("rope_theta", vision.number("rope_theta", _THETA)),
            settings={
                "longest_edge": longest,
                "line_end": texts.text("image_break_token", "[IMG_BREAK]"),
                "image_end": texts.text("image_end_token", "[IMG_END]"),
            },
        )
        form.check(told.origin)
        return form

    def tiling(self, width: int, height: int) -> Tiling:
        longest, merge = self._integer("longest_edge"), self.form.merge
        step = self.form.patch_size * merge
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        if min(width, height) < 1:
            raise ImageFormError("it is too narrow: nothing is left of its shorter side when it is resized")
        rows, columns = math.ceil(height / step), math.ceil(width / step)
        size = (columns * step, rows * step)
        return Tiling((size,), (Tile(size, (rows * merge, columns * merge), (columns,) * rows, (0, 0, *size)),))

    def text(self, tiling: Tiling) -> str:
        line_end, image_end = f"{self._setting('line_end')}", f"{self._setting('image_end')}"
        (tile,) = tiling.tiles
        return line_end.join(self.form.placeholder * run for run in tile.runs) + image_end
