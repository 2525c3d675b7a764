"""Writer of the artifact directory: everything into a temporary directory beside it, then one rename."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmc.buckets import Bucket
from llmc.compiler.config import CompileError
from llmc.compiler.export import INPUTS
from llmc.compiler.graph import CommandList, Operand, round_up
from llmc.compiler.graphs_writer import (
    CommandRecord,
    GraphRecord,
    KernelRecord,
    ModelRecord,
    OperandRecord,
    WeightRecord,
    write_graphs,
)
from llmc.compiler.kernels.spec import FAMILIES, KernelSpec
from llmc.compiler.plan import GraphShape
from llmc.compiler.weights import WeightLayout

DTYPE_CODES = {"f32": 0, "bf16": 1}
PHASE_CODES = {"prefill": 0, "decode": 1, "mixed": 2}
_OPERAND_KINDS = {"arena": 0, "weight": 1, "input": 2, "k_pool": 3, "v_pool": 4, "output": 5}
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


def graphs_bin(
    model: ModelRecord,
    kernels: Sequence[KernelSpec],
    layout: WeightLayout,
    graphs: Mapping[Bucket, tuple[GraphShape, CommandList]],
    isa_level: int,
) -> bytes:
    """The tables of FORMAT.md."""
    kernel_index = {spec: i for i, spec in enumerate(kernels)}
    weight_index = {w.name: i for i, w in enumerate(layout.weights)}
    num_buffers = {c.spec: len(c.operands) for _, commands in graphs.values() for c in commands.commands}

    def operand(o: Operand) -> OperandRecord:
        kind = _OPERAND_KINDS[o.kind]
        if o.kind == "weight":
            index = weight_index[o.name]
            return OperandRecord(kind, index, 0, layout.weights[index].nbytes)
        if o.kind == "input":
            return OperandRecord(kind, INPUTS.index(o.name), 0, 0)
        return OperandRecord(kind, max(o.layer, 0), o.offset, o.nbytes)

    records: dict[int, tuple[CommandRecord, ...]] = {}

    def commands(of: CommandList) -> tuple[CommandRecord, ...]:
        if id(of) not in records:
            records[id(of)] = tuple(
                CommandRecord(
                    kernel_index[c.spec],
                    tuple(operand(o) for o in c.operands),
                    c.barrier,
                    c.layer,
                    FAMILIES.index(c.spec.family),
                )
                for c in of.commands
            )
        return records[id(of)]

    def graph(bucket: Bucket, shape: GraphShape, of: CommandList) -> GraphRecord:
        tokens = bucket.seq if bucket.phase == "decode" else model.max_model_len
        return GraphRecord(
            PHASE_CODES[bucket.phase],
            bucket.batch,
            bucket.seq,
            shape.tokens,
            bucket.batch,
            shape.samples,
            round_up(tokens, model.block_size) // model.block_size,
            shape.row_tile,
            of.arena_bytes,
            commands(of),
        )

    return write_graphs(
        model,
        [KernelRecord(s.symbol(), num_buffers[s], FAMILIES.index(s.family)) for s in kernels],
        [WeightRecord(w.name, DTYPE_CODES[w.dtype], w.shape, w.file_offset, w.nbytes) for w in layout.weights],
        [graph(bucket, shape, of) for bucket, (shape, of) in graphs.items()],
        isa_level,
    )


def is_artifact(path: Path) -> bool:
    return (path / "graphs.bin").is_file() and (path / "manifest.json").is_file()


@contextmanager
def staged_directory(output: Path) -> Iterator[Path]:
    """A new directory that becomes `output` when the block succeeds, and vanishes when it does not.

    Raises CompileError when `output` exists and is no artifact: nothing of other people is overwritten.
    """
    output = output.absolute()
    if output.exists() and not is_artifact(output) and not (output.is_dir() and not any(output.iterdir())):
        raise CompileError(f"{output} exists and is not an llmc artifact; choose another -o or remove it")
    staging = output.with_name(f"{output.name}.tmp-{secrets.token_hex(4)}")
    try:
        staging.mkdir(parents=True)
        yield staging
        for file in staging.iterdir():
            _sync(file)
        _sync(staging)
        _replace(staging, output)
        _sync(output.parent)
    except OSError as error:
        raise CompileError(
            f"cannot write {output}: {error.strerror or error}; free space or choose another -o"
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(staging: Path, output: Path) -> None:
    if not output.exists():
        staging.rename(output)
        return
    old = output.with_name(f"{output.name}.old-{secrets.token_hex(4)}")
    output.rename(old)
    try:
        staging.rename(output)
    except OSError:
        old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_manifest(path: Path, manifest: Mapping[str, object]) -> None:
    path.write_text(json.dumps(manifest, indent=1, sort_keys=False) + "\n")


def copy_tokenizer(model: Path, output: Path) -> list[str]:
    """Copies tokenizer and generation files; returns the names copied."""
    names = [name for name in COPIED_FILES if (model / name).is_file()]
    for name in names:
        shutil.copyfile(model / name, output / name)
    return names
