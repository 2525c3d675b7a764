"""Files of safetensors, mapped and read on demand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from llmc.models.brief import brief_name
from llmc.models.sources.tensor_file import MOST_ELEMENTS, TensorEntry, TensorFile
from llmc.quantize.checkpoints import CARRIERS
from llmc.regular_file import JsonError, parse_json

# Room for 100,000 tensors; as Python objects a header takes up to 30 times its size.
_MAX_HEADER_BYTES = 16 << 20
_MAX_DIMENSIONS, _MAX_DTYPE_LENGTH = 8, 16


class SafetensorsFile(TensorFile):
    """A file whose header is fully checked: no byte belongs to two tensors."""

    def _read_entries(self) -> dict[str, TensorEntry]:
        entries = self._read_header()
        self._check_overlaps(entries)
        return entries

    def _read_header(self) -> dict[str, TensorEntry]:
        size = len(self._map)
        header_bytes = int.from_bytes(self._map[:8], "little")
        if size < 8 or header_bytes > size - 8:
            raise self._broken(f"a header of {header_bytes} bytes in a file of {size}")
        if header_bytes > _MAX_HEADER_BYTES:
            raise self._broken(f"a header of {header_bytes} bytes, more than {_MAX_HEADER_BYTES}")
        try:
            header = parse_json(self._map[8 : 8 + header_bytes])
        except JsonError as error:
            raise self._broken(f"the header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._broken("the header is not a JSON object")
        start = 8 + header_bytes
        return {name: self._entry(name, value, start) for name, value in header.items() if name != "__metadata__"}

    def _check_overlaps(self, entries: Mapping[str, TensorEntry]) -> None:
        """Raises ModelError if a byte belongs to two tensors."""
        by_place = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
        for (name, entry), (next_name, next_entry) in pairwise(by_place):
            if next_entry.begin < entry.end:
                raise self._broken(
                    f"tensor {brief_name(next_name)} begins at byte {next_entry.begin}, before tensor "
                    f"{brief_name(name)} ends at {entry.end}"
                )

    def _entry(self, name: str, value: Any, start: int) -> TensorEntry:
        malformed = self._broken(f"the header's entry of {brief_name(name)} is malformed")
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise malformed from error
        numbers = (*shape, begin, end)
        if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise malformed
        if (
            math.prod(size or 1 for size in shape) >= MOST_ELEMENTS
            or len(shape) > _MAX_DIMENSIONS
            or len(dtype) > _MAX_DTYPE_LENGTH
            or not dtype.isprintable()
        ):
            raise malformed
        if end < begin or start + end > len(self._map):
            raise self._broken(f"tensor {brief_name(name)} ends at byte {start + end} of {len(self._map)}")
        carrier = CARRIERS.get(dtype)
        if carrier is not None and math.prod(shape) * carrier.itemsize != end - begin:
            raise self._broken(
                f"tensor {brief_name(name)} of shape {list(shape)} and dtype {dtype} has {end - begin} bytes"
            )
        return TensorEntry(dtype, shape, start + begin, start + end)
