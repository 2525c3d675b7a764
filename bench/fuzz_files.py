"""Mutates files that llmc reads, and reads each: only the reader's own errors may come out.

    python -m bench.fuzz_files ARTIFACT
    python -m bench.fuzz_files ARTIFACT --rounds 1000 --seed 7 manifest bundle

ARTIFACT should be of a small model, since bundles are read whole each round. Bytes are flipped, cut, repeated and
replaced; fields get values that no writer writes. Prints a count of outcomes for each kind of file. A mutation that
raises anything else is kept in `fuzz-KIND-ROUND` and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import resource
import sys
import tarfile
import tempfile
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fuzz_gguf import mutated, read_gguf
from bench.fuzz_onnx import mutated as mutated_onnx
from bench.fuzz_onnx import read_onnx
from bench.gguf_bytes import Gguf, small_model
from bench.onnx_bytes import small_decoder
from llmc.buckets import BucketError, Limits, parse_spec
from llmc.buckets.cost_table import CostTable, CostTableError
from llmc.buckets.misses import read_misses
from llmc.buckets.recorded_use import read_bucket_use, read_missed
from llmc.buckets.trace import read_trace
from llmc.buckets.trace_text import TraceError
from llmc.compiler.config import CompileError
from llmc.compiler.store.bundle import BundleError, create_bundle, read_bundle, tables_of
from llmc.compiler.store.cache import CacheError, GraphCache, key_of
from llmc.compiler.store.described import read_described
from llmc.compiler.store.graphs_patch import GraphsPatch, GraphsPatchError
from llmc.manifest import NAME, write_manifest
from llmc.models import ModelError
from llmc.runtime.chat.session import ChatError, Session
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.offline.prompts import PromptError
from llmc.runtime.offline.prompts import read_file as read_prompts

HOSTILE: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**32, 2**63, -(2**63) - 1, 10**400, 0.5, 1e308, True, None, "", "x", "../../x", "/etc/passwd",
    "\x00", "\x1b[2J", "\ud800", "9" * 30, "ä" * 5000, [], {}, [0], [[]], {"": 0}, [None] * 100,
)  # fmt: skip
TOKENS = (b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 20000, b"{", b"}", b'"', b",", b"\xff", b"\x00", b"null",
          b"true", b"-0", b"\n", b"\xef\xbb\xbf", b'"a":1,"a":2')  # fmt: skip
_MEMORY_BYTES = 6 << 30


@dataclass(frozen=True)
class Kind:
    """A kind of file: a sound example, its reader, the errors that the reader may raise, and the mutation."""

    suffix: str
    sound: bytes
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...]
    mutate: Callable[[bytes, random.Random], bytes]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Replaces, removes or adds some bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, kind = rng.randrange(len(changed) + 1), rng.randrange(6)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + rng.choice((1, 4, 100, 1 << 20))]
        elif kind == 2:
            changed[at:at] = rng.choice(TOKENS)
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.choice((1, 8, 200))]
        elif kind == 4:
            token = rng.choice(TOKENS)
            changed[at : at + len(token)] = token
        else:
            changed[at : at + 8] = rng.randbytes(8)
    return bytes(changed)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Replaces, removes or doubles one value somewhere in a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name, changed = rng.choice(list(value)), dict(value)
        kind = rng.random()
        if kind < 0.08:
            del changed[name]
        elif kind < 0.12:
            changed[rng.choice(("", name + "x", "__class__"))] = changed.pop(name)
        else:
            changed[name] = mutate_value(value[name], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        at, items = rng.randrange(len(value)), list(value)
        kind = rng.random()
        if kind < 0.08:
            del items[at]
        elif kind < 0.16:
            items.insert(at, items[at])
        else:
            items[at] = mutate_value(items[at], rng)
        return items
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 1 << 20, -value, -2 * value))
    return rng.choice(HOSTILE)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = mutate_value(value, rng)
    return json.dumps(value).encode()


def mutate_lines(data: bytes, rng: random.Random) -> bytes:
    """Mutates JSON lines."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    lines = data.split(b"\n")
    at = rng.randrange(len(lines) - 1)
    lines[at] = json.dumps(mutate_value(json.loads(lines[at]), rng)).encode()
    return b"\n".join(lines)


