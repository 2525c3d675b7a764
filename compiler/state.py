"""What a compilation knows, phase by phase."""

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
from llmc.compiler.resolve import Resolved
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.store.output import check_output
from llmc.compiler.store.weights import WeightLayout
from llmc.compiler.targets.base import Choice
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource


@dataclass
class CompileState:
    """What phases leave for those behind them.

    stack: what publishing closes. files: what `copied` names some of.
    in_place: the output is the artifact that is extended, whose other files stay. there: the manifest of what lies at
    the output.
    manifest: as much as is known. conversions: as in the manifest, None: nobody knows.
    specs: kernels, in the order of the artifact. variants: of kernels that have not the default schedule.
    code: None until it is linked or carried over.
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
    """The state of a compilation that begins; what it has staged and not published vanishes with it.

    Raises CompileError where its output or its dump must not be written, before anything takes minutes.
    """
    check_dump(config.dump, config.output)
    there = None if in_place else check_output(config.output)
    with ExitStack() as stack:
        yield CompileState(config, GraphCache(cache_root(config.cache_dir)), stack, in_place, there)
