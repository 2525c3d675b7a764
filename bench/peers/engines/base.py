"""Interface of an engine that takes part in the benchmark."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.environment import Skip, Workspace
from bench.peers.plan import Settings
from bench.peers.process import Command

__all__ = ["Engine", "Prepared", "Skip", "Variant"]

WORKERS = Path(__file__).resolve().parent.parent / "workers"


@dataclass(frozen=True)
class Variant:
    """An engine at one precision.

    precision: of its weights, "16-bit", "int8" or "int4": it is compared within that row of the table.
    arithmetic: kinds of products that it may use, best first; the first that this CPU has is its limit.
    """

    name: str
    precision: str
    arithmetic: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A model in an engine's own format. weight_bytes: bytes of the weights as they are read from memory."""

    path: Path
    weight_bytes: int


class Engine(ABC):
    """One engine. Its methods raise Skip with one sentence if it cannot take part."""

    name: ClassVar[str]
    variants: ClassVar[tuple[Variant, ...]]
    memory_factor: ClassVar[float] = 1.2
    """Factor in a worker's largest memory: weights times this, plus memory_base."""
    memory_base: ClassVar[int] = 1 << 30
    offline: ClassVar[bool] = False
    """Whether its worker handles "offline" requests whose throughput is worth a figure."""

    def __init__(self, workspace: Workspace, settings: Settings) -> None:
        self.workspace, self.settings = workspace, settings

    @abstractmethod
    def install(self) -> None:
        """Makes the engine's environment; returns at once if it exists."""

    @abstractmethod
    def install_bytes(self) -> int:
        """Bytes on disk that it needs to run a converted model."""

    @abstractmethod
    def prepare(self, model: str, variant: Variant) -> Prepared:
        """Converts the checkpoint of `model`; returns at once if that was done before."""

    def limit(self, variant: Variant, supported: frozenset[str]) -> str:
        """Name of the limit of a variant's products on a CPU with the arithmetic `supported`."""
        return next((name for name in variant.arithmetic if name in supported), "f32")

    @abstractmethod
    def worker(self, prepared: Prepared, variant: Variant) -> Command:
        """Command of its worker script."""

    def server(self, prepared: Prepared, variant: Variant, port: int) -> Command | None:
        """Command of its OpenAI-compatible server on 127.0.0.1; None if it has none."""
        return None

    def native_start(self, prepared: Prepared, variant: Variant) -> Command | None:
        """Command of a program without Python that prints one token and ends; None if there is none."""
        return None

    def resident_bytes(self, prepared: Prepared) -> int:
        """Largest memory of its worker in bytes, to see which workers fit into memory together."""
        return int(prepared.weight_bytes * self.memory_factor) + self.memory_base

    def command(self, python: Path, script: str, prepared: Prepared, **options: Any) -> Command:
        """Command of a worker script with the settings common to all."""
        settings = {
            "model": str(prepared.path),
            "threads": self.settings.threads,
            "max_batch": self.settings.max_batch,
            "max_len": self.settings.max_len,
            **options,
        }
        environment = options.pop("environment", {})
        settings.pop("environment", None)
        return Command((str(python), str(WORKERS / script), json.dumps(settings)), environment)

    @property
    def cpus(self) -> str:
        """List of as many CPUs as threads, such as "0,1"."""
        return ",".join(map(str, sorted(os.sched_getaffinity(0))[: self.settings.threads]))
