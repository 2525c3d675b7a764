"""A prompt with images: from what a caller gives to token ids, and to rows in the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.runtime.images.image_error import NoImages
from llmc.runtime.images.messages import check_texts, without_images
from llmc.runtime.images.placing import expanded, placed_rows, runs_of
from llmc.runtime.images.tower import SeenPicture, Tower

if TYPE_CHECKING:
    from llmc.runtime.binding.placed_rows import PlacedRows

Resolve = Callable[[Any, Any], Any]
"""From what a part holds, and the limits, to bytes, an ImageFile or an image of Pillow; see `sources`."""


@dataclass(frozen=True)
class ImagePrompt:
    """text: with the texts of all images. pictures: in their order. tower: None without images."""

    text: str
    tower: Tower | None = None
    pictures: tuple[SeenPicture, ...] = ()

    def check(self, ids: Sequence[int]) -> None:
        """Raises ImageError unless these token ids of the text have a place for each row."""
        if self.tower is not None and self.pictures:
            runs_of(ids, self.pictures, self.tower.form)

    def placed(self, ids: Sequence[int], is_gone: Callable[[], bool] = lambda: False) -> tuple[PlacedRows, ...] | None:
        """Encodes the images, which takes long, and places their rows among the token ids of the text.

        is_gone: asked before each image; None is returned where nobody wants the rows any more. Raises ImageError, and
        LlmcError if the device fails.
        """
        if self.tower is None or not self.pictures:
            return ()
        rows = []
        for picture in self.pictures:
            if is_gone():
                return None
            rows.append(self.tower.rows(picture))
        return placed_rows(ids, self.pictures, rows, self.tower.form)


def text_prompt(tower: Tower | None, text: str, images: Sequence[Any], resolve: Resolve) -> ImagePrompt:
    """A text that has the placeholder once for each image; one without any has its images in front. Raises ImageError,
    and NoImages without a tower."""
    if not images:
        return ImagePrompt(text)
    pictures = _looked(tower, images, resolve)
    assert tower is not None
    placed = text if tower.form.placeholder in text else tower.kind.in_front() * len(images) + text
    return _expanded(tower, placed, pictures, "the prompt")


def chat_prompt(
    tower: Tower | None,
    messages: Sequence[Mapping[str, Any]],
    others: Mapping[str, Any],
    render: Callable[[Sequence[Mapping[str, Any]], str | None], str],
    resolve: Resolve,
) -> ImagePrompt:
    """A conversation whose messages may have images. others: what else goes into the template, by its name in errors.
    render: from messages, in which images are parts without content, and the placeholder, to a text.

    Raises ImageError, also for a text with the placeholder beside images: nobody could tell what it stands for. Raises
    NoImages without a tower.
    """
    plain, images = without_images(messages)
    if not images:
        return ImagePrompt(render(messages, None))
    pictures = _looked(tower, images, resolve)
    assert tower is not None
    placeholder = tower.form.placeholder
    for name, value in {"messages": plain, **others}.items():
        check_texts(value, placeholder, name)
    return _expanded(tower, render(plain, placeholder), pictures, "the rendered chat")


def _looked(tower: Tower | None, images: Sequence[Any], resolve: Resolve) -> list[SeenPicture]:
    if tower is None:
        raise NoImages(
            "the prompt has images and nothing here sees them: compile the model with --images, and give the artifact "
            "that this makes beside it with images"
        )
    tower.limits.check_count(len(images))
    return [tower.look(resolve(image, tower.limits)) for image in images]


def _expanded(tower: Tower | None, text: str, pictures: list[SeenPicture], where: str) -> ImagePrompt:
    assert tower is not None
    return ImagePrompt(expanded(text, pictures, tower.form, where), tower, tuple(pictures))
