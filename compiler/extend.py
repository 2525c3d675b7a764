"""Adds buckets to an artifact; its weights, graphs and kernels keep their bytes.

New graphs, kernels and commands follow the old ones in every table, so indices keep their meaning. The artifact is
replaced atomically; processes that have it open keep the old one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from llmc.buckets import Bucket
from llmc.buckets.bucket import beyond, check_total
from llmc.compiler import pipeline
from llmc.compiler.config import CompileConfig, CompileError, Progress, no_progress
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.phases import OnStep, PhaseClock, chosen, drive
from llmc.compiler.pipeline import PHASES
from llmc.compiler.state import CompileState, compilation
from llmc.compiler.store.carried import copy_others, place
from llmc.compiler.store.described import Described, ladder_of, most_tokens, read_described, version_with
from llmc.compiler.store.output import CODE_FILES, OWN_FILES, is_artifact
from llmc.compiler.store.staging import locked
from llmc.manifest import ManifestError, check_listed
from llmc.models.sources.base import FolderFiles


@dataclass(frozen=True)
class AddReport:
    """The result of adding buckets.

    weights: "linked", "cloned" or "copied" into the artifact; "kept" if nothing was written.
    arena_bytes: of the largest graph.
    seconds: by phase.
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
    dump: Path | None = None,
    progress: Progress = no_progress,
) -> AddReport:
    """Adds those of `buckets` that `artifact` lacks, in place or into a new artifact `output`.

    Concurrent calls on one artifact wait for each other. In place, foreign files stay. overwrite: `output` may be an
    artifact of another model or other options. dump: as in CompileConfig. Raises CompileError for a bucket beyond the
    artifact's limits, and leaves it unchanged. Also raised if other sources, tools or kernels made the artifact: its
    graphs would then differ in bits.
    """
    in_place = output is None or (output.exists() and output.samefile(artifact))
    output = artifact if output is None or in_place else output
    config = CompileConfig(artifact, output, cache_dir=cache_dir, jobs=jobs, overwrite=overwrite, dump=dump)
    addition, clock = _Addition(tuple(dict.fromkeys(buckets))), PhaseClock(progress)
    with locked(artifact) if in_place else nullcontext(), compilation(config, in_place=in_place) as state:
        drive(chosen(PHASES, ("load",), load=addition.load), state, clock, dump)
        if addition.new or not in_place:
            names = ("trace", "graphs", "kernels", "weights", "link", "publish")
            variants = {"kernels": addition.kernels, "weights": addition.weights, "link": addition.link}
            drive(chosen(PHASES, names, **variants), state, clock, dump)
    kernels, sizes = state.manifest["kernels"], state.manifest["bytes"]
    return AddReport(
        artifact=output,
        added=tuple(map(str, addition.new)),
        present=tuple(str(bucket) for bucket in addition.wanted if bucket not in addition.new),
        num_graphs=len(state.buckets),
        num_kernels=len(kernels),
        kernels_added=len(kernels) - len(addition.old.kernels),
        kernels_compiled=sum(not kernel.cached for kernel in state.kernels),
        code_bytes=sizes["code"],
        arena_bytes=sizes["arena"],
        weights=addition.placed,
        phase_seconds=clock.seconds,
    )


def check_bucket(bucket: Bucket, artifact: Described) -> None:
    """Raises CompileError for a bucket that no request of this artifact could use, BucketError for an invalid one."""
    resolved = artifact.resolved
    rows = resolved.max_decode_rows if bucket.phase == "decode" else resolved.max_num_seqs
    check_total(bucket, resolved.block_size)
    excess = beyond(bucket, rows, resolved.max_model_len, resolved.block_size)
    if excess == "batch":
        guesses = f" with {resolved.speculate} guesses each" if rows > resolved.max_num_seqs else ""
        raise CompileError(
            f"bucket {bucket} holds {bucket.batch} sequences but the artifact runs at most {resolved.max_num_seqs}"
            f"{guesses}; lower it, or compile again with a larger --max-num-seqs"
        )
    if excess == "seq":
        raise CompileError(
            f"bucket {bucket} holds {bucket.seq} tokens but max-model-len of the artifact is {resolved.max_model_len}; "
            "lower it, or compile again with a larger --max-model-len"
        )
    ladder_of((*artifact.buckets, bucket), resolved.model)


