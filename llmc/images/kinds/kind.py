"""What each kind of images knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from llmc.images.checkpoint import Checkpoint
from llmc.images.form import ImageForm, ImageFormError, Setting
from llmc.images.tiling import Tiling
from llmc.shown import shown


class Kind(ABC):
    """A kind of images, for the form of one model. Raises ImageFormError unless the form's settings are its own."""

    NAME: ClassVar[str]
    MODEL_TYPES: ClassVar[tuple[str, ...]]
    """Of config.json."""
    ON_AXES: ClassVar[bool] = False
    """Whether rows have places on two axes in the text, line by line of each tile; otherwise they count as tokens."""
    SETTINGS: ClassVar[Mapping[str, type]]
    """Names and types of the form's settings."""

    def __init__(self, form: ImageForm) -> None:
        if form.settings.keys() != self.SETTINGS.keys():
            raise ImageFormError(
                f"images of the kind {self.NAME} have the settings {shown(sorted(form.settings))} where "
                f"{', '.join(sorted(self.SETTINGS))} are expected: compile the model's images again"
            )
        for name, kind in self.SETTINGS.items():
            value = form.settings[name]
            if type(value) is not kind or (kind is int and not 0 < int(value) <= 1 << 30):
                raise ImageFormError(
                    f"the setting {name} of images of the kind {self.NAME} is {shown(value)}: compile the model's "
                    "images again"
                )
        self.form = form

    @classmethod
    @abstractmethod
    def read(cls, checkpoint: Checkpoint) -> ImageForm:
        """The form that a checkpoint's files say. Raises ImageFormError."""

    @abstractmethod
    def tiling(self, width: int, height: int) -> Tiling:
        """How a picture of that many pixels is cut. Raises ImageFormError for a size that the model cannot see."""

    @abstractmethod
    def text(self, tiling: Tiling) -> str:
        """What takes the place of one placeholder in a prompt. Its placeholders are the tiles' runs, in order."""

    def in_front(self) -> str:
        """What puts an image in front of a text: the placeholder, and the tokens around it if the model has some."""
        return self.form.placeholder

    def _setting(self, name: str) -> Setting:
        return self.form.settings[name]

    def _integer(self, name: str) -> int:
        return int(self.form.settings[name])
