"""The memory budget of a device with its own memory, such as a GPU: every graph is kept.

There, too, all graphs share one arena. A graph whose instance does not fit runs as separate kernel launches: slower,
with the same bits. The share for graphs therefore holds the arena and, in what is left of it, the instances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmc.runtime.binding import ArtifactInfo, GraphInfo
from llmc.runtime.binding.devices import DEVICE_OPTIONS, Device
from llmc.runtime.warm_up.budget import (
    Budget,
    BudgetError,
    BudgetOptions,
    draft_kv_text,
    draft_text,
    graph_set_bytes,
    size_text,
)
from llmc.runtime.warm_up.draft_memory import DraftMemory, kv_beside_draft

_FREE = "free_memory_bytes"


def device_memory(kind: str, options: Mapping[str, Any]) -> int | None:
    """Free bytes of the device that `options` choose. None for a device that computes in host memory or does not report
    it. Raises LlmcError if the device does not exist."""
    names = DEVICE_OPTIONS.get(kind, {})
    if "graph_mib" not in names:
        return None
    given = {names[name]: value for name, value in options.items() if name in names and value is not None}
    if "device" in given:  # of rank 0, whose device all others are like
        given["device"] = str(given["device"]).split(",")[0]
    with Device(kind, given) as device:
        free = device.facts.get(_FREE, "")
    return int(free) if free.isdecimal() else None


def plan_on_device(
    info: ArtifactInfo,
    graphs: Sequence[GraphInfo],
    free: int,
    options: BudgetOptions,
    draft: DraftMemory | None = None,
) -> Budget:
    """Decides under `free` bytes of the device. Raises BudgetError."""
    usable = int(free * options.utilization)
    for_draft = 0 if draft is None else draft.fixed
    weight_bytes = info.rank_weight_bytes  # of several ranks, each has a device
    left = usable - weight_bytes - for_draft
    shared = graph_set_bytes(graphs, info.vocab_size)
    least_blocks = -(-info.max_model_len // info.block_size) + 1
    least_kv = least_blocks * info.kv_block_bytes
    if draft is not None:
        least_kv += draft.kv(least_blocks * info.block_size)
    held = f"the draft's weights and graphs ({for_draft}), " if for_draft else ""
    if left < shared + least_kv:
        raise BudgetError(
            f"memory-utilization {options.utilization:g} of the device's {free} free bytes is {usable}, but weights "
            f"({weight_bytes}), {held}what graphs share ({shared}) and the KV cache of one sequence "
            f"({least_kv}) need {weight_bytes + for_draft + shared + least_kv}: raise it, free memory of the "
            "device, or choose another one"
        )
    # No graph is lost without its instance: they give way to the KV cache of one sequence.
    instances = max(0, min(int(left * options.graph_reserved), left - least_kv) - shared)
    kv_bytes = kv_beside_draft(left - shared - instances, info, draft)
    if options.kv_bytes > kv_bytes:
        raise BudgetError(
            f"kv-bytes {options.kv_bytes} is more than the {kv_bytes} that weights and graphs leave of "
            f"memory-utilization {options.utilization:g}: lower one or raise the other"
        )
    kv_bytes = options.kv_bytes or kv_bytes
    blocks = max(0, kv_bytes // info.kv_block_bytes - 1)
    tokens = blocks * info.block_size
    lines = (
        f"{size_text(free)} free on the device, memory-utilization {options.utilization:g}: {size_text(usable)} to use",
        f"weights {size_text(weight_bytes)}{draft_text(draft)}, {size_text(left)} left",
        f"{len(graphs)} graphs share {size_text(shared)}; graph-reserved-memory {options.graph_reserved:g} leaves "
        f"{size_text(instances)} for their instances, and those beyond it run as launches of kernels",
        f"KV cache {size_text(kv_bytes)}: {blocks} blocks of {info.block_size} tokens, {tokens} tokens, "
        f"{tokens / info.max_model_len:.1f} sequences of {info.max_model_len}" + draft_kv_text(draft, tokens),
    )
    return Budget(tuple(range(len(graphs))), (), shared, kv_bytes, lines, instances >> 20)
