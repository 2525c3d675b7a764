"""Content-addressed cache of compiled kernels and other blobs.

An entry is one file, `ROOT/v1/KK/KEY.entry`: magic, u32 header length, a JSON header (components, meta, payload
bytes), the payload, and the SHA-256 of all of that. Its name is the hash of its components, so nothing about a path,
a host or the environment can leak into it. Files appear by rename, so a reader sees a whole entry or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import struct
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from llmc.regular_file import open_regular, parse_json, read_regular

_MAGIC = b"LLMCENT1"
_PREFIX = struct.Struct("<8sI")
_DIGEST_BYTES = 32
_MAX_HEADER_BYTES = 16 << 20
_MAX_ENTRY_BYTES = 1 << 32
_NAME = re.compile(r"([0-9a-f]{64})\.entry")
_KEY = re.compile(r"[0-9a-f]{64}")
_STALE_TEMPORARY_S = 3600.0
_TAR_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, IndexError, OverflowError, struct.error)


class CacheError(RuntimeError):
    """The cache cannot serve a call: unwritable directory, full disk, bad key or bad archive."""


class _Damaged(Exception):
    pass


@dataclass(frozen=True)
class Entry:
    """An entry's header. file_bytes: on disk. last_used: seconds since the epoch."""

    key: str
    components: dict[str, str]
    meta: dict[str, Any]
    payload_bytes: int
    file_bytes: int
    last_used: float


@dataclass(frozen=True)
class Difference:
    """A component whose value is `old` in the cached entry and `new` now; None where one side lacks it."""

    name: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class Nearest:
    """The cached entry that shares most components with the requested ones; without differences, an exact hit."""

    entry: Entry
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class VerifyReport:
    """Entries read, keys of damaged ones, which were dropped, and of those that could not be read or dropped."""

    checked: int
    damaged: tuple[str, ...]
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImportReport:
    """Keys that an archive added, and keys already present."""

    added: tuple[str, ...]
    present: tuple[str, ...]


def key_of(components: Mapping[str, str]) -> str:
    """SHA-256, 64 hex digits, of the canonical JSON of named components. Raises CacheError for a non-string."""
    if not components:
        raise CacheError("a cache key needs at least one component")
    for name, value in components.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise CacheError(f"cache component {name!r} is {value!r}; names and values must be strings")
    return hashlib.sha256(_canonical(dict(components))).hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _encode(payload: bytes, components: Mapping[str, str], meta: Mapping[str, Any]) -> bytes:
    header = {"components": dict(components), "meta": dict(meta), "payload_bytes": len(payload)}
    try:
        text = _canonical(header)
    except (TypeError, ValueError) as error:
        raise CacheError(f"the meta data of a cache entry must be plain JSON: {error}") from None
    if len(text) > _MAX_HEADER_BYTES:
        raise CacheError(f"the header of a cache entry takes {len(text)} bytes, at most {_MAX_HEADER_BYTES} fit")
    body = _PREFIX.pack(_MAGIC, len(text)) + text + payload
    return body + hashlib.sha256(body).digest()


def _decode_header(raw: bytes, key: str) -> tuple[dict[str, str], dict[str, Any], int, int]:
    """Components, meta, payload bytes and payload offset from the first bytes of an entry."""
    if len(raw) < _PREFIX.size:
        raise _Damaged
    magic, length = _PREFIX.unpack_from(raw)
    start = _PREFIX.size + length
    if magic != _MAGIC or length > _MAX_HEADER_BYTES or start > len(raw):
        raise _Damaged
    try:
        header = parse_json(raw[_PREFIX.size : start])
        components, meta, size = header["components"], header["meta"], header["payload_bytes"]
        if not isinstance(components, dict) or not isinstance(meta, dict) or type(size) is not int or size < 0:
            raise _Damaged
        if key_of(components) != key:
            raise _Damaged
    except (ValueError, KeyError, TypeError, CacheError):
        raise _Damaged from None
    return components, meta, size, start


