"""Bucket use while serving, read from a saved copy of a server's /metrics."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmc.buckets.bucket import TOTAL, Bucket, BucketError
from llmc.buckets.misses import Miss
from llmc.buckets.trace_text import STDIN
from llmc.regular_file import open_regular, read_text
from llmc.shown import shown

_SAMPLE = re.compile(r"(llmc_bucket_[a-z_]+?)_total\{([^}]*)\} (\S+)(?: \S+)?")
_LABEL = re.compile(r'([a-z]+)="([^"]*)"')
_MAX_FILE_BYTES = 1 << 26
_BEGINNING_BYTES = 1 << 10
_FIELDS = {
    "llmc_bucket_replays": "replays",
    "llmc_bucket_tokens": "tokens",
    "llmc_bucket_padding_tokens": "padded",
    "llmc_bucket_replay_seconds": "seconds",
    "llmc_bucket_padding_seconds": "padding_s",
}


@dataclass(frozen=True)
class BucketUse:
    """One bucket over a server's life. tokens, padded: rows with and without a token. seconds: of its replays.
    padding_s: the part of these that padding rows took."""

    bucket: Bucket
    replays: float = 0.0
    tokens: float = 0.0
    padded: float = 0.0
    seconds: float = 0.0
    padding_s: float = 0.0

    @property
    def padding(self) -> float:
        """Share of rows that are padding, 0 … 1."""
        rows = self.tokens + self.padded
        return self.padded / rows if rows else 0.0


def looks_like_metrics(path: Path) -> bool:
    """Whether the file begins like the text of /metrics. stdin can be read only once and counts as a trace.

    Raises BucketError if it cannot be read.
    """
    if path == STDIN:
        return False
    try:
        with open_regular(path) as file:
            return file.read(_BEGINNING_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"#"
    except OSError as error:
        raise BucketError(f"cannot read {path}: {error.strerror or error}") from error


def read_bucket_use(path: Path) -> list[BucketUse]:
    """Every bucket in a saved /metrics, sorted. Raises BucketError if there are none."""
    found: dict[Bucket, dict[str, float]] = {}
    for name, labels, value in _samples(path):
        if name in _FIELDS:
            bucket = _bucket(labels)
            found.setdefault(bucket, {})[_FIELDS[name]] = value
    if not found:
        raise BucketError(f"{path} has no bucket counters: save /metrics of llmc serve, or give a trace")
    return [BucketUse(bucket, **found[bucket]) for bucket in sorted(found)]


def _bucket(labels: dict[str, str]) -> Bucket:
    seq = labels.get("seq", "")
    total = seq.endswith(TOTAL)
    number = _number({"seq": seq.removesuffix(TOTAL)}, "seq")
    return Bucket(labels.get("phase", ""), _number(labels, "batch"), number, total)


def read_missed(path: Path, block_size: int) -> list[Miss]:
    """The missed shapes in a saved /metrics, dated by the file's time. Raises BucketError."""
    time = path.stat().st_mtime
    return [
        Miss(time, labels.get("phase", ""), _number(labels, "sequences"), _number(labels, "tokens"),
             _number(labels, "blocks") * block_size, None, int(value))
        for name, labels, value in _samples(path)
        if name == "llmc_bucket_misses_by_shape" and value >= 1
    ]  # fmt: skip


def _samples(path: Path) -> Iterable[tuple[str, dict[str, str], float]]:
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.startswith("llmc_bucket_") or "{" not in line:
            continue
        match = _SAMPLE.fullmatch(line.strip())
        try:
            if match is not None:
                value = float(match[3])
                if not 0 <= value < 1 << 62:
                    raise BucketError(f"it is {shown(match[3])}")
                yield match[1], dict(_LABEL.findall(match[2])), value
        except (BucketError, ValueError) as error:
            raise BucketError(
                f"{path}:{number}: {line[:60]!r} is not a sample of a bucket: {str(error)[:200]}"
            ) from None


def _number(labels: dict[str, str], name: str) -> int:
    text = labels.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BucketError(f"a sample of a bucket has {name} {shown(text)}: save /metrics again")
    return int(text)


def _read(path: Path) -> str:
    try:
        return read_text(path, _MAX_FILE_BYTES).lstrip()
    except OSError as error:
        raise BucketError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BucketError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_acceptance(path: Path) -> float:
    """The share of judged guesses that were right, in a saved /metrics: the odds of a guess if those before it are
    right. Raises BucketError if no guess was judged."""
    counts = {"llmc_accepted_tokens_total": 0.0, "llmc_judged_tokens_total": 0.0}
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name in counts:
            try:
                counts[name] = float(value.split()[0])
            except (ValueError, IndexError):
                raise BucketError(f"{path} has {shown(line[:60])}, which is no sample: save /metrics again") from None
    right, judged = counts.values()
    if not 0 <= right <= judged or not 0 < judged < 1 << 62:
        raise BucketError(
            f"{path} tells of no guesses: save /metrics of a server that ran with --speculate, or give a number"
        )
    return right / judged
