"""The tower of a model that sees images, read from the model's files as a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from llmc.images.form import ImageForm, ImageFormError
from llmc.images.read import read_image_form
from llmc.models.config import ModelConfig
from llmc.models.convert import DTYPES
from llmc.models.errors import ModelError
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource


class TowerSource(ModelSource):
    """What makes rows of the images of `model`, as that is compiled."""

    def __init__(self, model: ModelSource) -> None:
        super().__init__(model.path, allow_unknown_config=model.allow_unknown_config)
        self._model = model

    @cached_property
    def _form(self) -> ImageForm:
        try:
            return read_image_form(self.path)
        except ImageFormError as error:
            raise ModelError(str(error)) from None

    def image_form(self) -> ImageForm:
        return self._form

    def config(self) -> ModelConfig:
        """It reads as many patches as the largest image has. Raises ModelError if the model has no tower, or if its
        files disagree on patches."""
        config = self._model.tower_config()
        if config is None or config.tower is None:
            kind = self._model.config().model_type
            raise ModelError(f"{self.path}: llmc sees no images with {kind} models; leave out --images")
        form, tower = self._form, config.tower
        found = (form.channels, form.frames, form.patch_size, form.patches_per_row, form.extra)
        extra = tower.states_width - tower.patch_width
        wanted = (tower.channels, tower.frames, tower.patch_size, tower.merged, extra)
        if found != wanted:
            raise ModelError(
                f"{self.path}: images are cut to {form.channels} channels, {form.frames} frames, patches of "
                f"{form.patch_size} pixels, {form.patches_per_row} for a row, and {form.extra} numbers behind them, "
                f"but the model reads {tower.channels}, {tower.frames}, {tower.patch_size}, {tower.merged} and "
                f"{extra}; download its files again"
            )
        return replace(config, max_position_embeddings=form.most_patches)

    def ignored_config(self) -> tuple[str, ...]:
        """Nothing: the text model's files are the same, and say it."""
        return ()

    @property
    def is_quantized(self) -> bool:
        return False

    def checkpoint(self) -> Checkpoint:
        """Raises ModelError for a tower whose matrices are quantized, which most tools leave alone."""
        found, weights = self._model.tower_checkpoint(), get_family(self.config().model_type).weight_maps(self.config())
        unread = {name for one in weights for name in one.unused}
        modules = tuple(module for one in weights for module in one.other_modules)
        for name in found.names():
            if not name.startswith(modules) and name not in unread and found.dtype(name) not in DTYPES:
                raise ModelError(
                    f"{found.called(name)} of {self.path} is {found.dtype(name)}: llmc reads no quantized towers yet; "
                    "give a checkpoint whose tower is not quantized, or leave out --images"
                )
        return found

    def model_files(self) -> ModelFiles:
        return self._model.model_files()

    def weight_files(self) -> Iterator[Path]:
        yield from self._model.weight_files()

    def all_files(self) -> Iterator[Path]:
        yield from self._model.all_files()
