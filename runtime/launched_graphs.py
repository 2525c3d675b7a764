"""A warning of graphs whose steps launch kernels one by one, since nothing is recorded that could be replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmc.runtime.binding import GraphInfo
from llmc.runtime.binding.statistics import GraphStats

_MOST_NAMED = 8


def launched_graphs(
    graphs: Sequence[GraphInfo], stats: Sequence[GraphStats], device: Mapping[str, int], *, eager: bool
) -> str | None:
    """One sentence; None if there are none, or if they were asked for. device: its statistics."""
    launched = [str(graph.bucket) for graph, one in zip(graphs, stats, strict=True) if one.launched]
    if eager or not launched:
        return None
    many = f"{len(launched)} of {len(graphs)} graphs run as launches of kernels, and their steps are slower"
    if not device.get("records_graphs"):
        return f"{many}: the driver records none, since it lacks cl_khr_command_buffer; use a newer driver"
    names = ", ".join(launched[:_MOST_NAMED]) + (", …" if len(launched) > _MOST_NAMED else "")
    return (
        f"{many}: their recordings have no room on the device ({names}); raise --graph-reserved-memory, or compile "
        "fewer buckets"
    )
