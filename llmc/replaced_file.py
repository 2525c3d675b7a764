"""Files that are written whole or not at all, in place of what had their name."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields the name of a new file, which takes the place of `path` when the block ends, and is removed if it raises.

    A link stays, and its target is replaced. What is no regular file, such as a device or a pipe, is written itself.
    Raises OSError.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        yield real
        return
    new = real.with_name(f".{real.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield new
        new.replace(real)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def write_replaced(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers and crashes see the old one or the new one; a text as UTF-8. Raises OSError."""
    with replaced(path) as new, new.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        with contextlib.suppress(OSError):  # a pipe has no disk
            os.fsync(file.fileno())
