"""The buckets that a server has retired, in a file beside its artifact, so that they stay so at the next start."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from llmc.buckets.bucket import Bucket, BucketError

_KIND, _VERSION = "llmc retired buckets", 1


class RetiredBuckets:
    """path: of the file, which is there as long as there is such a bucket. Who deletes it has all buckets back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def beside(cls, artifact: Path) -> RetiredBuckets:
        """`llama.llmc.retired.json` beside `llama.llmc`."""
        where = artifact.resolve()
        return cls(where.with_name(f"{where.name}.retired.json"))

    def read(self) -> frozenset[Bucket]:
        """None where there is no file, or none that can be read: then all buckets are in use."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or (found.get("kind"), found.get("version")) != (_KIND, _VERSION):
                return frozenset()
            return frozenset(Bucket.parse(text) for text in found["retired"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, BucketError):
            return frozenset()

    def write(self, buckets: Iterable[Bucket]) -> None:
        """Replaces the file in one step. Raises OSError."""
        names = [str(bucket) for bucket in sorted(buckets)]
        if not names:
            self.path.unlink(missing_ok=True)
            return
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        fresh.write_text(json.dumps({"kind": _KIND, "version": _VERSION, "retired": names}) + "\n", encoding="utf-8")
        fresh.replace(self.path)


def spared(wanted: Iterable[Bucket], others: Iterable[Bucket]) -> frozenset[Bucket]:
    """Those of `wanted` that need not be on: one of the others, or of those that stay, holds all that they hold."""
    on, off = list(others), set[Bucket]()
    for bucket in sorted(wanted, key=lambda b: (-b.batch * b.seq, b)):
        held = any(o.phase == bucket.phase and o.batch >= bucket.batch and o.seq >= bucket.seq for o in on)
        off.add(bucket) if held else on.append(bucket)
    return frozenset(off)