def _decode(raw: bytes, key: str) -> tuple[bytes, dict[str, str], dict[str, Any]]:
    components, meta, size, start = _decode_header(raw, key)
    end = start + size
    if end + _DIGEST_BYTES != len(raw) or hashlib.sha256(memoryview(raw)[:end]).digest() != raw[end:]:
        raise _Damaged
    return raw[start:end], components, meta


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, fsync, rename. Raises OSError; never leaves a partial file under `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise


class GraphCache:
    """The cache under `root`; the directory is made by the first `put`. Safe for concurrent processes."""

    key_of = staticmethod(key_of)

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._base = self.root / "v1"

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise CacheError(f"{key!r} is not a cache key (64 hex digits); `llmc cache ls` lists them")
        return self._base / key[:2] / f"{key}.entry"

    def _files(self) -> Iterator[tuple[str, Path]]:
        """(key, path) of every file named and placed like an entry, in order of keys."""
        for shard in self._listing(self._base):
            for path in self._listing(shard):
                match = _NAME.fullmatch(path.name)
                if match and match[1][:2] == shard.name:
                    yield match[1], path

    @staticmethod
    def _listing(folder: Path) -> list[Path]:
        try:
            return sorted(folder.iterdir())
        except OSError:
            return []

    def get(self, key: str) -> bytes | None:
        """The payload of `key`, marked as used; None on a miss. A damaged entry is dropped and counts as a miss."""
        path = self._path(key)
        try:
            raw = read_regular(path, _MAX_ENTRY_BYTES)
        except OSError:
            return None
        try:
            payload, _, _ = _decode(raw, key)
        except _Damaged:
            _unlink(path)
            return None
        # A read-only cache still serves.
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload

    def has(self, key: str) -> bool:
        """Whether an entry of `key` exists, valid or not; does not mark it as used."""
        return self._path(key).is_file()

    def put(self, key: str, payload: bytes, components: Mapping[str, str], meta: Mapping[str, Any]) -> None:
        """Stores `payload` under `key`, which must be `key_of(components)`. meta: plain JSON data for display.

        Raises CacheError if the entry cannot be written (full disk, permissions), and leaves nothing behind.
        """
        if key_of(components) != key:
            raise CacheError(f"cache key {key} is not the hash of its components {dict(components)}")
        self._store(self._path(key), _encode(payload, components, meta))

    def _store(self, path: Path, data: bytes) -> None:
        try:
            _write_atomically(path, data)
        except OSError as error:
            raise CacheError(
                f"cannot write cache entry {path}: {_reason(error)}; free some space (`llmc cache gc`) or set "
                "LLMC_CACHE_DIR to a writable directory"
            ) from None

    def _read_entry(self, key: str, path: Path) -> Entry | None:
        try:
            with open_regular(path) as file:
                info = os.fstat(file.fileno())
                prefix = file.read(_PREFIX.size)
                if len(prefix) == _PREFIX.size:
                    prefix += file.read(min(_PREFIX.unpack(prefix)[1], _MAX_HEADER_BYTES))
            components, meta, size, start = _decode_header(prefix, key)
        except (OSError, _Damaged):
            return None
        if start + size + _DIGEST_BYTES != info.st_size:
            return None
        return Entry(key, components, meta, size, info.st_size, info.st_mtime)

    def entries(self) -> list[Entry]:
        """All readable entries, in order of keys. Payloads are not verified; junk is skipped."""
        return [e for key, path in self._files() if (e := self._read_entry(key, path)) is not None]

    def entry(self, key: str) -> Entry | None:
        """The header of entry `key`, or None. Does not count as a use."""
        return self._read_entry(key, self._path(key))

    def resolve(self, prefix: str) -> str:
        """The only key that starts with `prefix`. Raises CacheError if there is none or more than one."""
        if not re.fullmatch(r"[0-9a-f]{1,64}", prefix):
            raise CacheError(f"{prefix!r} is not a cache key or the start of one (hex digits)")
        found = [key for key, _ in self._files() if key.startswith(prefix)]
        if not found:
            raise CacheError(f"no cache entry starts with {prefix!r} in {self.root}; `llmc cache ls` lists them")
        if len(found) > 1:
            raise CacheError(f"{len(found)} cache entries start with {prefix!r}; give more digits")
        return found[0]

    def verify(self) -> VerifyReport:
        """Reads every entry in full and drops the damaged ones."""
        checked = 0
        damaged: list[str] = []
        unreadable: list[str] = []
        for key, path in self._files():
            try:
                _decode(read_regular(path, _MAX_ENTRY_BYTES), key)
            except FileNotFoundError:
                continue  # collected by another process meanwhile
            except (OSError, _Damaged):
                # A file on a bad sector may be dropped too: it will be rebuilt.
                (damaged if _unlink(path) else unreadable).append(key)
            checked += 1
        return VerifyReport(checked, tuple(damaged), tuple(unreadable))

    def removable(self) -> list[tuple[float, str, int, Callable[[], bool]]]:
        """(last use, key, bytes, function that removes it) of all entries."""
        found: list[tuple[float, str, int, Callable[[], bool]]] = []
        for key, path in self._files():
            with contextlib.suppress(OSError):
                info = path.stat()
                found.append((info.st_mtime, key, info.st_size, partial(_unlink, path)))
        return found

    def drop_stale_temporaries(self) -> None:
        """Removes leftovers of interrupted writers."""
        now = time.time()
        for shard in self._listing(self._base):
            for path in self._listing(shard):
                try:
                    # A recent one may belong to an active writer.
                    if path.name.startswith(".tmp-") and now - path.stat().st_mtime > _STALE_TEMPORARY_S:
                        path.unlink()
                except OSError:
                    continue

    def export(self, keys: Iterable[str] | None, path: Path) -> int:
        """Writes the entries `keys` (None: all) to the tar archive `path`; returns their number. Raises CacheError."""
        chosen = sorted(set(keys)) if keys is not None else [key for key, _ in self._files()]
        buffer = BytesIO()
        count = 0
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for key in chosen:
                try:
                    raw = read_regular(self._path(key), _MAX_ENTRY_BYTES)
                    _decode(raw, key)
                except (OSError, _Damaged):
                    if keys is None:
                        continue
                    raise CacheError(f"cache entry {key} is missing or damaged; nothing was exported") from None
                info = tarfile.TarInfo(f"{key}.entry")
                info.size = len(raw)
                tar.addfile(info, BytesIO(raw))
                count += 1
        try:
            _write_atomically(Path(path), buffer.getvalue())
        except OSError as error:
            raise CacheError(f"cannot write {path}: {_reason(error)}") from None
        return count

    def import_(self, path: Path) -> ImportReport:
        """Adds the entries of an archive from `export`. Raises CacheError, and adds none, if any member is invalid."""
        found: dict[str, bytes] = {}
        try:
            # Only uncompressed, non-sparse members: what is read cannot exceed the archive's size.
            with open_regular(Path(path)) as archive, tarfile.open(fileobj=archive, mode="r:") as tar:
                limit = os.fstat(archive.fileno()).st_size
                for member in tar:
                    match = _NAME.fullmatch(member.name)
                    if not match or not member.isreg() or member.issparse() or member.size > limit:
                        raise CacheError(f"{path} is not a cache archive: unexpected member {member.name!r}")
                    file = tar.extractfile(member)
                    raw = file.read() if file else b""
                    _decode(raw, match[1])
                    found[match[1]] = raw
        except _Damaged:
            raise CacheError(f"{path} holds a damaged entry, {match[1] if match else '?'}; nothing was added") from None
        except _TAR_ERRORS as error:
            raise CacheError(f"cannot read the cache archive {path}: {_reason(error)}") from None
        added: list[str] = []
        present: list[str] = []
        for key, raw in sorted(found.items()):
            (added if self._promote(key, raw) else present).append(key)
        return ImportReport(tuple(added), tuple(present))

    def copy_from(self, other: GraphCache, keys: Iterable[str] | None = None) -> ImportReport:
        """Adds the entries `keys` (None: all) of another cache, which other processes and machines may share.

        Each entry appears atomically; damaged ones are skipped. Raises CacheError; entries added before stay.
        """
        added: list[str] = []
        present: list[str] = []
        with self._locked():
            for key in sorted(set(keys)) if keys is not None else [key for key, _ in other._files()]:
                try:
                    raw = read_regular(other._path(key), _MAX_ENTRY_BYTES)
                    _decode(raw, key)
                except (OSError, _Damaged):
                    if keys is None:
                        continue
                    raise CacheError(f"cache entry {key} is missing or damaged in {other.root}") from None
                (added if self._promote(key, raw) else present).append(key)
        return ImportReport(tuple(added), tuple(present))

    def _promote(self, key: str, raw: bytes) -> bool:
        """Stores an entry that is missing or damaged here; False if a valid one is present."""
        path = self._path(key)
        with contextlib.suppress(OSError, _Damaged):
            _decode(read_regular(path, _MAX_ENTRY_BYTES), key)
            return False
        self._store(path, raw)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other processes if the file system has locks, so that concurrent writers store an entry once.

        Correctness does not depend on it. The lock ends with its process.
        """
        try:
            self._base.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._base, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise CacheError(f"cannot write to the cache {self.root}: {_reason(error)}") from None
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def why(self, components: Mapping[str, str], entries: Sequence[Entry] | None = None) -> Nearest | None:
        """The entry that differs from `components` in the fewest names, with the differences; None if the cache is
        empty.

        entries: those to search; None reads all. Passing them lets many queries read the directory once.
        """
        best: Nearest | None = None
        best_rank: tuple[int, bool, float, str] | None = None
        for entry in self.entries() if entries is None else entries:
            names = sorted(set(components) | set(entry.components))
            differences = tuple(
                Difference(n, entry.components.get(n), components.get(n))
                for n in names
                if entry.components.get(n) != components.get(n)
            )
            # Among equally near entries prefer the same kind, then the most recently used.
            other_kind = entry.components.get("kind") != components.get("kind")
            rank = (len(differences), other_kind, -entry.last_used, entry.key)
            if best_rank is None or rank < best_rank:
                best, best_rank = Nearest(entry, differences), rank
        return best
