"""Adds buckets to an artifact: its weights stay the file they are, its graphs and kernels the bytes they are.

New graphs, kernels and commands follow the old ones in every table, so an index means what it meant. The artifact is
replaced in one step; who has it open keeps what they opened.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from llmc.buckets import Bucket
from llmc.buckets.bucket import beyond
from llmc.cache_root import cache_root
from llmc.compiler.build import BuiltKernel, build_kernels
from llmc.compiler.config import CompileError, Progress, no_progress
from llmc.compiler.described import Described, ladder_of, most_tokens, read_described
from llmc.compiler.graph.commands import CommandList, GraphShape
from llmc.compiler.graph.plan import plan_graphs
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.phases import PhaseClock
from llmc.compiler.pipeline import manifest_kernel, model_record, weight_requests, weight_shapes
from llmc.compiler.store.artifact import graphs_bin
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.store.graphs_writer import FileSums
from llmc.compiler.store.output import OWN_FILES, check_output, is_artifact, refuse_another
from llmc.compiler.store.staging import staged_directory
from llmc.compiler.store.weights import WeightLayout, plan_weights
from llmc.manifest import write_manifest

_FICLONE = 0x40049409  # Linux: ioctl_ficlone(2)
Graphs = Mapping[Bucket, tuple[GraphShape, CommandList]]


@dataclass(frozen=True)
class AddReport:
    """What came of adding buckets. weights: how they got into the artifact: "linked", "cloned" or "copied", "kept" when
    nothing had to be written; arena_bytes: of the largest graph; seconds by phase.
    """

    artifact: Path
    added: tuple[str, ...]
    present: tuple[str, ...]
    num_graphs: int
    num_kernels: int
    kernels_added: int
    kernels_compiled: int
    code_bytes: int
    arena_bytes: int
    weights: str
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return {**self.__dict__, "artifact": str(self.artifact)}


def add_buckets(
    artifact: Path,
    buckets: Sequence[Bucket],
    output: Path | None = None,
    *,
    cache_dir: Path | None = None,
    jobs: int = 0,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> AddReport:
    """Adds the buckets that `artifact` lacks, in place, or into a new artifact `output`.

    Concurrent calls on one artifact wait for each other. In place, files that are not llmc's stay where they are.
    overwrite: `output` may be an artifact of another model or other options. Raises CompileError, with the artifact as
    it was, for a bucket beyond its limits and for an artifact that other sources, tools or kernels made: its graphs
    would not all compute the same bits.
    """
    if output is None or (output.exists() and output.samefile(artifact)):
        output = artifact
    with _locked(artifact) if output == artifact else nullcontext():
        return _add(artifact, buckets, output, cache_dir, jobs or len(os.sched_getaffinity(0)), overwrite, progress)


def _add(
    artifact: Path,
    buckets: Sequence[Bucket],
    output: Path,
    cache_dir: Path | None,
    jobs: int,
    overwrite: bool,
    progress: Progress,
) -> AddReport:
    clock, cache = PhaseClock(progress), GraphCache(cache_root(cache_dir))
    with clock.phase("load"):
        if not is_artifact(artifact):
            raise CompileError(f"{artifact} is not an artifact; give the directory that llmc compile wrote")
        for name in sorted(OWN_FILES):
            if not (artifact / name).is_file():
                raise CompileError(f"{artifact / name} is missing or no regular file; compile the model again")
        old = read_described(artifact)
        common = old.resolved.graph_components()
        _check_components(artifact, old.manifest.get("graph_components"), common)
        added = [bucket for bucket in dict.fromkeys(buckets) if bucket not in old.buckets]
        for bucket in added:
            check_bucket(bucket, old)
        every = [*old.buckets, *added]
        named = {
            **old.manifest,
            "max_num_batched_tokens": max(old.resolved.max_num_batched_tokens, most_tokens(every)),
            "buckets": [str(bucket) for bucket in every],
        }
        if output != artifact and not overwrite:
            refuse_another(output, check_output(output), named)
    present = tuple(str(bucket) for bucket in dict.fromkeys(buckets) if bucket not in added)
    if not added and output == artifact:
        return AddReport(artifact, (), present, len(old.buckets), len(old.kernels), 0, 0,
                         old.manifest["bytes"]["code"], old.manifest["bytes"]["arena"], "kept",
                         clock.seconds)  # fmt: skip
    tracer = Tracer(old.resolved, cache)
    with clock.phase("trace"):
        tracer.prepare(every)
    with clock.phase("graphs") as on_graph:
        graphs = plan_graphs(every, old.resolved.graph_params(), common, cache, tracer.bind, on_graph)
        lists = list({id(c): c for _, c in graphs.values()}.values())
    with clock.phase("kernels") as on_kernel:
        specs = _specs_in_order(artifact, old, lists)
        kernels = build_kernels(specs, old.resolved.target, cache, jobs, on_kernel, _variants(old, specs))
        _check_kernels(artifact, old, kernels)
    with staged_directory(output, keeps_others=output == artifact) as staging:
        with clock.phase("weights"):
            layout = _layout(old, lists)
            weights = _place(artifact / "weights.safetensors", staging / "weights.safetensors")
            _copy_others(artifact, staging, old.manifest["files"] if output != artifact else None)
        with clock.phase("link"):
            code_name = old.resolved.target.code_name
            old_code = (artifact / code_name).read_bytes()
            before = {bucket: graphs[bucket] for bucket in old.buckets}
            _check_tables(artifact, old, specs[: len(old.kernels)], layout, before, old_code)
            if len(specs) == len(old.kernels):
                (staging / code_name).write_bytes(old_code)
                code = old_code
            else:
                old.resolved.target.link([k.code for k in kernels], staging / code_name)
                code = (staging / code_name).read_bytes()
            (staging / "graphs.bin").write_bytes(_tables(old, specs, layout, graphs, code))
            arena = max(of.arena_bytes for of in lists)
            described = {
                **named,
                "bytes": {**old.manifest["bytes"], "code": len(code), "arena": arena},
                "kernels": [*old.kernels, *(manifest_kernel(k) for k in kernels[len(old.kernels) :])],
            }
            write_manifest(staging / "manifest.json", described)
    return AddReport(
        artifact=output,
        added=tuple(map(str, added)),
        present=present,
        num_graphs=len(every),
        num_kernels=len(kernels),
        kernels_added=len(kernels) - len(old.kernels),
        kernels_compiled=sum(not k.cached for k in kernels),
        code_bytes=len(code),
        arena_bytes=arena,
        weights=weights,
        phase_seconds=clock.seconds,
    )


def check_bucket(bucket: Bucket, artifact: Described) -> None:
    """Raises CompileError for a bucket that no request of this artifact could use, and BucketError for a bad one."""
    resolved = artifact.resolved
    excess = beyond(bucket, resolved.max_num_seqs, resolved.max_model_len, resolved.block_size)
    if excess == "batch":
        raise CompileError(
            f"bucket {bucket} holds {bucket.batch} sequences but the artifact runs at most {resolved.max_num_seqs}; "
            "lower it, or compile again with a larger --max-num-seqs"
        )
    if excess == "seq":
        raise CompileError(
            f"bucket {bucket} holds {bucket.seq} tokens but max-model-len of the artifact is {resolved.max_model_len}; "
            "lower it, or compile again with a larger --max-model-len"
        )
    ladder_of((*artifact.buckets, bucket))


@contextmanager
def _locked(artifact: Path) -> Iterator[None]:
    """Holds the lock of an artifact's directory; who waited for one that was replaced meanwhile takes the new one."""
    while True:
        try:
            lock = os.open(artifact, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise CompileError(f"{artifact} is not an artifact: {error.strerror or error}") from None
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if artifact.is_dir() and os.path.samestat(os.fstat(lock), artifact.stat()):
                yield
                return
        finally:
            os.close(lock)


def _check_components(artifact: Path, recorded: object, now: Mapping[str, str]) -> None:
    if not isinstance(recorded, dict):
        raise CompileError(f"{artifact} does not say what its graphs depend on; compile the model again")
    differ = sorted(name for name in {*recorded, *now} if recorded.get(name) != now.get(name))
    if differ:
        raise CompileError(
            f"{artifact} was compiled by another version of the compiler ({', '.join(differ)} differ), and graphs of "
            "two versions may not compute the same bits; compile the model again with the bucket in --buckets"
        )


def _specs_in_order(artifact: Path, old: Described, lists: Sequence[CommandList]) -> list[KernelSpec]:
    """The artifact's kernels as they are numbered, then the new ones."""
    by_symbol = {c.spec.symbol(): c.spec for of in lists for c in of.commands}
    known = [str(kernel["symbol"]) for kernel in old.kernels]
    missing = [symbol for symbol in known if symbol not in by_symbol]
    if missing:
        raise CompileError(f"{artifact} has kernel {missing[0]}, which no graph of it needs; compile the model again")
    return [by_symbol[symbol] for symbol in (*known, *sorted(by_symbol.keys() - set(known)))]


def _variants(old: Described, specs: Sequence[KernelSpec]) -> dict[KernelSpec, str]:
    """Those schedules that were measured when the artifact's kernels were compiled."""
    tuned = {}
    for spec, kernel in zip(specs, old.kernels, strict=False):
        text = kernel["components"].get("schedule")
        if text is not None:
            try:
                tuned[spec] = old.resolved.target.check_variant(text)
            except ValueError as error:
                raise CompileError(
                    f"kernel {kernel['symbol']} of the artifact: {error}; compile the model again"
                ) from None
    return tuned


def _check_kernels(artifact: Path, old: Described, kernels: Sequence[BuiltKernel]) -> None:
    templates = {str(k["op"]): k["components"] for k in old.kernels}
    for index, kernel in enumerate(kernels):
        if index < len(old.kernels):
            same = kernel.key == old.kernels[index]["key"]
        else:
            # A new kernel of an op computes what the old ones compute when the same template makes it.
            of_op = templates.get(kernel.spec.op, kernel.components)
            same = all(of_op.get(name) == kernel.components[name] for name in ("template", "target", "tvm"))
        if not same:
            raise CompileError(
                f"the kernels of {artifact} were made by another version of the compiler ({kernel.spec.op} differs), "
                "and might not compute the same bits as new ones; compile the model again"
            )


def _layout(old: Described, lists: Sequence[CommandList]) -> WeightLayout:
    resolved = old.resolved
    shapes = weight_shapes(resolved.model, resolved.max_model_len)
    requests = weight_requests(shapes, lists, resolved.act_dtype, resolved.recipe)
    return plan_weights(requests, resolved.target)


def _tables(old: Described, specs: Sequence[KernelSpec], layout: WeightLayout, graphs: Graphs, code: bytes) -> bytes:
    sums = FileSums.of({old.resolved.target.code_name: code}, layout.header, layout.total_bytes)
    crcs = old.manifest["weights_crc32"]
    return graphs_bin(model_record(old.resolved), specs, layout, crcs, graphs, old.resolved.target, sums)


def _check_tables(
    artifact: Path, old: Described, specs: Sequence[KernelSpec], layout: WeightLayout, graphs: Graphs, code: bytes
) -> None:
    """What is about to be written begins with what is there: the old graphs, made anew, are the artifact's bytes."""
    try:
        same = _tables(old, specs, layout, graphs, code) == (artifact / "graphs.bin").read_bytes()
    except (KeyError, TypeError) as error:
        raise CompileError(f"{artifact} does not record the checksum of {error}; compile the model again") from None
    if not same:
        raise CompileError(
            f"{artifact / 'graphs.bin'} is damaged or was written by another version of the compiler; compile the "
            "model again"
        )


def _place(source: Path, target: Path) -> str:
    """Puts a large file into another directory without copying it where the file system can; says how."""
    try:
        with source.open("rb") as read, target.open("xb") as write:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        return "cloned"
    except OSError:
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
            return "linked"
        except OSError:
            shutil.copyfile(source, target)
            return "copied"


def _copy_others(artifact: Path, staging: Path, names: Collection[str] | None) -> None:
    """Tokenizer and the other files of the model; names: of those, None: whatever else lies in the artifact."""
    for one in artifact.iterdir():
        if one.name in OWN_FILES or (names is not None and one.name not in names):
            continue
        if one.is_dir() and not one.is_symlink():
            shutil.copytree(one, staging / one.name, symlinks=True)
        else:
            shutil.copy2(one, staging / one.name, follow_symlinks=False)
