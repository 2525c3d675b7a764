"""Finds the replica that has seen a prompt's beginning: hashes of leading blocks, and a ring for unseen prompts."""

from __future__ import annotations

import bisect
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_MAX_BLOCKS = 64
_MAX_ENTRIES = 1 << 16
_POINTS = 64


def prompt_text(body: Mapping[str, Any]) -> bytes:
    """Bytes of the prompt's beginning; equal prompts give equal bytes."""
    messages, prompt = body.get("messages"), body.get("prompt", body.get("input"))
    if messages is None and isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        messages = prompt  # items of /v1/responses
    if isinstance(messages, list):
        parts = [str(body[name]) for name in ("system", "instructions") if name in body]
        parts += [repr(body["tools"])] if body.get("tools") else []
        for message in messages:
            if isinstance(message, dict):
                parts.append(f"{message.get('role')}\n{message.get('content')}\n")
        return "".join(parts).encode("utf-8", "surrogatepass")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    text = prompt if isinstance(prompt, str) else repr(prompt)
    return text.encode("utf-8", "surrogatepass")


def block_hashes(text: bytes, block_bytes: int) -> list[bytes]:
    """Hash of each full leading block with all blocks before it, at most _MAX_BLOCKS. Without a full block: hash of the
    whole text."""
    chain = hashlib.blake2b(digest_size=8)
    hashes = []
    for end in range(block_bytes, min(len(text), _MAX_BLOCKS * block_bytes) + 1, block_bytes):
        chain.update(text[end - block_bytes : end])
        hashes.append(chain.digest())
    if not hashes:
        chain.update(text)
        hashes.append(chain.digest())
    return hashes


class Ring:
    """Consistent hashing: adding or removing a name moves only its own share of the keys."""

    def __init__(self, names: Collection[str]) -> None:
        points = sorted((_point(f"{name} {index}".encode()), name) for name in names for index in range(_POINTS))
        self._points = [point for point, _ in points]
        self._names = [name for _, name in points]

    def order(self, key: bytes) -> Iterator[str]:
        """All names in order of preference for the key."""
        told: set[str] = set()
        start = bisect.bisect(self._points, _point(key))
        for index in range(len(self._names)):
            name = self._names[(start + index) % len(self._names)]
            if name not in told:
                told.add(name)
                yield name


class PrefixTable:
    """The replica that last got a prompt with given leading blocks; the oldest entries are dropped."""

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._seen: OrderedDict[bytes, str] = OrderedDict()

    def find(self, hashes: Sequence[bytes]) -> str | None:
        """Name of the replica that has seen the longest beginning."""
        return next((name for one in reversed(hashes) if (name := self._seen.get(one)) is not None), None)

    def note(self, hashes: Sequence[bytes], name: str) -> None:
        """Records that the prompt was given to `name`."""
        for one in hashes:
            self._seen[one] = name
            self._seen.move_to_end(one)
        while len(self._seen) > self._max_entries:
            self._seen.popitem(last=False)

    def __len__(self) -> int:
        return len(self._seen)


def _point(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
