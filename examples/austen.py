"""The novels of Jane Austen (1811-1818, public domain) as passages of text.

They come from the Debian package ``r-cran-janeaustenr``, which is read without R.
"""

import hashlib
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
VERSION = "1.0.0-1"
DATABASE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
CORPUS_SHA256 = "d8036a4b1f33871556368e388bd5350d8924f5e0a8f6d46e8804f822fb294387"

# A passage takes consecutive paragraphs until it has this many characters.
PASSAGE_CHARS = 240
# One block of passages in every HELD_OUT_EVERY is kept for evaluation.
BLOCK, HELD_OUT_EVERY = 20, 32


def fetch_package(directory: Path) -> Path:
    """Download the pinned package with apt."""
    subprocess.run(["apt-get", "download", f"{PACKAGE}={VERSION}"], cwd=directory, check=True)
    return next(directory.glob(f"{PACKAGE}_*.deb"))


def read_database(deb: Path, directory: Path) -> bytes:
    subprocess.run(["dpkg-deb", "-x", str(deb), str(directory)], check=True)
    return (directory / DATABASE).read_bytes()


def r_strings(data: bytes) -> list[str]:
    """Read one serialized R character vector (XDR format, version 2 or 3)."""
    if data[:2] != b"X\n":
        raise ValueError("not an XDR serialization")
    pos = 14
    if struct.unpack_from(">i", data, 2)[0] == 3:  # version 3 names the native encoding
        pos += 4 + struct.unpack_from(">i", data, pos)[0]
    flags, count = struct.unpack_from(">ii", data, pos)
    if flags & 0xFF != 16:
        raise ValueError(f"not a character vector: type {flags & 0xFF}")
    pos += 8
    lines = []
    for _ in range(count):
        size = struct.unpack_from(">i", data, pos + 4)[0]
        pos += 8
        raw = data[pos : pos + max(size, 0)]
        pos += max(size, 0)
        lines.append(raw.decode("utf-8"))
    return lines


def books(database: bytes) -> Iterator[list[str]]:
    """The lines of each novel: entries are a big-endian length and a zlib stream."""
    pos = 0
    while pos < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[pos + 4 :])
        if len(data) != struct.unpack_from(">I", database, pos)[0]:
            raise ValueError("unexpected length of a database entry")
        pos = len(database) - len(stream.unused_data)
        yield r_strings(data)


def clean(lines: list[str]) -> list[str]:
    """Unwrap paragraphs; drop headings, contents and other lines that are not prose."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        text = " ".join(block.split()).replace("_", "")
        text = text.translate(str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''"))
        text = re.sub(r"\s*(--+|\u2014)\s*", "--", text)
        if re.match(r"(chapter|volume|vol\.|letter)\b.{0,12}$|finis|the end\b|by jane austen", text, re.I):
            continue
        if len(text) < 12 or text.upper() == text or not re.search(r"[.!?,;:\"'-]$", text):
            continue
        paragraphs.append(text)
    return paragraphs


def passages(paragraphs: list[str]) -> list[str]:
    result: list[str] = []
    current: list[str] = []
    for paragraph in paragraphs:
        current.append(paragraph)
        if sum(map(len, current)) >= PASSAGE_CHARS:
            result.append("\n".join(current))
            current = []
    return result + (["\n".join(current)] if current else [])


def novels(deb: Path | None) -> list[list[str]]:
    """The paragraphs of each novel, by title; deb: the package file, None to download it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        database = read_database(deb or fetch_package(directory), directory)
    return [clean(lines) for lines in books(database)]


def corpus(deb: Path | None) -> list[str]:
    texts = [passage for novel in novels(deb) for passage in passages(novel)]
    digest = hashlib.sha256("\n\n".join(texts).encode()).hexdigest()
    print(f"corpus: {len(texts)} passages, {sum(map(len, texts))} characters, sha256 {digest}")
    if digest != CORPUS_SHA256:
        raise ValueError("the corpus differs from the recorded one")
    return texts


def is_held_out(passage: int) -> bool:
    """Whether the passage of this index is kept for evaluation."""
    return passage // BLOCK % HELD_OUT_EVERY == HELD_OUT_EVERY // 2


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Texts for training, and held out."""
    parts: tuple[list[str], list[str]] = ([], [])
    for i, text in enumerate(texts):
        parts[is_held_out(i)].append(text)
    return parts
