"""A model split over several GGUF files, MODEL-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from pathlib import Path

from llmc.models.brief import brief_name
from llmc.models.errors import ModelError
from llmc.models.sources.gguf.header import GgufFile

_NAME = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_MAX_SHARDS = 99_999


def shard_paths(path: Path) -> tuple[Path, ...]:
    """Files of the model whose first file is `path`, according to its name; `path` alone if it is not numbered."""
    found = _NAME.fullmatch(path.name)
    if found is None or int(found["number"]) != 1:
        return (path,)
    count = int(found["count"])
    return tuple(path.with_name(f"{found['model']}-{i:05}-of-{count:05}.gguf") for i in range(1, max(1, count) + 1))


def open_shards(path: Path) -> tuple[GgufFile, ...]:
    """The files of the model at `path`, in order. Raises ModelError if one is missing or foreign."""
    first = GgufFile(path, followed=True)
    count = first.metadata.integer(_COUNT, 1, minimum=0, maximum=_MAX_SHARDS)
    if count <= 1:
        return (first,)
    number = first.metadata.integer(_NUMBER, 0, minimum=0, maximum=_MAX_SHARDS)
    if number != 0:
        raise ModelError(
            f"{path} is file {number + 1} of {count} of a split model: give the first one, whose name ends in "
            f"-00001-of-{count:05}.gguf"
        )
    paths = shard_paths(path)
    if len(paths) != count:
        raise ModelError(
            f"{path}: metadata {_COUNT} is {count}, so its name must end in -00001-of-{count:05}.gguf, with the other "
            "files beside it"
        )
    files = (first, *(GgufFile(shard) for shard in paths[1:]))
    for index, file in enumerate(files):
        found_count = file.metadata.integer(_COUNT, 0, minimum=0)
        found_number = file.metadata.integer(_NUMBER, 0, minimum=0)
        if (found_count, found_number) != (count, index):
            raise ModelError(
                f"{file.path} says that it is file {found_number + 1} of {found_count}, not {index + 1} of {count}; "
                "download it again"
            )
    _check_tensors(files)
    return files


def _check_tensors(files: tuple[GgufFile, ...]) -> None:
    seen: dict[str, Path] = {}
    for file in files:
        for name in file.tensors:
            if name in seen:
                raise ModelError(
                    f"tensor {brief_name(name)} is both in {seen[name]} and in {file.path}; download both files again"
                )
            seen[name] = file.path
    expected = files[0].metadata.integer(_TENSORS, len(seen), minimum=0)
    if len(seen) != expected:
        raise ModelError(
            f"{files[0].path}: metadata {_TENSORS} is {expected}, and its {len(files)} files have {len(seen)} tensors; "
            "download them again"
        )
