"""The inputs of an output file of `llmc run`: stored beside it, and compared before resuming."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmc.peft_format import CONFIG, WEIGHTS
from llmc.runtime.images.image_file import ImageFile
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.messages import without_images
from llmc.runtime.images.sources import from_python
from llmc.runtime.offline.prompts import Prompt
from llmc.runtime.params import SamplingParams

_FILES = ("manifest.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def run_identity(
    artifact: Path,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    chat: bool,
    lora: Mapping[str, Path] | None = None,
    images: Path | None = None,
) -> dict[str, Any]:
    """Everything that determines the results, as JSON data. With greedy sampling or a seed, equal identities give equal
    results.

    lora: adapter directories by name. images: artifact that encodes images. Raises OSError for an unreadable one, and
    ImageError for an image.
    """
    hashed = hashlib.sha256()
    for prompt in prompts:
        hashed.update(json.dumps(prompt.as_record(), sort_keys=True).encode() + b"\n")
        for image in _images(prompt):
            hashed.update(hashlib.sha256(image).digest())
    identity = {
        "artifact": _artifact_digest(artifact),
        "chat": chat,
        "sampling": asdict(params),
        "prompts": {"count": len(prompts), "sha256": hashed.hexdigest()},
        **({} if images is None else {"images": _artifact_digest(images)}),
        **({"lora": {name: _adapter_digest(path) for name, path in lora.items()}} if lora else {}),
    }
    # In the form in which it is read back: tuples as lists, keys as strings.
    result: dict[str, Any] = json.loads(json.dumps(identity))
    return result


def difference(before: Any, now: Mapping[str, Any]) -> str | None:
    """The first difference between two identities, as in "temperature 0.7 and this run has 0.2"; None if there is
    none."""
    if before == now:
        return None
    if not isinstance(before, Mapping):
        return "settings that cannot be read"
    if before.get("artifact") != now["artifact"]:
        return f"artifact {str(before.get('artifact'))[:12]} and this run has {now['artifact'][:12]}"
    if before.get("images") != now.get("images"):
        return "another artifact for images"
    if before.get("chat") != now["chat"]:
        return "--chat and this run has none" if before.get("chat") else "no --chat and this run has it"
    if before.get("lora") != now.get("lora"):
        return "other adapters"
    sampling = before.get("sampling")
    known = sampling if isinstance(sampling, Mapping) else {}
    for name, value in now["sampling"].items():
        if known.get(name) != value:
            return f"{name} {json.dumps(known.get(name))} and this run has {json.dumps(value)}"
    prompts = before.get("prompts")
    count = prompts.get("count") if isinstance(prompts, Mapping) else None
    if count != now["prompts"]["count"]:
        return f"{count} prompts and this run has {now['prompts']['count']}"
    return "other prompts"


def _images(prompt: Prompt) -> Iterator[bytes]:
    """The bytes of its images, also of those in its messages."""
    limits = ImageLimits()
    for image in (*prompt.images, *without_images(prompt.messages or ())[1]):
        given = from_python(image, limits)
        yield given.read(limits) if isinstance(given, ImageFile) else given


def _adapter_digest(path: Path) -> str:
    hashed = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (path / name).open("rb") as file:
            hashed.update(hashlib.file_digest(file, "sha256").digest())
    return hashed.hexdigest()


def _artifact_digest(artifact: Path) -> str:
    """Hash of what an artifact computes. Large weights are represented by their header and 64 pages."""
    hashed = hashlib.sha256()
    for name in _FILES:
        file = artifact / name
        content = file.read_bytes() if file.is_file() else b""
        hashed.update(f"{name} {len(content)}\n".encode() + content)
    weights = artifact / "weights.safetensors"
    size = weights.stat().st_size
    hashed.update(f"{size}\n".encode())
    with weights.open("rb") as file_:
        for i in range(_NUM_SAMPLES):
            file_.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
            hashed.update(file_.read(_SAMPLE_BYTES))
    return hashed.hexdigest()
