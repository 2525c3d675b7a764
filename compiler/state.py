"""What a compilation knows, phase by phase."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.buckets import Bucket
from llmc.compiler.build import BuiltKernel
from llmc.compiler.config import CompileConfig
from llmc.compiler.graph.commands import CommandList, GraphShape
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.resolve import Resolved
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.store.weights import WeightLayout
from llmc.compiler.targets.base import Choice
from llmc.models.loader import Checkpoint


@dataclass
class CompileState:
    """What phases leave for those behind them. stack: what publishing closes; there: the manifest of what lies at the
    output."""

    config: CompileConfig
    cache: GraphCache
    stack: ExitStack
    there: dict[str, Any] | None
    resolved: Resolved = field(init=False)
    checkpoint: Checkpoint = field(init=False)
    copied: list[str] = field(init=False)
    asked_for: dict[str, object] = field(init=False)
    tracer: Tracer = field(init=False)
    graphs: dict[Bucket, tuple[GraphShape, CommandList]] = field(init=False)
    choices: dict[KernelSpec, Choice] = field(default_factory=dict)
    kernels: list[BuiltKernel] = field(init=False)
    staging: Path = field(init=False)
    layout: WeightLayout = field(init=False)
    crcs: dict[str, int] = field(init=False)
    sizes: dict[str, int] = field(init=False)

    @property
    def lists(self) -> list[CommandList]:
        """The distinct command lists: buckets of equal shape share one."""
        return list({id(commands): commands for _, commands in self.graphs.values()}.values())

    @property
    def specs(self) -> list[KernelSpec]:
        """The kernels that they call, in the order of the artifact."""
        return sorted({c.spec for of in self.lists for c in of.commands}, key=KernelSpec.symbol)

    @property
    def variants(self) -> dict[KernelSpec, str]:
        """Of kernels that were measured and are not the default."""
        return {spec: choice.variant for spec, choice in self.choices.items() if choice.variant is not None}
