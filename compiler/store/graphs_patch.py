"""Reads the facts of weights in graphs.bin, and replaces them by other weights'; graphs and kernels stay."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.compiler.store.graphs_writer import pack_model
from llmc.graphs_format import MAGIC, SECTIONS, VERSIONS, layout, tables_crc32
from llmc.graphs_records import ModelRecord

_HEADER, _SECTION, _MODEL_RECORD, _WEIGHT = map(layout, ("header", "section", "model", "weight"))
_KV_LAYER, _STATE_LAYER = map(layout, ("kv_layer", "state_layer"))
_STRINGS, _MODEL, _WEIGHTS = SECTIONS["strings"], SECTIONS["model"], SECTIONS["weight"]
_RECORD_BYTES = {_STRINGS: 1, _MODEL: _MODEL_RECORD.size, _WEIGHTS: _WEIGHT.size}
_CRC32, _WEIGHTS_BYTES, _WEIGHTS_CRC32 = 5, 6, 7  # indices of header values
_NAME_OFFSET, _NAME_LENGTH, _DTYPE, _RANK, _SHAPE, _WEIGHT_CRC32 = 0, 1, 2, 3, slice(6, 10), 10


class GraphsPatchError(ValueError):
    """Bytes that are not a graphs.bin of this version."""


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of weights.safetensors: dtype code, shape as stored."""

    name: str
    dtype: int
    shape: tuple[int, ...]


class GraphsPatch:
    """A graphs.bin in memory. Raises GraphsPatchError if it is damaged or has another version."""

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)
        try:
            self._header = list(_HEADER.unpack_from(data))
            magic, version, start = self._header[:3]
            if magic != MAGIC or version not in VERSIONS:
                raise GraphsPatchError(f"its format is version {version}, not {' or '.join(map(str, VERSIONS))}")
            if self._header[3] != len(data) or tables_crc32(data) != self._header[_CRC32]:
                raise GraphsPatchError("it is damaged")
            self._sections = {}
            for index in range(self._header[4]):
                kind, _, offset, count = _SECTION.unpack_from(data, start + index * _SECTION.size)
                self._sections[kind] = (offset, count)
            for kind, size in _RECORD_BYTES.items():
                offset, count = self._sections[kind]
                if offset + count * size > len(data) or (kind == _MODEL and count != 1):
                    raise GraphsPatchError(f"its section {kind} of {count} records does not fit")
            self.weights = [self._weight(index) for index in range(self._sections[_WEIGHTS][1])]
        except KeyError as error:
            raise GraphsPatchError(f"it has no section {error}") from None
        except (struct.error, UnicodeDecodeError) as error:
            raise GraphsPatchError(f"it is damaged: {error}") from None

    @property
    def model(self) -> bytes:
        """The model record, as `pack_model` writes it."""
        start = self._sections[_MODEL][0]
        return bytes(self._data[start : start + _MODEL_RECORD.size])

    @property
    def kv_layers(self) -> bytes:
        """The records of layers of the KV cache, as `pack_kv_layers` writes them."""
        return self._records("kv_layer", _KV_LAYER)

    @property
    def state_layers(self) -> bytes:
        """The records of layers with a state, as `pack_state_layers` writes them."""
        return self._records("state_layer", _STATE_LAYER)

    @property
    def weights_sums(self) -> tuple[int, int]:
        """Size of weights.safetensors, and the CRC-32 of its header."""
        return self._header[_WEIGHTS_BYTES], self._header[_WEIGHTS_CRC32]

    def with_weights(self, model: ModelRecord, crcs: Mapping[str, int]) -> bytes:
        """The same graphs with other weights: the model record, and the CRC-32 of each weight by name."""
        start = self._sections[_MODEL][0]
        self._data[start : start + _MODEL_RECORD.size] = pack_model(model)
        for index, weight in enumerate(self.weights):
            at = self._sections[_WEIGHTS][0] + index * _WEIGHT.size
            fields = list(_WEIGHT.unpack_from(self._data, at))
            fields[_WEIGHT_CRC32] = crcs[weight.name]
            _WEIGHT.pack_into(self._data, at, *fields)
        self._header[_CRC32] = tables_crc32(self._data)
        _HEADER.pack_into(self._data, 0, *self._header)
        return bytes(self._data)

    def _records(self, name: str, record: struct.Struct) -> bytes:
        """A section's records; none if it is not there."""
        offset, count = self._sections.get(SECTIONS[name], (0, 0))
        return bytes(self._data[offset : offset + count * record.size])

    def _weight(self, index: int) -> StoredWeight:
        fields = _WEIGHT.unpack_from(self._data, self._sections[_WEIGHTS][0] + index * _WEIGHT.size)
        start = self._sections[_STRINGS][0] + fields[_NAME_OFFSET]
        name = self._data[start : start + fields[_NAME_LENGTH]].decode()
        return StoredWeight(name, fields[_DTYPE], fields[_SHAPE][: fields[_RANK]])
