"""The state of a compilation, filled phase by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.buckets import Bucket
from llmc.cache_root import cache_root
from llmc.compiler.build import BuiltKernel
from llmc.compiler.config import CompileConfig
from llmc.compiler.graph.commands import CommandList, GraphShape
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.phases import check_dump
from llmc.compiler.resolved import Resolved
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.store.output import check_output
from llmc.compiler.store.weights import WeightLayout
from llmc.compiler.targets.base import Choice
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource


@dataclass
class CompileState:
    """Results of phases, for later phases.

    stack: closed by publishing.
    files: the model's files; `copied` names those to copy.
    in_place: the output is the artifact being extended, whose other files stay.
    there: the manifest of what is at the output.
    manifest: as far as it is known.
    conversions: as in the manifest; None if unknown.
    specs: kernels, in the artifact's order.
    variants: of kernels with a non-default schedule.
    code: None until linked or carried over.
    """

    config: CompileConfig
    cache: GraphCache
    stack: ExitStack
    in_place: bool
    there: dict[str, Any] | None
    resolved: Resolved = field(init=False)
    buckets: tuple[Bucket, ...] = field(init=False)
    source: ModelSource = field(init=False)
    checkpoint: Checkpoint = field(init=False)
    files: ModelFiles = field(init=False)
    copied: list[str] = field(init=False)
    manifest: dict[str, Any] = field(init=False)
    tracer: Tracer = field(init=False)
    graphs: dict[Bucket, tuple[GraphShape, CommandList]] = field(init=False)
    layout: WeightLayout = field(init=False)
    specs: list[KernelSpec] = field(init=False)
    choices: dict[KernelSpec, Choice] = field(default_factory=dict)
    variants: dict[KernelSpec, str] = field(default_factory=dict)
    kernels: list[BuiltKernel] = field(default_factory=list)
    staging: Path = field(init=False)
    crcs: dict[str, int] = field(init=False)
    conversions: dict[str, Any] | None = None
    code: bytes | None = None

    @property
    def lists(self) -> list[CommandList]:
        """The distinct command lists: buckets of equal shape share one."""
        return list({id(commands): commands for _, commands in self.graphs.values()}.values())


@contextmanager
def compilation(config: CompileConfig, *, in_place: bool = False) -> Iterator[CompileState]:
    """Starts a compilation. Staged but unpublished files are removed when it ends.

    Raises CompileError early if its output or its dump must not be written.
    """
    check_dump(config.dump, config.output)
    there = None if in_place else check_output(config.output)
    with ExitStack() as stack:
        yield CompileState(config, GraphCache(cache_root(config.cache_dir)), stack, in_place, there)
