"""The tensors of a directory: one file or the shards of an index, as safetensors or as torch saves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.mistaken_path import single_files
from llmc.models.brief import brief, brief_name
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.files import has_file
from llmc.models.sources.base import ArrayTensor, Checkpoint
from llmc.models.sources.safetensors import SafetensorsFile
from llmc.models.sources.tensor_file import AGAIN, TensorEntry, TensorFile
from llmc.models.sources.torch_file import TorchFile
from llmc.quantize.checkpoints import StoredTensor

_MAX_INDEX_BYTES = 16 << 20
_MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class WeightFormat:
    """suffix: of every file. single: the only file's name. index: the name of the list of several. open: reads one."""

    suffix: str
    single: str
    index: str
    open: Callable[[Path], TensorFile]


def _format(suffix: str, single: str, open: Callable[[Path], TensorFile]) -> WeightFormat:
    return WeightFormat(suffix, single, f"{single}.index.json", open)


SAFETENSORS = _format(".safetensors", "model.safetensors", SafetensorsFile)
TORCH = _format(".bin", "pytorch_model.bin", TorchFile)
"""The formats; safetensors is taken where a directory has both."""


def is_shard_name(name: object, of: WeightFormat) -> bool:
    """Whether an index may name this file. NUL and lone surrogates, impossible in paths, are not printable."""
    return (
        isinstance(name, str)
        and Path(name).name == name != ""
        and name.isprintable()
        and len(name.encode()) <= _MAX_NAME_BYTES
        and name.endswith(of.suffix)
    )


def format_of(folder: Path) -> WeightFormat | None:
    """The format of a directory's weights; None if it has none. Raises ModelError if something else has their name."""
    for one in (SAFETENSORS, TORCH):
        if has_file(folder / one.single) or has_file(folder / one.index):
            return one
    return None


def weight_files(folder: Path) -> Iterator[Path]:
    """All files that may hold a directory's tensors, sorted by name."""
    found = format_of(folder)
    yield from sorted(folder.glob(f"*{(found or SAFETENSORS).suffix}"))


class FolderCheckpoint(Checkpoint):
    """The tensors of a checkpoint directory. Opening reads no tensor.

    Raises ModelError on a missing, truncated or corrupt file.
    """

    config_name = "config.json"

    def __init__(self, path: Path) -> None:
        self.path = path
        found = format_of(path)
        if found is None and (others := single_files(path)) is not None:
            raise ModelError(f"{path} has no weights of safetensors or torch, but {others}")
        if found is None:
            raise ModelError(
                f"{path} holds neither {SAFETENSORS.single} nor {SAFETENSORS.index} nor {TORCH.single}; {AGAIN}"
            )
        single = path / found.single
        if has_file(single):
            file = found.open(single)
            self._files = dict.fromkeys(file.entries, file)
        else:
            self._files = self._open_shards(path / found.index, found)

    def _open_shards(self, index: Path, of: WeightFormat) -> dict[str, TensorFile]:
        table = Fields.read(index, _MAX_INDEX_BYTES).raw("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise ModelError(f"{index}: weight_map is not an object of file names; {AGAIN}")
        shards: dict[str, TensorFile] = {}
        for file_name in sorted(set(table.values())):
            if not is_shard_name(file_name, of):
                raise ModelError(
                    f"{index}: shard {brief(file_name)} is not a plain file name that ends in {of.suffix}; {AGAIN}"
                )
            shards[file_name] = of.open(self.path / file_name)
        # A tensor known only to a shard is listed as well, so that the weight map can reject it.
        files = {name: shard for shard in shards.values() for name in shard.entries}
        for name, file_name in table.items():
            if name not in shards[file_name].entries:
                raise ModelError(
                    f"{shards[file_name].path} lacks the tensor {brief_name(name)} that {index.name} places in it; "
                    f"{AGAIN}"
                )
            files[name] = shards[file_name]
        return files

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._files))

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._files:
            raise ModelError(f"{self.path} lacks the tensor {name}")
        return self._files[name].entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype.lower()

    def check_dtype(self, name: str) -> None:
        self._entry(name)
        self._files[name].check_dtype(name)

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """All tensors by name, as bits; reads only headers."""
        return {name: file.stored(name) for name, file in self._files.items()}

    def tensor(self, name: str) -> ArrayTensor:
        """A read-only view of the mapped file."""
        self._entry(name)
        return self._files[name].load(name)

    def release(self) -> None:
        for file in set(self._files.values()):
            file.release()