def mutate_gzip(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return mutate_bytes(data, rng)
    return gzip.compress(mutate_lines(gzip.decompress(data), rng), 1)


def mutate_manifest(data: bytes, rng: random.Random) -> bytes:
    """Mutates a manifest, mostly with a checksum that fits, as a faulty writer would."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    value = mutate_value(json.loads(data), rng)
    if not isinstance(value, dict):
        return json.dumps(value).encode()
    with tempfile.NamedTemporaryFile() as file:
        write_manifest(Path(file.name), value)
        return Path(file.name).read_bytes()


def mutate_bundle(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    kind = rng.random()
    if kind < 0.75:
        members["bundle.json"] = json.dumps(mutate_value(json.loads(members["bundle.json"]), rng)).encode()
    elif kind < 0.9:
        name = rng.choice(list(members))
        members[name] = mutate_bytes(members[name], rng)
    else:
        members[rng.choice(("../x", "/x", "bundle.json/", "variants/1/graphs.bin"))] = b"x"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_LZMA))) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, archive.compression if kind > 0.7 else zipfile.ZIP_STORED)
    return out.getvalue()


def mutate_tables(data: bytes, rng: random.Random) -> bytes:
    """Gives whole fields other values, with a checksum that fits, as a faulty writer would."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        # Mostly header and sections, which say where everything else lies.
        at = rng.choice((rng.randrange(12, 232), rng.randrange(64, len(changed)))) & ~3
        value = rng.choice((0, 1, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFC0, 0xFFFFFFFF, rng.getrandbits(32)))
        changed[at : at + 4] = value.to_bytes(4, "little")
    if rng.random() < 0.1:
        del changed[rng.randrange(64, len(changed)) :]
    changed[16:24] = len(changed).to_bytes(8, "little")
    changed[28:32] = zlib.crc32(changed[32:], zlib.crc32(changed[:28])).to_bytes(4, "little")
    return bytes(changed)


def read_tables(path: Path) -> None:
    """Reads tables as a bundle's are read, and as the tools do."""
    refused = None
    try:
        _ = GraphsPatch(path.read_bytes()).model
    except GraphsPatchError as error:
        refused = error
    read_graphs(path)
    if refused is not None:
        raise refused


def read_whole_bundle(path: Path) -> None:
    """Reads a bundle as `llmc bundle apply` does before it reads the checkpoint."""
    bundle = read_bundle(path)
    for variant in bundle.variants:
        tables_of(bundle, variant)
        bundle.read(variant, "kernels.so")


def kinds(artifact: Path, work: Path) -> Iterator[tuple[str, Kind]]:
    """All kinds of files by name. work: an empty directory."""
    folder = work / "artifact"
    folder.mkdir()

    def read_manifest_of(path: Path) -> None:
        path.replace(folder / NAME)
        read_described(folder)

    yield "manifest", Kind("", (artifact / NAME).read_bytes(), read_manifest_of, (CompileError,), mutate_manifest)
    create_bundle([artifact], work / "bundle")
    yield "bundle", Kind("", (work / "bundle").read_bytes(), read_whole_bundle, (BundleError,), mutate_bundle)
    yield "tables", Kind("", (artifact / "graphs.bin").read_bytes(), read_tables, (GraphsPatchError, FormatError),
                         mutate_tables)  # fmt: skip
    cost = {"phase": "prefill", "batch": 1, "seq": 128, "sequences": 1, "tokens": 128, "context": 128,
            "seconds": 0.0031, "repeats": 5, "deviation_s": 4e-05, "disturbed": 0.02}  # fmt: skip
    table = {"llmc_cost_table": 2, "machine": {"processor": "p", "threads": "2"}, "artifact": "0" * 64,
             "padding": "skipped", "step_s": 1e-05, "token_s": 3e-07,
             "costs": [cost, {**cost, "seq": 256}]}  # fmt: skip
    yield "costs", Kind(".json", json.dumps(table).encode(), CostTable.read, (CostTableError,), mutate_json)
    miss = {"time": 1.0, "phase": "decode", "batch": 9, "tokens": 9, "context": 700, "bucket": "decode:16x1024",
            "count": 3}  # fmt: skip
    yield "misses", Kind(".jsonl", _lines({"llmc_misses": 1}, miss, {**miss, "bucket": None}), read_misses,
                         (BucketError,), mutate_lines)  # fmt: skip
    request = {"arrival_s": 0.5, "prompt_tokens": 374, "output_tokens": 44, "prefix_ids": [0, 1]}
    trace = _lines({"llmc_trace": 1, "prefix_block": 512}, request, {**request, "arrival_s": 1})
    yield "trace", Kind(".jsonl", trace, read_trace, (TraceError,), mutate_lines)
    yield "trace-gzip", Kind(".gz", gzip.compress(trace), read_trace, (TraceError,), mutate_gzip)
    azure = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,9,1\n"
    yield "trace-azure", Kind(".csv", azure, read_trace, (TraceError,), mutate_bytes)
    mooncake = _lines({"timestamp": 0, "input_length": 6955, "output_length": 52, "hash_ids": [0, 1]},
                      {"timestamp": 27482, "input_length": 6, "output_length": 5, "hash_ids": [3]})  # fmt: skip
    yield "trace-mooncake", Kind(".jsonl", mooncake, read_trace, (TraceError,), mutate_lines)

    def read_ladder(path: Path) -> None:
        parse_spec(str(path), Limits(max_num_seqs=16, max_model_len=512, block_size=16))

    ladder = {"prefill": [[1, 128], [4, 128]], "decode": {"batch": "1:2:4", "seq": [128, 512]}, "mixed": "4x64"}
    yield "ladder", Kind(".json", json.dumps(ladder).encode(), read_ladder, (BucketError,), mutate_json)
    toml = b'prefill = [[1, 128], [4, 128]]\ndecode = {batch = "1:2:4", seq = [128, 512]}\n'
    yield "ladder-toml", Kind(".toml", toml, read_ladder, (BucketError,), mutate_bytes)
    gaudi = b"(1, [256, 512], 0) # x\n(range(1, 4), 1, [8, 16])\n"
    yield "ladder-gaudi", Kind(".txt", gaudi, read_ladder, (BucketError,), mutate_bytes)
    metrics = b'# HELP\nllmc_bucket_replays_total{phase="decode",batch="4",seq="512"} 3.0\n' + (
        b'llmc_bucket_misses_by_shape_total{phase="decode",sequences="3",tokens="3",blocks="4"} 2.0\n'
    )

    def read_metrics(path: Path) -> None:
        read_bucket_use(path)
        read_missed(path, 16)

    yield "metrics", Kind(".txt", metrics, read_metrics, (BucketError,), mutate_bytes)
    prompts = _lines({"prompt": "a"}, {"prompt_token_ids": [1, 2]},
                     {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]})  # fmt: skip
    yield "prompts", Kind(".jsonl", prompts, read_prompts, (PromptError,), mutate_lines)
    chat = {"system": "s", "messages": [{"role": "user", "content": "x"}], "sampling": {"temperature": 0.5},
            "raw": False}  # fmt: skip
    yield "chat", Kind(".json", json.dumps(chat).encode(), lambda path: Session().load(path), (ChatError,), mutate_json)
    cache, components = GraphCache(work / "cache"), {"kind": "kernel", "op": "linear"}
    cache.put(key_of(components), b"payload" * 40, components, {"symbol": "x"})
    cache.export(None, work / "archive")
    fresh = GraphCache(work / "fresh")
    yield "cache-archive", Kind("", (work / "archive").read_bytes(), fresh.import_, (CacheError,), mutate_archive)

    entry = cache._path(key_of(components))

    def read_entry(path: Path) -> None:
        path.replace(entry)
        cache.entries()
        if cache.get(key_of(components)) not in (None, b"payload" * 40):
            raise AssertionError("another payload")

    yield "cache-entry", Kind("", entry.read_bytes(), read_entry, (), mutate_bytes)
    for name, tokenizer in (("gguf", "gpt2"), ("gguf-pieces", "llama")):
        model = small_model(tokenizer)
        yield name, Kind(".gguf", model.encoded(), read_gguf, (ModelError, CompileError), mutate_gguf(model))
    yield "onnx", Kind(".onnx", small_decoder().SerializeToString(), read_onnx, (ModelError,), mutate_onnx)


