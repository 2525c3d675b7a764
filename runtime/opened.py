"""Opens an artifact for `LLM` and `AsyncLLM`: options, memory budget, engine, adapters, warm-up."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmc.runtime.images.tower import Tower, open_tower, tower_options
from llmc.runtime.misses.background import OnBucketNews
from llmc.runtime.misses.options import MissOptions, MissPolicy
from llmc.runtime.warm_up.budget import Budget, budget_of
from llmc.runtime.warm_up.warm_up import REPLAY_S, OnWarmStep

from .binding import WEIGHT_MEMORY, Artifact, ArtifactInfo, GraphInfo
from .frontend import Frontend
from .opening import decide_budget, warm
from .request_error import RequestError
from .size_option import size_option
from .speculation import Speculation, parse_speculation

log = logging.getLogger("llmc")
WeightMemory = Literal["auto", "mapped", "copied"]


@dataclass(frozen=True)
class Opening:
    """The inputs of an engine. engine_options: for the binding's `Engine`, with the budget's decisions. images:
    artifact of the tower."""

    misses: MissOptions
    speculation: Speculation
    chat_template: str | None
    engine_options: Mapping[str, Any]
    images: Path | None = None

    def tower(self, path: Path, info: ArtifactInfo) -> Tower | None:
        """The tower for the opened artifact `path`; None without images. Raises as `open_tower`."""
        return None if self.images is None else open_tower(self.images, info, path, tower_options(self.engine_options))


@dataclass(frozen=True)
class OpenedEngine:
    """An engine that can be warmed up."""

    engine: Any
    graphs: list[GraphInfo]
    info: ArtifactInfo


class Opened(Frontend, ABC):
    """An opened artifact with its own engine. The options are documented at `LLM`."""

    def __init__(
        self,
        path: str | Path,
        *,
        num_threads: int = 0,
        pin_threads: bool = True,
        idle_spin_us: int = 1000,
        max_num_seqs: int = 0,
        max_tokens_per_step: int = 0,
        max_waiting: int = 0,
        priority_patience: int = 0,
        num_blocks: int = 0,
        kv_bytes: int | str = 0,
        num_states: int = 0,
        swap_bytes: int | str = 0,
        prefix_cache: bool = True,
        speculate: str | None = None,
        draft: str | Path | None = None,
        miss_policy: MissPolicy = "larger",
        record_misses: str | Path | None = None,
        on_bucket_news: OnBucketNews | None = None,
        weight_memory: WeightMemory = "auto",
        device_options: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        memory_utilization: float | None = None,
        graph_reserved_memory: float | None = None,
        graph_prompt_ratio: float | None = None,
        skip_warmup: bool = True,
        warmup_seconds: float = REPLAY_S,
        on_warm_step: OnWarmStep | None = None,
        lora: Mapping[str, str | Path] | None = None,
        images: str | Path | None = None,
    ) -> None:
        record = None if record_misses is None else Path(record_misses)
        misses = MissOptions(miss_policy, record, on_bucket_news)
        speculation = parse_speculation(speculate, draft)
        if weight_memory not in WEIGHT_MEMORY:
            raise RequestError(f"weight memory {weight_memory!r} is unknown: use {', '.join(WEIGHT_MEMORY)}")
        pool_bytes = size_option("kv_bytes", kv_bytes)
        budget = budget_of(
            *(memory_utilization, graph_reserved_memory, graph_prompt_ratio, pool_bytes),
            max_num_seqs=max_num_seqs,
            num_states=num_states,
        )
        tower = None if images is None else Path(images)
        found = self._artifact_path(Path(path))
        self.budget: Budget | None = None
        if budget is not None:
            with Artifact(found) as artifact:
                self.budget = decide_budget(artifact, budget, num_blocks, device_options, speculation.draft, tower)
        engine_options = {
            "num_threads": num_threads,
            "pin_threads": pin_threads,
            "idle_spin_us": idle_spin_us,
            "max_num_seqs": max_num_seqs,
            "max_tokens_per_step": max_tokens_per_step,
            "max_waiting": max_waiting,
            "priority_patience": priority_patience,
            "num_blocks": num_blocks,
            "num_states": num_states,
            "kv_bytes": pool_bytes if self.budget is None else self.budget.kv_bytes,
            "swap_bytes": size_option("swap_bytes", swap_bytes),
            "prefix_cache": prefix_cache,
            "weight_memory": weight_memory,
            **({} if self.budget is None else self.budget.device_options),
            **(device_options or {}),
        }
        opening = Opening(misses, speculation, chat_template, engine_options, tower)
        opened = self._open_engine(found, opening)
        try:
            for name, adapter in (lora or {}).items():
                self.adapters.load(name, Path(adapter))
            self.warm_up = warm(
                *(opened.engine, opened.graphs, opened.info, self.budget),
                skip=skip_warmup,
                seconds=warmup_seconds,
                on_step=on_warm_step,
            )
            self._begin(opening)
        except BaseException:
            self._abandon()
            raise
        if self.limit.warning is not None:
            log.warning("warning: %s", self.limit.warning)

    @staticmethod
    def _artifact_path(path: Path) -> Path:
        """The artifact that a path stands for."""
        return path

    @abstractmethod
    def _open_engine(self, path: Path, opening: Opening) -> OpenedEngine:
        """Opens the artifact `path`, and sets up the attributes of `Frontend`. Leaves nothing open if it raises."""

    @abstractmethod
    def _begin(self, opening: Opening) -> None:
        """Called when the engine is warm."""

    @abstractmethod
    def _abandon(self) -> None:
        """Closes everything that `_open_engine` opened."""
