"""The memory budget of a device with its own memory, such as a GPU: every graph is kept.

There, too, all graphs share one arena. A graph without a recording runs as separate kernel launches: slower, with the
same bits. The share for graphs therefore holds the arena and, in what is left of it, the recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.machine import available_memory
from llmc.runtime.binding import ArtifactInfo, GraphInfo
from llmc.runtime.binding.devices import DEVICE_OPTIONS, Device
from llmc.runtime.warm_up.budget import (
    Budget,
    BudgetError,
    BudgetOptions,
    Recordings,
    draft_text,
    fewer_states,
    graph_set_bytes,
    kv_text,
    least_kv_of,
    most_kv,
    size_text,
    tower_text,
)
from llmc.runtime.warm_up.draft_memory import DraftMemory, kv_beside_draft

_FREE, _WHOLE, _OF_HOST = "free_memory_bytes", "memory_bytes", "host_memory"
_MIB = 1 << 20


@dataclass(frozen=True)
class DeviceRoom:
    """Memory of a device, in bytes. free: what is free of it, or all of it if the device does not say. offloaded:
    weights that are in the host's memory instead, less what the device needs to stream them."""

    free: int
    offloaded: int = 0


def _offloaded(weight_bytes: int, options: Mapping[str, Any]) -> int:
    """What a device surely saves: the ring has at most a quarter of what is offloaded, and small weights stay."""
    ring = int(options.get("offload_ring_mib") or 0) * _MIB
    return min(int(options.get("offload_mib") or 0) * _MIB, max(0, weight_bytes - ring) * 2 // 3)


def device_room(info: ArtifactInfo, options: Mapping[str, Any]) -> DeviceRoom | None:
    """The room of the device that `options` choose for an artifact. None for a device of the CPU, which has no
    recordings to budget. Raises LlmcError if the device does not exist."""
    names = DEVICE_OPTIONS.get(info.target_kind, {})
    if "graph_mib" not in names:
        return None
    given = {names[name]: value for name, value in options.items() if name in names and value is not None}
    if "device" in given:  # of rank 0, whose device all others are like
        given["device"] = str(given["device"]).split(",")[0]
    with Device(info.target_kind, given) as device:
        facts = device.facts
    found = facts.get(_FREE, facts.get(_WHOLE, ""))
    if not found.isdecimal():
        return None
    if facts.get(_OF_HOST) == "yes":  # offloaded weights are in the same memory
        return DeviceRoom(min(int(found), available_memory()))
    return DeviceRoom(int(found), _offloaded(info.rank_weight_bytes, options))


def _host_text(room: DeviceRoom) -> str:
    return f" beside {size_text(room.offloaded)} on the host" if room.offloaded else ""


def plan_on_device(
    info: ArtifactInfo,
    graphs: Sequence[GraphInfo],
    order: Sequence[int],
    room: DeviceRoom,
    options: BudgetOptions,
    draft: DraftMemory | None = None,
    tower_bytes: int = 0,
) -> Budget:
    """Decides under the free bytes of the device. order: all graphs by index, the ones to record first. tower_bytes: of
    what encodes images there. Raises BudgetError."""
    free = room.free
    usable = int(free * options.utilization)
    for_draft = 0 if draft is None else draft.fixed
    weight_bytes = info.rank_weight_bytes - room.offloaded  # of several ranks, each has a device
    left = usable - weight_bytes - for_draft - tower_bytes
    shared = graph_set_bytes(graphs, info.vocab_size, states_width=info.states_width)
    least_kv = least_kv_of(info, options, draft)
    held = f"the draft's weights and graphs ({for_draft}), " if for_draft else ""
    held += f"what encodes images ({tower_bytes}), " if tower_bytes else ""
    if left < shared + least_kv:
        raise BudgetError(
            f"memory-utilization {options.utilization:g} of the device's {free} free bytes is {usable}, but weights "
            f"({weight_bytes}), {held}what graphs share ({shared}) and the KV cache of one sequence "
            f"({least_kv}) need {usable - left + shared + least_kv}: raise it{fewer_states(options)}, "
            "free memory of the device, or choose another one"
        )
    # No graph is lost without its recording: they give way to the KV cache of one sequence.
    recorded = max(0, min(int(left * options.graph_reserved), left - least_kv) - shared)
    mib = recorded // _MIB
    prompt_mib = round(mib * options.graph_prompt_ratio)
    kv_bytes = kv_beside_draft(left - shared - recorded, info, draft)
    if options.kv_bytes > kv_bytes:
        raise BudgetError(
            f"kv-bytes {options.kv_bytes} is more than the {kv_bytes} that weights and graphs leave of "
            f"memory-utilization {options.utilization:g}: lower one or raise the other"
        )
    kv_bytes = options.kv_bytes or most_kv(kv_bytes, info)
    lines = (
        f"{size_text(free)} free on the device, memory-utilization {options.utilization:g}: {size_text(usable)} to use",
        f"weights {size_text(weight_bytes)}{_host_text(room)}{draft_text(draft)}{tower_text(tower_bytes)}, "
        f"{size_text(left)} left",
        f"{len(graphs)} graphs share {size_text(shared)}; graph-reserved-memory {options.graph_reserved:g} leaves "
        f"{size_text(recorded)} for their recordings, of which graph-prompt-ratio {options.graph_prompt_ratio:g} gives "
        f"{prompt_mib} MiB to prompts and {mib - prompt_mib} MiB to decode; graphs beyond it run as launches of "
        "kernels",
        kv_text(kv_bytes, info, options, draft),
    )
    return Budget(tuple(range(len(graphs))), (), shared, kv_bytes, lines, Recordings(mib, prompt_mib, tuple(order)))