def mutate_onnx(data: bytes, rng: random.Random) -> bytes:
    return mutate_bytes(data, rng) if rng.random() < 0.4 else mutated_onnx(data, rng)


def mutate_gguf(model: Gguf) -> Callable[[bytes, random.Random], bytes]:
    """A mutation of a GGUF file: of its bytes, or of the values that they encode."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        return mutate_bytes(data, rng) if rng.random() < 0.4 else mutated(model, rng)

    return mutate


def mutate_archive(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return mutate_bytes(data, rng)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        (member,) = archive.getmembers()
        content = archive.extractfile(member).read()  # type: ignore[union-attr]
    member.name = rng.choice((member.name, "../x", "/x", "x" * 90))
    member.type = rng.choice((tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"S"))
    content = mutate_bytes(content, rng)
    member.size = len(content)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def _lines(*records: dict[str, Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def fuzz(name: str, kind: Kind, rounds: int, seed: int, work: Path) -> Counter[str]:
    """Counts outcomes by error; "taken": none. Raises AssertionError, with the file's path, for any other exception."""
    rng, found = random.Random(f"{name} {seed}"), Counter[str]()
    path = work / f"{name}{kind.suffix}"
    for number in range(rounds):
        data = kind.mutate(kind.sound, rng)
        path.write_bytes(data)
        try:
            kind.read(path)
            found["taken"] += 1
        except Exception as error:
            text = str(error)
            sound = isinstance(error, kind.errors) and text and "\n" not in text and text.isprintable()
            if not sound or len(text) > 2000:
                kept = Path(f"fuzz-{name}-{number}{kind.suffix}").absolute()
                kept.write_bytes(data)
                raise AssertionError(f"{kept}: {type(error).__name__}: {text[:2000]!r}") from error
            found[type(error).__name__] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("kinds", nargs="*", help="kinds to read, default all")
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_intermixed_args()
    # A small file must not make its reader run out of memory.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in kinds(given.artifact, Path(folder)):
            if given.kinds and name not in given.kinds:
                continue
            try:
                found = fuzz(name, kind, given.rounds, given.seed, Path(folder))
                print(f"{name}: {', '.join(f'{count} {what}' for what, count in found.most_common())}", flush=True)
            except AssertionError:
                traceback.print_exc()
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
