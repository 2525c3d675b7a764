"""Which artifacts prefill and decode replicas can share the work of."""

from __future__ import annotations

from pathlib import Path

from llmc.manifest import ManifestError, read_manifest


def has_roles(artifact: Path) -> bool:
    """Whether KV blocks of an artifact are handed over: not those of models that give vectors, nor of ranks.

    True if its manifest cannot be read: the replica says what is wrong, or compiles the model.
    """
    try:
        manifest = read_manifest(artifact)
    except ManifestError:
        return True
    obstacles = (manifest.get("model") or {}).get("task"), *map(manifest.get, ("tensor_parallel", "pipeline_parallel"))
    return not any(obstacles)
