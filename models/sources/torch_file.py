"""Files of `torch.save`: a zip archive with a pickle, which is never run, and the bytes of tensors.

Archives of torch 1.6 and later are mapped and read on demand. Their records are not compressed.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from mmap import mmap
from typing import IO, Literal, cast

from llmc.models.brief import brief_name
from llmc.models.errors import ModelError
from llmc.models.sources.state_dict import ForeignName, MoreThanTensors, StateDictError, TensorView, read_state_dict
from llmc.models.sources.tensor_file import TensorEntry, TensorFile

_CONVERT = "convert it to model.safetensors (if you trust it, load it with transformers and save_pretrained)"
_LOCAL, _HEADER_BYTES = b"PK\x03\x04", 30
_PICKLE = b"\x80"
"""How a pickle begins, and with it a file of an older version of torch."""
# Room for 30,000 tensors; as Python objects a pickle takes up to 70 times its size.
_MAX_PICKLE_BYTES, _MAX_DIRECTORY_BYTES = 4 << 20, 8 << 20


class _Directory:
    """What zipfile sees of a file: no part larger than a directory may be."""

    def __init__(self, data: mmap) -> None:
        self._data = data

    def seek(self, offset: int, whence: Literal[0, 1, 2] = 0) -> int:
        self._data.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        return self._data.tell()

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a directory of {size} bytes, more than {_MAX_DIRECTORY_BYTES}")
        return self._data.read(size)


class TorchFile(TensorFile):
    """A dictionary of tensors, also below the key "state_dict". Tensors may share numbers, and be transposed."""

    def _read_entries(self) -> Mapping[str, TensorEntry]:
        if self._map[: len(_LOCAL)] != _LOCAL:
            if self._map[: len(_PICKLE)] == _PICKLE:
                raise ModelError(
                    f"{self.path} is a mere pickle, as torch before 1.6 saved tensors, which is not read because "
                    f"pickles can run code; {_CONVERT}"
                )
            raise self._broken("it does not begin as a zip archive")
        records = self._records()
        pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise self._broken(f"it has {len(pickles)} records named data.pkl")
        root = pickles[0].removesuffix("data.pkl")
        self._check_order(records.get(f"{root}byteorder"))
        begin, end = self._place(records[pickles[0]])
        if end - begin > _MAX_PICKLE_BYTES:
            raise self._broken(f"a pickle of {end - begin} bytes, more than {_MAX_PICKLE_BYTES}")
        try:
            tensors = read_state_dict(self._map[begin:end])
        except StateDictError as error:
            raise self._broken(f"in its pickle, {error}") from None
        except MoreThanTensors as error:
            raise ModelError(f"{self.path} has more than tensors by name ({error} in its pickle); {_CONVERT}") from None
        except ForeignName as error:
            raise ModelError(
                f"{self.path} names {error}, which a dictionary of tensors does not need, and llmc runs nothing that a "
                f"pickle names; {_CONVERT}"
            ) from None
        return {name: self._entry(name, view, records, root) for name, view in tensors.items()}

    def _records(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(cast(IO[bytes], _Directory(self._map))) as archive:
                listed = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, OverflowError, struct.error) as error:
            raise self._broken(f"its directory: {' '.join(str(error).split())[:80]}") from None
        records = {info.filename: info for info in listed}
        if len(records) != len(listed):
            raise self._broken("two records have one name")
        return records

    def _place(self, record: zipfile.ZipInfo) -> tuple[int, int]:
        """The first byte of a record, and the one behind it."""
        name, at = brief_name(record.filename), record.header_offset
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            raise self._broken(f"its record {name} is compressed or encrypted")
        header = self._map[at : at + _HEADER_BYTES] if at >= 0 else b""
        if len(header) < _HEADER_BYTES or not header.startswith(_LOCAL):
            raise self._broken(f"its record {name} does not begin at byte {at}")
        begin = at + _HEADER_BYTES + sum(struct.unpack_from("<HH", header, 26))
        end = begin + record.file_size
        if end > len(self._map):
            raise self._broken(f"its record {name} ends at byte {end} of {len(self._map)}")
        return begin, end

    def _check_order(self, record: zipfile.ZipInfo | None) -> None:
        """Only newer versions of torch state the order of bytes."""
        if record is not None:
            begin, end = self._place(record)
            if self._map[begin : min(end, begin + 16)] != b"little":
                raise ModelError(f"{self.path} has numbers in another byte order than little-endian; {_CONVERT}")

    def _entry(self, name: str, view: TensorView, records: Mapping[str, zipfile.ZipInfo], root: str) -> TensorEntry:
        storage = view.storage
        record = records.get(f"{root}data/{storage.key}")
        if record is None:
            raise self._broken(f"the record {brief_name(storage.key)} of tensor {brief_name(name)} is missing")
        begin, end = self._place(record)
        size = storage.item_bytes
        if end - begin != storage.count * size:
            raise self._broken(
                f"the record of tensor {brief_name(name)} has {end - begin} bytes, not {storage.count * size}"
            )
        return TensorEntry(
            storage.dtype,
            view.shape,
            begin + view.offset * size,
            begin + view.end * size,
            # Where there is one number or none, its stride says nothing and may be anything.
            tuple(step * size if count > 1 else size for count, step in zip(view.shape, view.strides, strict=True)),
        )
