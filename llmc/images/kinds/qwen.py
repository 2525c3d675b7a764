"""Qwen from Qwen2-VL to Qwen3.6: the whole picture in one piece, about in its own proportions, within bounds of its
area.

Its rows have places on two axes in the text. `transformers` has the same rules in image_processing_pil_qwen2_vl.py and
processing_qwen3_vl.py.
"""

from __future__ import annotations

import math
from math import isqrt
from typing import ClassVar

from llmc.images.checkpoint import Checkpoint
from llmc.images.form import PLACE_WEIGHTS, ImageForm, ImageFormError
from llmc.images.kinds.kind import Kind
from llmc.images.tiling import Tile, Tiling

_BICUBIC = 3
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_THETA = 10000.0
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 28 * 28 * 1280
_MOST_RATIO = 200
"""Of a picture's sides, as in transformers."""
_MOST_PATCHES = 1 << 14
"""Of a picture, whatever the files say: larger ones are made smaller. Files of some models allow four times as many,
for which a tower would take memory of gigabytes."""
_USUAL = (64, 16, 8, 4, 2, 1)
"""Parts of the largest picture that are worth a graph each."""


class Qwen(Kind):
    NAME = "qwen"
    MODEL_TYPES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    SETTINGS: ClassVar = {"least_pixels": int, "most_pixels": int, "start": str, "end": str}
    """least_pixels, most_pixels: bounds of the resized picture's area. start, end: tokens around an image."""
    ON_AXES = True

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> ImageForm:
        config, vision, told = checkpoint.config, checkpoint.vision, checkpoint.pictures
        patch, merge = vision.integer("patch_size", 14), vision.integer("spatial_merge_size", 2)
        frames = vision.integer("temporal_patch_size", 2)
        for name, value in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", frames)):
            if told.integer(name, value) != value:
                raise ImageFormError(f"{told.origin} has another {name} than the model's {value}: both must agree")
        size, row = told.table("size"), merge * merge
        least = told.integer("min_pixels", size.integer("shortest_edge", _LEAST_PIXELS))
        most = told.integer("max_pixels", size.integer("longest_edge", _MOST_PIXELS))
        most = min(most, _MOST_PATCHES * patch * patch)
        step = (patch * merge) ** 2
        if least > most or most < step:
            raise ImageFormError(f"{told.origin}: images of {least} to {most} pixels hold no patch of {step}")
        patches = most // step * row
        places, width = vision.optional_integer("num_position_embeddings"), cls._width(checkpoint)
        side = 0 if places is None or not cls._has_table(checkpoint) else isqrt(places)
        placeholder = checkpoint.special_text("image_token", "<|image_pad|>")
        head_dim = width // vision.integer("num_heads", 16)
        form = ImageForm(
            kind=cls.NAME,
            placeholder=placeholder,
            placeholder_id=checkpoint.token_id(placeholder, config.optional_integer("image_token_id")),
            patch_size=patch,
            merge=merge,
            **checkpoint.picture_values(*_CLIP, _BICUBIC),
            most_patches=patches,
            usual_patches=tuple(sorted({max(patches // part // row, 1) * row for part in _USUAL})),
            frames=frames,
            extra=head_dim + (PLACE_WEIGHTS if side else 0),
            rope_theta=vision.table("rope_parameters").number("rope_theta", _THETA),
            rope_alternates=False,
            places_side=side,
            settings={
                "least_pixels": least,
                "most_pixels": most,
                "start": checkpoint.special_text("vision_start_token", "<|vision_start|>"),
                "end": checkpoint.special_text("vision_end_token", "<|vision_end|>"),
            },
        )
        form.check(told.origin)
        return form

    @staticmethod
    def _has_table(checkpoint: Checkpoint) -> bool:
        """Whether the tower has a learned table of places, as all but the first one have."""
        return checkpoint.config.text("model_type", "") != "qwen2_vl"

    @classmethod
    def _width(cls, checkpoint: Checkpoint) -> int:
        """Of the tower's rows. The first one calls that of the text model by the name that others have for it."""
        vision = checkpoint.vision
        return vision.integer("hidden_size", 1152) if cls._has_table(checkpoint) else vision.integer("embed_dim", 1280)

    def tiling(self, width: int, height: int) -> Tiling:
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise ImageFormError(f"one side is more than {_MOST_RATIO} times as long as the other: cut it")
        step, merge = self.form.patch_size * self.form.merge, self.form.merge
        least, most = self._integer("least_pixels"), self._integer("most_pixels")
        lines, columns = round(height / step) * step, round(width / step) * step
        if lines * columns > most:
            shrunk = math.sqrt((height * width) / most)
            lines = max(step, math.floor(height / shrunk / step) * step)
            columns = max(step, math.floor(width / shrunk / step) * step)
        elif lines * columns < least:
            grown = math.sqrt(least / (height * width))
            lines, columns = math.ceil(height * grown / step) * step, math.ceil(width * grown / step) * step
        grid = (lines // step * merge, columns // step * merge)
        if grid[0] * grid[1] > self.form.most_patches:
            raise ImageFormError("it has more patches than the model sees: one side is much longer than the other")
        rows = grid[0] * grid[1] // self.form.patches_per_row
        return Tiling(((columns, lines),), (Tile((columns, lines), grid, (rows,), (0, 0, columns, lines)),))

    def text(self, tiling: Tiling) -> str:
        return self.form.placeholder * tiling.num_rows

    def in_front(self) -> str:
        return f"{self._setting('start')}{self.form.placeholder}{self._setting('end')}"