@dataclass
class _Addition:
    """A compilation's phases, starting from an artifact. new: wanted buckets that it lacks."""

    wanted: tuple[Bucket, ...]
    old: Described = field(init=False)
    new: tuple[Bucket, ...] = ()
    placed: str = "kept"

    def load(self, state: CompileState, _: OnStep) -> None:
        """Takes resolved settings from the artifact, which this compiler must be able to reproduce."""
        artifact = state.config.model
        if not is_artifact(artifact):
            raise CompileError(f"{artifact} is not an artifact; give the directory that llmc compile wrote")
        _check_there(artifact, *(OWN_FILES - CODE_FILES))
        old = self.old = read_described(artifact)
        _check_there(artifact, old.resolved.target.code_name)
        state.resolved = old.resolved
        _check_components(artifact, old.manifest.get("graph_components"), old.resolved.graph_components())
        try:
            check_listed(artifact)
        except ManifestError as error:
            raise CompileError(str(error)) from None
        self.new = tuple(bucket for bucket in self.wanted if bucket not in old.buckets)
        for bucket in self.new:
            check_bucket(bucket, old)
        state.buckets = (*old.buckets, *self.new)
        state.files = FolderFiles(artifact)
        state.copied, state.crcs = list(old.manifest["files"]), old.manifest.get("weights_crc32") or {}
        state.conversions = old.manifest.get("weights_converted")
        most = max(old.resolved.max_num_batched_tokens, most_tokens(state.buckets))
        ladder = [str(bucket) for bucket in state.buckets]
        format_version = version_with(state.buckets, old.resolved)
        changed = {"format_version": format_version, "max_num_batched_tokens": most, "buckets": ladder}
        pipeline.settle(state, {**old.manifest, **changed})

    def kernels(self, state: CompileState, on_step: OnStep) -> None:
        """The artifact's kernels, with their numbers and schedules, then the new ones."""
        artifact, old = state.config.model, self.old.kernels
        by_symbol = {spec.symbol(): spec for spec in state.specs}
        known = [str(kernel["symbol"]) for kernel in old]
        missing = [symbol for symbol in known if symbol not in by_symbol]
        if missing:
            raise CompileError(
                f"{artifact} has kernel {missing[0]}, which no graph of it needs; compile the model again"
            )
        state.specs = [by_symbol[symbol] for symbol in dict.fromkeys((*known, *by_symbol))]
        state.variants = self._variants(state)
        pipeline.make_kernels(state, on_step)
        templates = {str(kernel["op"]): kernel["components"] for kernel in old}
        for index, kernel in enumerate(state.kernels):
            if index < len(old):
                same = kernel.key == old[index]["key"]
            else:
                # A new kernel of an op computes the same bits as the old ones if the same template makes it.
                of_op = templates.get(kernel.spec.op, kernel.components)
                same = all(of_op.get(name) == kernel.components[name] for name in ("template", "target", "tvm"))
            if not same:
                raise CompileError(
                    f"the kernels of {artifact} were made by another version of the compiler ({kernel.spec.op} "
                    "differs), and might not compute the same bits as new ones; compile the model again"
                )

    def _variants(self, state: CompileState) -> dict[KernelSpec, str]:
        """The measured schedules of the artifact's kernels."""
        tuned = {}
        for spec, kernel in zip(state.specs, self.old.kernels, strict=False):
            text = kernel["components"].get("schedule")
            if text is not None:
                try:
                    tuned[spec] = state.resolved.target.check_variant(text)
                except ValueError as error:
                    raise CompileError(
                        f"kernel {kernel['symbol']} of the artifact: {error}; compile the model again"
                    ) from None
        return tuned

    def weights(self, state: CompileState, _: OnStep) -> None:
        """Takes over the artifact's weights without reading them."""
        artifact, staging = state.config.model, pipeline.stage(state)
        self.placed = place(artifact / "weights.safetensors", staging / "weights.safetensors")
        if state.in_place:
            copy_others(artifact, staging, {*OWN_FILES, *state.copied})

    def link(self, state: CompileState, on_step: OnStep) -> None:
        """Checks that the rebuilt old graphs equal the artifact's, as a prefix of what will be written."""
        artifact, count = state.config.model, len(self.old.kernels)
        code = (artifact / state.resolved.target.code_name).read_bytes()
        try:
            made = pipeline.tables(state, state.specs[:count], self.old.buckets, code)
        except KeyError as error:
            raise CompileError(f"{artifact} does not record the checksum of {error}; compile the model again") from None
        if made != (artifact / "graphs.bin").read_bytes():
            raise CompileError(
                f"{artifact / 'graphs.bin'} is damaged or was written by another version of the compiler; compile the "
                "model again"
            )
        state.code = code if len(state.specs) == count else None
        pipeline.link(state, on_step)


def _check_there(artifact: Path, *names: str) -> None:
    for name in sorted(names):
        if not (artifact / name).is_file():
            raise CompileError(f"{artifact / name} is missing or no regular file; compile the model again")


def _check_components(artifact: Path, recorded: object, now: Mapping[str, str]) -> None:
    if not isinstance(recorded, dict):
        raise CompileError(f"{artifact} does not say what its graphs depend on; compile the model again")
    differ = sorted(name for name in {*recorded, *now} if recorded.get(name) != now.get(name))
    if differ:
        raise CompileError(
            f"{artifact} was compiled by another version of the compiler ({', '.join(differ)} differ), and graphs of "
            "two versions may not compute the same bits; compile the model again with the bucket in --buckets"
        )
