"""The representable values of a weight's groups once scales are chosen: a grid per kind of format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import inverse_of

Floats = NDArray[np.float32]
_G = TypeVar("_G", bound="Grid")


@dataclass(frozen=True, eq=False)
class Grid(ABC):
    """Group parameters [R, G], which broadcast against the elements they round. scale: float32."""

    scale: Floats

    @cached_property
    def inverse(self) -> Floats:
        return inverse_of(self.scale)

    @abstractmethod
    def rounded(self, weight: Floats) -> Floats:
        """The nearest numbers, as float32."""

    @abstractmethod
    def values(self, numbers: Floats) -> Floats:
        """The values of numbers."""

    @abstractmethod
    def planes(self) -> Mapping[str, NDArray[Any]]:
        """The arrays stored beside the numbers, [R, G] each."""

    def with_end_moved(self: _G, end: int, dtype: str) -> Iterator[_G]:
        """Grids with the lower (0) or upper (1) end of the range moved; none if the ends cannot move independently.

        dtype: of stored scales.
        """
        return iter(())

    def mapped(self: _G, how: Callable[[NDArray[Any]], NDArray[Any]]) -> _G:
        """The grid with `how` applied to each array."""
        return replace(self, **{name: how(array) for name, array in self._arrays().items()})

    def where(self: _G, chosen: NDArray[np.bool_], other: _G) -> _G:
        """This grid in the chosen groups [R, G], `other` elsewhere."""
        others = other._arrays()
        return replace(self, **{name: np.where(chosen, array, others[name]) for name, array in self._arrays().items()})

    def wide(self: _G) -> _G:
        """The grid shaped for elements [R, G, width]."""
        return self.mapped(lambda array: array[..., None])

    def of_groups(self: _G) -> list[_G]:
        """One grid per group, each shaped for elements [R]."""
        return [self.mapped(lambda array, g=g: np.ascontiguousarray(array[:, g])) for g in range(self.scale.shape[1])]  # type: ignore[misc]

    def joined(self: _G, groups: Sequence[_G]) -> _G:
        """The inverse of `of_groups`."""
        arrays = [group._arrays() for group in groups]
        return replace(self, **{name: np.stack([of[name] for of in arrays], axis=1) for name in self._arrays()})

    def _arrays(self) -> dict[str, NDArray[Any]]:
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if isinstance(value, np.ndarray)}


SCALE_DTYPES = ("f32", "f16", "bf16")


def rounded_scale(scale: Floats, dtype: str) -> Floats:
    """Scales rounded to `dtype`, one of SCALE_DTYPES, as float32."""
    if dtype == "f16":
        return np.clip(scale, -65504, 65504).astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = np.ascontiguousarray(scale).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return scale
