"""What a weight format is: a matrix [N, K] as numbers, and arrays beside them that say what the numbers stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

WHOLE_ROW = -1
"""The group size of a weight whose rows are one group each."""
GROUP_SIZES = (32, 64, 128, WHOLE_ROW)
SCALE = "scale"
"""The array that sums are multiplied by; every format has it."""


class QuantizeError(ValueError):
    """A request for quantization that cannot be met; the message says what to do."""


@dataclass(frozen=True)
class Plane:
    """An array beside the numbers of a matrix. dtype: "f32" or "u8"; count: elements a row."""

    name: str
    dtype: str
    count: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype({"f32": np.float32, "u8": np.uint8}[self.dtype])


@dataclass(frozen=True)
class Sums:
    """What int8 activations carry for kernels that multiply integers: sums of groups of them, times a factor."""

    group_size: int
    factor: int

    def groups(self, k: int) -> int:
        """Sums of a row of `k` elements."""
        return groups_of(k, self.group_size)


@dataclass(frozen=True)
class Quantized:
    """Rows of a matrix in a format. numbers: uint8 [R, K]; planes: [R, count] each, by name."""

    format: WeightFormat
    numbers: NDArray[np.uint8]
    planes: Mapping[str, NDArray[Any]]

    @classmethod
    def empty(cls, format: WeightFormat, rows: int, k: int) -> Quantized:
        """Memory for so many rows."""
        planes = {plane.name: np.empty((rows, plane.count), plane.numpy_dtype) for plane in format.planes(k)}
        return cls(format, np.empty((rows, k), np.uint8), planes)

    def rows(self, some: slice) -> Quantized:
        """Some of its rows, in the same memory."""
        planes = {name: plane[some] for name, plane in self.planes.items()}
        return Quantized(self.format, self.numbers[some], planes)

    def taken(self, order: NDArray[Any]) -> Quantized:
        """The rows in another order: row i is row order[i] of this."""
        planes = {name: plane[order] for name, plane in self.planes.items()}
        return Quantized(self.format, self.numbers[order], planes)

    def copy_to(self, out: Quantized) -> None:
        np.copyto(out.numbers, self.numbers)
        for name, plane in self.planes.items():
            np.copyto(out.planes[name], plane)

    @property
    def scale(self) -> NDArray[np.float32]:
        return self.planes[SCALE]

    def value(self) -> NDArray[np.float64]:
        """What the numbers stand for."""
        return self.format.value(self)


class WeightFormat(ABC):
    """How matrices are stored; an immutable dataclass whose fields are JSON. A new one is a file here and a line in
    `registry.py`.

    bits: of a number, 8, 5 or 4; numbers are unsigned. group_size: elements along K that share what lies beside the
    numbers: a multiple of 32, of 8 if there are no `sums`, or WHOLE_ROW. The last group may be short.
    """

    kind: ClassVar[str]
    """As in `registry.FORMATS`."""
    templates: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """What kernels read it with, by kind of target, called with the format; a target's own go before. `cpu`: the
    reader's class; `reference`: the matrix's."""
    bits: int
    group_size: int

    @abstractmethod
    def planes(self, k: int) -> tuple[Plane, ...]:
        """The arrays beside the numbers of rows of `k` elements; SCALE is the first."""

    @abstractmethod
    def quantize_rows(self, weight: NDArray[np.float32], out: Quantized) -> None:
        """Rounds rows [R, K] to the nearest numbers; overwrites `weight`. Raises QuantizeError unless finite."""

    @abstractmethod
    def value(self, quantized: Quantized) -> NDArray[np.float64]:
        """What numbers stand for: the format's definition."""

    @property
    def sums(self) -> Sums | None:
        """What int8 activations need beside their numbers; None: this format is not multiplied as integers."""
        return None

    def resembles(self, other: WeightFormat) -> bool:
        """Whether numbers of both mean the same, so that a weight of `other` has the scheme that has this."""
        return self.kind == other.kind

    @property
    def is_regrouped(self) -> bool:
        """Whether it has other group sizes, and zero points at will: fields `group_size` and `asymmetric`."""
        return False

    def regrouped(self, group_size: int | None, asymmetric: bool | None) -> WeightFormat:
        """The format with other groups; None keeps what it has. Raises QuantizeError."""
        if group_size is not None and group_size not in GROUP_SIZES:
            raise QuantizeError(f"group size {group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
        given = {"group_size": group_size, "asymmetric": asymmetric}
        changed: WeightFormat = replace(
            self,  # type: ignore[type-var]
            **{name: value for name, value in given.items() if value is not None},
        )
        return changed

    def describe(self) -> str:
        """Its groups, for people."""
        return "channels" if self.group_size == WHOLE_ROW else f"groups of {self.group_size}"

    def groups(self, k: int) -> int:
        """Groups of a row of `k` elements."""
        return groups_of(k, self.group_size)

    def scales(self, k: int) -> int:
        """Scales of a row of `k` elements: of so many groups sums are scaled apart."""
        return next(plane.count for plane in self.planes(k) if plane.name == SCALE)

    def group_of(self, k: int) -> NDArray[np.int64]:
        """The group of each element of a row."""
        return np.arange(k) // (k if self.group_size == WHOLE_ROW else self.group_size)

    def bits_per_weight(self, k: int) -> float:
        """Bits an element, with all that lies beside the numbers."""
        return self.bits + sum(8 * plane.numpy_dtype.itemsize * plane.count for plane in self.planes(k)) / k

    def record(self) -> dict[str, Any]:
        """All that identifies it, as JSON: the manifest's `format`."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    def kernel_params(self) -> dict[str, int | bool | str]:
        """What kernels that read it depend on, for their specs."""
        record = self.record()
        return {"format": record.pop("kind"), **record}


def groups_of(k: int, group_size: int) -> int:
    """Groups of a row of `k` elements."""
    return 1 if group_size == WHOLE_ROW else -(-k // group_size)


def check_finite(*arrays: NDArray[np.float32]) -> None:
    """Raises QuantizeError on a value that is none."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise QuantizeError("a weight is infinite or not a number; quantize a checkpoint whose weights are finite")


def inverse_of(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / scale, and 0 where that would be infinite."""
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=np.abs(scale) > 1e-37)
    return inverse


def in_groups(k: int, group_size: int) -> list[tuple[slice, slice, int]]:
    """(elements, groups, width) of the whole groups of a row and of the short one behind them."""
    size = k if group_size == WHOLE_ROW else min(group_size, k)
    whole = k // size * size
    ends = ((0, whole, size), (whole, k, k - whole))
    return [(slice(a, b), slice(a // size, -(-b // size)), width) for a, b, width in ends if a < b]
