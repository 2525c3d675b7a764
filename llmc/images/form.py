"""The form of a model's images: all that the host needs to turn a picture into rows of patches and a text.

The compiler writes it into the manifest of an artifact that encodes images; the runtime reads it from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.shown import shown

Setting = int | float | str | bool
RESAMPLES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Filters for resizing, by Pillow's numbers, which the files of checkpoints have."""
COLOURS = 3
"""Channels of a picture: red, green and blue."""
MOST_PATCHES = 1 << 16
"""Of one tile."""
_MOST_SIDE = 1 << 14
_MOST_TEXT = 200
_MOST_FRAMES = 16
PLACE_WEIGHTS = 4
"""Of a place and the next one, and of those in the next line."""


class ImageFormError(ValueError):
    """A model's form of images that is damaged or that llmc does not know; the message is one sentence."""


@dataclass(frozen=True)
class ImageForm:
    """How the images of one model become rows.

    kind: which file of `kinds/` knows the rest. placeholder, placeholder_id: the token that stands for one row.
    patch_size: side of a patch in pixels. merge: patches on a side of the square that becomes one row.
    mean, std: for each channel, after pixels of 0 to 255 were multiplied by `rescale`. resample: a key of `RESAMPLES`.
    frames: a patch has its pixels so many times, as a film of a picture that stands still.
    extra: numbers that follow a patch's pixels. With places_side, the first `PLACE_WEIGHTS` are weights of neighbouring
    places in a square table of that side, over which the picture is stretched. With rope_theta, the others are the
    cosines and then the sines of the patch's angles in two dimensions; rope_theta is the base of their frequencies.
    rope_alternates: frequencies of columns lie between those of lines; otherwise they are equal.
    most_patches: of the largest tile. usual_patches: counts that are worth a graph each, ascending, the largest last.
    settings: what only the kind knows.
    """

    kind: str
    placeholder: str
    placeholder_id: int
    patch_size: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    resample: int
    most_patches: int
    usual_patches: tuple[int, ...]
    frames: int = 1
    extra: int = 0
    rope_theta: float | None = None
    rope_alternates: bool = True
    places_side: int = 0
    settings: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def patch_width(self) -> int:
        """Numbers of one patch's pixels: [channels][frames][patch_size][patch_size]."""
        return self.channels * self.frames * self.patch_size * self.patch_size

    @property
    def angles(self) -> int:
        """Numbers of one patch's angles: cosines and sines."""
        return self.extra - (PLACE_WEIGHTS if self.places_side else 0)

    @property
    def states_width(self) -> int:
        """Numbers of one patch as the tower takes it: its pixels, then the extra ones."""
        return self.patch_width + self.extra

    @property
    def patches_per_row(self) -> int:
        return self.merge * self.merge

    def as_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        found: dict[str, Any] = {
            "kind": self.kind,
            "placeholder": self.placeholder,
            "placeholder_id": self.placeholder_id,
            "patch_size": self.patch_size,
            "merge": self.merge,
            "mean": list(self.mean),
            "std": list(self.std),
            "rescale": self.rescale,
            "resample": self.resample,
            "most_patches": self.most_patches,
            "usual_patches": list(self.usual_patches),
            "frames": self.frames,
            "extra": self.extra,
            "rope_alternates": self.rope_alternates,
            "places_side": self.places_side,
            "settings": dict(self.settings),
        }
        return found if self.rope_theta is None else {**found, "rope_theta": self.rope_theta}

    @classmethod
    def from_json(cls, value: Any, origin: str = "images") -> ImageForm:
        """The form in a manifest. origin: its name in errors. Raises ImageFormError for anything that `as_json` does
        not write."""
        if not isinstance(value, Mapping):
            raise ImageFormError(f"{origin} is {shown(value)}: compile the model's images again")
        table = _Table(value, origin)
        merge = table.integer("merge", 1, 64)
        form = cls(
            kind=table.text("kind"),
            placeholder=table.text("placeholder"),
            placeholder_id=table.integer("placeholder_id", 0, (1 << 31) - 1),
            patch_size=table.integer("patch_size", 1, _MOST_SIDE),
            merge=merge,
            mean=table.numbers("mean"),
            std=table.numbers("std"),
            rescale=table.number("rescale"),
            resample=table.integer("resample", 0, max(RESAMPLES)),
            most_patches=table.integer("most_patches", merge * merge, MOST_PATCHES),
            usual_patches=table.integers("usual_patches", merge * merge, MOST_PATCHES),
            frames=table.integer("frames", 1, _MOST_FRAMES),
            extra=table.integer("extra", 0, _MOST_SIDE),
            rope_theta=table.number("rope_theta") if "rope_theta" in value else None,
            rope_alternates=table.flag("rope_alternates"),
            places_side=table.integer("places_side", 0, _MOST_SIDE),
            settings=table.settings("settings"),
        )
        table.check_all_read()
        form.check(origin)
        return form

    def check(self, origin: str) -> None:
        """Raises ImageFormError unless the fields fit each other."""
        if not self.channels == len(self.std) == COLOURS:
            raise ImageFormError(
                f"{origin} has {self.channels} means and {len(self.std)} deviations: a picture has {COLOURS} of both"
            )
        if not all(deviation > 0 for deviation in self.std):
            raise ImageFormError(f"{origin} has the deviations {shown(list(self.std))}: each must be positive")
        counts, merged = self.usual_patches, self.patches_per_row
        if list(counts) != sorted({*counts}) or not counts or counts[-1] != self.most_patches:
            raise ImageFormError(
                f"{origin} has the usual counts {shown(list(counts))}: they must ascend to {self.most_patches}"
            )
        if any(count % merged for count in counts):
            raise ImageFormError(f"{origin} has the usual counts {shown(list(counts))}: {merged} patches make a row")
        if (self.rope_theta is None) != (self.angles == 0) or self.angles < 0 or self.angles % 4:
            raise ImageFormError(
                f"{origin} has {self.angles} numbers of angles a patch and rope_theta {self.rope_theta}: angles in two "
                "dimensions take a multiple of 4, and without them there are none"
            )


class _Table:
    """Reads a JSON object strictly; every error is one sentence."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values, self._origin = values, origin
        self._read: set[str] = set()

    def _wrong(self, name: str, expected: str) -> ImageFormError:
        return ImageFormError(f"{self._origin}.{name} is {shown(self._values.get(name))}: {expected} is expected")

    def _get(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str) or not 0 < len(value) <= _MOST_TEXT:
            raise self._wrong(name, "a text")
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        value = self._get(name)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, f"an integer from {least} to {most}")
        return value

    def integers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        value = self._get(name)
        fits = isinstance(value, list) and all(type(item) is int and least <= item <= most for item in value)
        if not fits:
            raise self._wrong(name, f"a list of integers from {least} to {most}")
        return tuple(value)

    def number(self, name: str) -> float:
        value = self._get(name)
        if not _is_number(value):
            raise self._wrong(name, "a finite number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._get(name)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self._wrong(name, "a list of finite numbers")
        return tuple(map(float, value))

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def settings(self, name: str) -> dict[str, Setting]:
        value = self._get(name)
        if not isinstance(value, Mapping) or not all(
            isinstance(key, str) and (isinstance(item, str | bool) or _is_number(item)) for key, item in value.items()
        ):
            raise self._wrong(name, "an object of numbers, texts, true and false")
        return dict(value)

    def check_all_read(self) -> None:
        if unknown := sorted(self._values.keys() - self._read):
            raise ImageFormError(f"{self._origin} has the unknown field {shown(unknown[0])}: a newer llmc wrote it")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30
