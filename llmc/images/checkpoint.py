"""Files of a checkpoint that say how its images are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.images.form import RESAMPLES, ImageFormError
from llmc.regular_file import JsonError, parse_json, read_regular
from llmc.shown import shown

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_MOST_BYTES, _MOST_TOKENIZER_BYTES = 4 << 20, 256 << 20
_RESCALE = 1 / 255
_NESTED = "image_processor"


class Checkpoint:
    """config: config.json. processor: processor_config.json. pictures: how an image is prepared, from the table in
    processor_config.json or else from preprocessor_config.json, as transformers prefers them.

    Raises ImageFormError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = Values(_read(path / CONFIG), str(path / CONFIG))
        processor = _read(path / PROCESSOR, missing=True)
        self.processor = Values(processor, str(path / PROCESSOR))
        nested = processor.get(_NESTED)
        if isinstance(nested, Mapping):
            self.pictures = Values(nested, f"{path / PROCESSOR}: {_NESTED}")
        else:
            self.pictures = Values(_read(path / PREPROCESSOR, missing=True), str(path / PREPROCESSOR))

    @property
    def vision(self) -> Values:
        """The encoder's table of config.json, empty if there is none."""
        return self.config.table("vision_config")

    def special_text(self, name: str, default: str) -> str:
        """The text of one of the tokenizer's named special tokens."""
        config = _read(self.path / _TOKENIZER_CONFIG, missing=True)
        extra = config.get("extra_special_tokens")
        value = extra.get(name) if isinstance(extra, Mapping) and name in extra else config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else default

    def token_id(self, text: str, stated: int | None) -> int:
        """The id of an added token in tokenizer.json. stated: what config.json says; it is taken without tokenizer.json
        and must agree with one."""
        tokenizer = _read(self.path / _TOKENIZER, missing=True, most=_MOST_TOKENIZER_BYTES)
        added = tokenizer.get("added_tokens")
        tokens = added if isinstance(added, list) else []
        ids = [token.get("id") for token in tokens if isinstance(token, Mapping) and token.get("content") == text]
        found = next((value for value in ids if type(value) is int and value >= 0), stated)
        if found is None:
            raise ImageFormError(
                f"{self.path} has no token {text!r}, which stands for an image: add its tokenizer.json"
            )
        if found != (found if stated is None else stated):
            raise ImageFormError(
                f"{self.path / CONFIG} has {stated} as the token of images, but {_TOKENIZER} has {text!r} as {found}"
            )
        return found

    def picture_values(self, mean: tuple[float, ...], std: tuple[float, ...], resample: int) -> dict[str, Any]:
        """The fields mean, std, rescale and resample of a form; the arguments are what the kind's files may omit.

        A step that the files turn off is one that changes nothing.
        """
        told, channels = self.pictures, len(mean)
        if not told.flag("do_resize", True) or told.flag("do_center_crop", False):
            raise ImageFormError(
                f"{told.origin} does not resize its images, or crops them: llmc resizes and crops none"
            )
        rescale = told.number("rescale_factor", _RESCALE) if told.flag("do_rescale", True) else 1.0
        if told.flag("do_normalize", True):
            mean, std = told.numbers("image_mean", mean, channels), told.numbers("image_std", std, channels)
        else:
            mean, std = (0.0,) * channels, (1.0,) * channels
        resample = told.integer("resample", resample, least=0)
        if resample not in RESAMPLES:
            raise ImageFormError(f"{told.origin} has the filter {resample}: the filters are 0 to {max(RESAMPLES)}")
        return {"mean": mean, "std": std, "rescale": rescale, "resample": resample}


class Values:
    """The fields of one JSON object; null counts as missing. origin: its name in errors.

    Accessors raise ImageFormError for a value of another type, and for a missing one without a default.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values, self.origin = values, origin

    def _wrong(self, name: str, expected: str) -> ImageFormError:
        value = self._values.get(name)
        if value is None:
            return ImageFormError(f"{self.origin} lacks the field {name!r}, {expected}")
        return ImageFormError(f"{self.origin}: field {name!r} is {shown(value)} where {expected} was expected")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(name, default)
        # Files of some models have a list of one number, or the same number twice.
        if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or not least <= value < 1 << 31:
            raise self._wrong(name, f"an integer of at least {least}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name, least=0) if self.has(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e30:
            raise self._wrong(name, "a positive number")
        return float(value)

    def numbers(self, name: str, default: tuple[float, ...], count: int) -> tuple[float, ...]:
        """A list of `count` numbers, or one number for all."""
        value = self._get(name, list(default))
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = [value] * count
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
            raise self._wrong(name, f"a list of {count} numbers")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        value = value.get("content") if isinstance(value, Mapping) else value
        if not isinstance(value, str) or not value:
            raise self._wrong(name, "a text")
        return value

    def table(self, name: str) -> Values:
        """A nested object, empty if missing."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return Values(value, f"{self.origin}: {name}")

    def longest_edge(self, name: str, default: int) -> int:
        """Of a size that only limits the longer side."""
        if not self.has(name):
            return default
        table = self.table(name)
        if not table.has("longest_edge"):
            raise ImageFormError(f"{table.origin} has no longest_edge: images of this kind are resized to one")
        return table.integer("longest_edge")


def _read(path: Path, *, missing: bool = False, most: int = _MOST_BYTES) -> Mapping[str, Any]:
    try:
        value = parse_json(read_regular(path, most), infinity=True)
    except FileNotFoundError:
        if missing:
            return {}
        raise ImageFormError(f"{path} does not exist: give the directory of a checkpoint") from None
    except OSError as error:
        raise ImageFormError(f"{path} cannot be read: {error.strerror}") from error
    except JsonError as error:
        raise ImageFormError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ImageFormError(f"{path} holds {shown(value)} where an object was expected")
    return value
