"""One-time work before the first request: a memory budget, and the warm-up of graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.machine import available_memory
from llmc.runtime.warm_up.budget import Budget, BudgetOptions, plan_budget, size_order
from llmc.runtime.warm_up.cut_steps import least_cut_rows
from llmc.runtime.warm_up.device_budget import device_room, plan_on_device
from llmc.runtime.warm_up.tower_memory import tower_memory
from llmc.runtime.warm_up.warm_up import OnWarmStep, WarmPlan, WarmUp

from .binding import Artifact, ArtifactInfo, GraphInfo
from .drafts import draft_memory
from .request_error import RequestError


def decide_budget(
    artifact: Artifact,
    options: BudgetOptions | None,
    num_blocks: int,
    device_options: Mapping[str, Any] | None = None,
    draft: Path | None = None,
    images: Path | None = None,
) -> Budget | None:
    """The budget that `options` request; None without options. device_options: those that select the device. draft:
    artifact of a draft model, images: of what encodes images; both are budgeted, too. Raises BudgetError, RequestError
    if blocks are given, and LlmcError without the device."""
    if options is None:
        return None
    if num_blocks:
        raise RequestError(f"num_blocks {num_blocks} leaves a budget nothing to decide: give kv_bytes instead")
    graphs = artifact.graphs()
    room = device_room(artifact.info, device_options or {})
    beside, tower = draft_memory(draft), tower_memory(images)
    if room is not None:
        return plan_on_device(artifact.info, graphs, size_order(graphs), room, options, beside, tower)
    cut_rows = least_cut_rows(artifact.path, artifact.info, device_options or {})
    order, free = size_order(graphs), available_memory()
    return plan_budget(artifact.info, graphs, order, free, options, beside, cut_rows, tower)


def warm(
    engine: Any,
    graphs: list[GraphInfo],
    info: ArtifactInfo,
    budget: Budget | None,
    *,
    skip: bool,
    seconds: float,
    on_step: OnWarmStep | None,
) -> WarmUp:
    """Disables the graphs that the budget drops, and warms the others unless `skip`."""
    dropped = frozenset(() if budget is None else budget.dropped)
    order = tuple(index for index in size_order(graphs) if index not in dropped)
    plan = WarmPlan(order, len(order), dropped=dropped, replay_s=seconds, skipped=skip)
    warm_up = WarmUp(
        *(engine, graphs, plan),
        block_size=int(info.block_size),
        max_model_len=int(info.max_model_len),
        before=engine.warm_draft if engine.has_draft else None,
    )
    warm_up.restrict()
    warm_up.run(on_step)
    return warm_up
