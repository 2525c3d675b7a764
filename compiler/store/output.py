"""Rules for overwriting an output: never foreign files; another artifact only on request."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.config import CompileError
from llmc.manifest import MAX_BYTES, MAX_COPIED_BYTES
from llmc.regular_file import parse_json, read_regular

if TYPE_CHECKING:
    # Readers of a cache need no numpy types of the compiler.
    from llmc.models.sources.base import ModelFiles

# Files besides those that the manifest lists.
CODE_FILES = frozenset({"kernels.cl", "kernels.cuda", "kernels.so"})
"""Code file names; an artifact has the one of its target."""
OWN_FILES = CODE_FILES | {"graphs.bin", "manifest.json", "weights.safetensors"}
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
# Manifest fields determined by the model and the options; the compiler determines the rest.
_ASKED_FOR = (
    "model", "target", "act_dtype", "kv_dtype", "max_model_len", "max_num_seqs", "block_size", "buckets", "weights",
    "tuned",
)  # fmt: skip


def is_artifact(path: Path) -> bool:
    """Whether `path` looks like an artifact; reads none of its files."""
    return (path / "graphs.bin").is_file() and (path / "manifest.json").is_file()


def check_output(output: Path) -> dict[str, Any] | None:
    """The manifest of the artifact at `output`; None if nothing is there.

    Raises CompileError if something else is there, or a file that the artifact's manifest does not list, because
    replacing the artifact would delete it.
    """
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return None
    if not is_artifact(output):
        raise CompileError(f"{output} exists and is not an llmc artifact; choose another -o or remove it")
    manifest = _manifest(output)
    # Whatever a manifest lists, llmc never writes other names.
    listed = OWN_FILES.union(manifest["files"]).intersection({*OWN_FILES, *COPIED_FILES})
    with os.scandir(output) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if entry.name not in listed or entry.is_dir(follow_symlinks=False):
                raise CompileError(
                    f"{output} holds {entry.name}, which the manifest of the artifact there does not list: move it "
                    "away or choose another -o"
                )
    return manifest


def _manifest(artifact: Path) -> dict[str, Any]:
    path = artifact / "manifest.json"
    try:
        manifest = parse_json(read_regular(path, MAX_BYTES))
        if isinstance(manifest, dict) and all(isinstance(name, str) for name in manifest["files"]):
            return manifest
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise CompileError(f"{path} does not say which files are the artifact's: choose another -o or remove {artifact}")


def refuse_another(
    output: Path, old: Mapping[str, Any] | None, new: Mapping[str, Any], files: ModelFiles | None = None
) -> None:
    """Raises CompileError if `old`, the manifest at `output`, has another model or other options than `new`.

    new: a manifest, as far as it is known. files: source of the tokenizer and generation files listed under "files" in
    `new`; None to ignore them.
    """
    if old is None:
        return
    # In the form in which it will be read back.
    now = json.loads(json.dumps(new, default=str))
    known = [name for name in (*_ASKED_FOR, "weights_crc32") if name in now and name in old]
    differ = [name for name in known if _differs(old[name], now[name])]
    if files is not None:
        gone_or_new = {*old["files"]} ^ {*now["files"]}
        changed = {name for name in {*old["files"]} - gone_or_new if _bytes(output / name) != _model_bytes(files, name)}
        differ += sorted(gone_or_new | changed)
    if differ:
        names = ", ".join("values of weights" if name == "weights_crc32" else name for name in differ)
        raise CompileError(
            f"{output} is an artifact of another model or other options ({names} differ): add --overwrite to replace "
            "it, or choose another -o"
        )


def _differs(old: object, new: object) -> bool:
    """Compares fields that both compiler versions know."""
    if isinstance(old, dict) and isinstance(new, dict):
        return any(old[name] != new[name] for name in old.keys() & new.keys()) or not old.keys() & new.keys()
    return old != new


def _model_bytes(files: ModelFiles, name: str) -> bytes | None:
    try:
        with files.open(name) as file:
            return file.read(MAX_COPIED_BYTES)
    except OSError:
        return None


def _bytes(file: Path) -> bytes | None:
    try:
        return read_regular(file, MAX_COPIED_BYTES)
    except OSError:
        return None
