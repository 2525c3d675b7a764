"""Buckets that a server has retired, in a file beside its artifact, so that they stay off at the next start."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from llmc.buckets.bucket import Bucket, BucketError, area
from llmc.buckets.replanning.shapes import Limits
from llmc.replaced_file import write_replaced

_KIND, _VERSION = "llmc retired buckets", 1


class RetiredBuckets:
    """path: of the file, which exists while there are such buckets. Deleting it restores all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def beside(cls, artifact: Path) -> RetiredBuckets:
        """`llama.llmc.retired.json` beside `llama.llmc`."""
        where = artifact.resolve()
        return cls(where.with_name(f"{where.name}.retired.json"))

    def read(self) -> frozenset[Bucket]:
        """Empty if there is no readable file: then all buckets are in use."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or (found.get("kind"), found.get("version")) != (_KIND, _VERSION):
                return frozenset()
            return frozenset(Bucket.parse(text) for text in found["retired"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, BucketError):
            return frozenset()

    def write(self, buckets: Iterable[Bucket]) -> None:
        """Replaces the file atomically. Raises OSError."""
        names = [str(bucket) for bucket in sorted(buckets)]
        if not names:
            self.path.unlink(missing_ok=True)
            return
        write_replaced(self.path, json.dumps({"kind": _KIND, "version": _VERSION, "retired": names}) + "\n")


def spared(wanted: Iterable[Bucket], others: Iterable[Bucket], limits: Limits) -> frozenset[Bucket]:
    """Those of `wanted` that may be off: one of the others, or of those kept, holds everything they hold."""
    on, off = list(others), set[Bucket]()
    for bucket in sorted(wanted, key=lambda b: (-area(b, limits.block_size), b)):
        off.add(bucket) if any(limits.covers(one, bucket) for one in on) else on.append(bucket)
    return frozenset(off)
