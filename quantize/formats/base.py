"""The interface of a weight format: a matrix [N, K] as unsigned numbers, plus arrays that map them to values."""

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
"""The array of scales, by which sums are multiplied; every format has it."""
FLOAT, HALF = "f32", "f16"
"""What scales are stored in: checkpoints whose scales are halves keep them so."""


class QuantizeError(ValueError):
    """A quantization request that cannot be met; the message says what to do."""


@dataclass(frozen=True)
class Plane:
    """An array stored beside the numbers of a matrix. dtype: "f32", "f16" or "u8"; count: elements per row."""

    name: str
    dtype: str
    count: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype({"f32": np.float32, "f16": np.float16, "u8": np.uint8}[self.dtype])


@dataclass(frozen=True)
class Sums:
    """Activation sums that integer kernels need beside int8 activations: the sum of each group, times a factor.

    group_size: elements per sum, or WHOLE_ROW.
    factor: corrects for the zero point: −zero, or −1 if zero points are stored per group.
    """

    group_size: int
    factor: int

    def groups(self, k: int) -> int:
        """The number of sums for a row of `k` elements."""
        return groups_of(k, self.group_size)


@dataclass(frozen=True)
class Quantized:
    """Rows of a matrix in a format. numbers: uint8 [R, K]. planes: [R, count] each, by name."""

    format: WeightFormat
    numbers: NDArray[np.uint8]
    planes: Mapping[str, NDArray[Any]]

    @classmethod
    def empty(cls, format: WeightFormat, rows: int, k: int) -> Quantized:
        """Uninitialized storage for `rows` rows."""
        planes = {plane.name: np.empty((rows, plane.count), plane.numpy_dtype) for plane in format.planes(k)}
        return cls(format, np.empty((rows, k), np.uint8), planes)

    def rows(self, some: slice) -> Quantized:
        """A view of some rows."""
        planes = {name: plane[some] for name, plane in self.planes.items()}
        return Quantized(self.format, self.numbers[some], planes)

    def taken(self, order: NDArray[Any]) -> Quantized:
        """A copy with rows reordered: row i is row order[i] of this."""
        planes = {name: plane[order] for name, plane in self.planes.items()}
        return Quantized(self.format, self.numbers[order], planes)

    def copy_to(self, out: Quantized) -> None:
        np.copyto(out.numbers, self.numbers)
        for name, plane in self.planes.items():
            np.copyto(out.planes[name], plane)

    @property
    def scale(self) -> NDArray[Any]:
        return self.planes[SCALE]

    def value(self) -> NDArray[np.float64]:
        """The values that the numbers stand for."""
        return self.format.value(self)


class WeightFormat(ABC):
    """How a matrix is stored; an immutable dataclass with JSON fields. To add one, add a file here and a line in
    `registry.py`.

    bits: width of the unsigned numbers: 8, 6, 5 or 4. group_size: elements along K that share scales and the like. A
    multiple of 32 (of 8 without `sums`), or WHOLE_ROW. The last group may be short.
    """

    kind: ClassVar[str]
    """Exact name, as in `registry.FORMATS`."""
    templates: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """Readers for kernels, by kind of target, called with the format; a target's own readers take precedence.

        `cpu`: the reader's class; `reference`: the matrix's.
    """
    bits: int
    group_size: int

    @abstractmethod
    def planes(self, k: int) -> tuple[Plane, ...]:
        """The arrays beside the numbers, for rows of `k` elements; SCALE is the first."""

    @abstractmethod
    def quantize_rows(self, weight: NDArray[np.float32], out: Quantized) -> None:
        """Rounds rows [R, K] to nearest into `out`; overwrites `weight`. Raises QuantizeError on a value that is not
        finite."""

    @abstractmethod
    def value(self, quantized: Quantized) -> NDArray[np.float64]:
        """The values of numbers; this defines the format."""

    @property
    def sums(self) -> Sums | None:
        """The sums that int8 activations must carry; None for a format that is not multiplied as integers."""
        return None

    def resembles(self, other: WeightFormat) -> bool:
        """Whether numbers have the same meaning in both, so that a weight of `other` takes the scheme of this
        format."""
        return self.kind == other.kind

    @property
    def is_regrouped(self) -> bool:
        """Whether groups can be changed, by the fields `group_size` and `asymmetric`."""
        return False

    def regrouped(self, group_size: int | None, asymmetric: bool | None) -> WeightFormat:
        """The format with other groups; None keeps the current value. Raises QuantizeError."""
        if group_size is not None and group_size not in GROUP_SIZES:
            raise QuantizeError(f"group size {group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
        given = {"group_size": group_size, "asymmetric": asymmetric}
        changed: WeightFormat = replace(
            self,  # type: ignore[type-var]
            **{name: value for name, value in given.items() if value is not None},
        )
        return changed

    def describe(self) -> str:
        """The groups, as text."""
        return "channels" if self.group_size == WHOLE_ROW else f"groups of {self.group_size}"

    def groups(self, k: int) -> int:
        """The number of groups in a row of `k` elements."""
        return groups_of(k, self.group_size)

    def scales(self, k: int) -> int:
        """The number of scales in a row of `k` elements; sums of that many groups are scaled separately."""
        return next(plane.count for plane in self.planes(k) if plane.name == SCALE)

    def group_of(self, k: int) -> NDArray[np.int64]:
        """The group number of each element of a row."""
        return np.arange(k) // (k if self.group_size == WHOLE_ROW else self.group_size)

    def bits_per_weight(self, k: int) -> float:
        """Bits per element, everything beside the numbers included."""
        return self.bits + sum(8 * plane.numpy_dtype.itemsize * plane.count for plane in self.planes(k)) / k

    def record(self) -> dict[str, Any]:
        """Everything that identifies the format, as JSON: `format` in the manifest."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    def kernel_params(self) -> dict[str, int | bool | str]:
        """The parameters on which kernels that read the format depend, for their specs."""
        record = self.record()
        return {"format": record.pop("kind"), **record}


def groups_of(k: int, group_size: int) -> int:
    """The number of groups in a row of `k` elements."""
    return 1 if group_size == WHOLE_ROW else -(-k // group_size)


def check_finite(*arrays: NDArray[np.float32]) -> None:
    """Raises QuantizeError on a value that is not finite."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise QuantizeError("a weight is infinite or not a number; quantize a checkpoint whose weights are finite")


def inverse_of(scale: NDArray[np.float32 | np.float16]) -> NDArray[np.float32]:
    """1 / scale, or 0 where that would overflow."""
    inverse = np.zeros(scale.shape, np.float32)
    np.divide(np.float32(1), scale, out=inverse, where=np.abs(scale) > 1e-37)
    return inverse


def in_groups(k: int, group_size: int) -> list[tuple[slice, slice, int]]:
    """(elements, groups, width): one entry for the whole groups of a row, one for a short last group."""
    size = k if group_size == WHOLE_ROW else min(group_size, k)
    whole = k // size * size
    ends = ((0, whole, size), (whole, k, k - whole))
    return [(slice(a, b), slice(a // size, -(-b // size)), width) for a, b, width in ends if a < b]
