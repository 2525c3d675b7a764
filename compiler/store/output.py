"""What may be written over at an output: nothing of other people, and no other artifact unless that is asked for."""

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
    # Whoever reads a cache needs no numpy types of the compiler.
    from llmc.models.sources.base import ModelFiles

# Beside the files that the manifest lists.
CODE_FILES = frozenset({"kernels.cl", "kernels.cuda", "kernels.so"})
"""Of which an artifact has the one of its target."""
OWN_FILES = CODE_FILES | {"graphs.bin", "manifest.json", "weights.safetensors"}
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
# Of the manifest, what the model and the options decide; the rest is the compiler's.
_ASKED_FOR = (
    "model", "target", "act_dtype", "kv_dtype", "max_model_len", "max_num_seqs", "block_size", "buckets", "weights",
    "tuned",
)  # fmt: skip


def is_artifact(path: Path) -> bool:
    """Whether `path` looks like an artifact; nothing in it is read."""
    return (path / "graphs.bin").is_file() and (path / "manifest.json").is_file()


def check_output(output: Path) -> dict[str, Any] | None:
    """The manifest of the artifact at `output`, None where nothing is.

    Raises CompileError when something else is there, or anything that the artifact's manifest does not list: it would
    be gone with the artifact.
    """
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return None
    if not is_artifact(output):
        raise CompileError(f"{output} exists and is not an llmc artifact; choose another -o or remove it")
    manifest = _manifest(output)
    # Whatever a manifest says, nothing else is ever written there.
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
    """Raises CompileError when `old`, the manifest at `output`, is of another model or other options than `new`.

    new: a manifest, or as much of it as is known. files: where tokenizer and generation files are copied from,
    by the names under "files" of `new`; None: they are not looked at.
    """
    if old is None:
        return
    # As it will be read back.
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
    """Of two versions of the compiler one may know fields that the other does not."""
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
