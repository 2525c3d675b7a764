"""Cost of padding as text."""

from __future__ import annotations

from typing import Any

from llmc.cli.render.text_columns import table
from llmc.runtime.simulation.figures import between, count, duration


def waste_text(data: dict[str, Any]) -> str:
    """The result of `waste_data` as text."""
    rows = [
        (
            row["bucket"],
            count(row["replays"]),
            duration(row["seconds"]) + between(row.get("seconds_interval"), duration),
            f"{row['padding']:.1%}",
            duration(row["padding_s"]) + between(row.get("padding_s_interval"), duration),
            f"{row['padding_share_of_all']:.2%}",
        )
        for row in data["buckets"]
        if row["replays"]
    ]
    unused = [row["bucket"] for row in data["buckets"] if not row["replays"]]
    wasted = sum(row["padding_s"] for row in data["buckets"])
    share = wasted / data["seconds"] if data["seconds"] else 0.0
    lines = [
        table(("bucket", "steps", "time", "padding", "its time", "of all"), rows),
        "",
        f"padding took {duration(wasted)} of {duration(data['seconds'])} of replays, {share:.1%} ({data['source']})",
    ]
    if "confidence" in data:
        lines.append(f"in brackets: between which ends a time lies in {data['confidence']:.0%} of cases")
    lines += [f"warning: {warning}" for warning in data.get("warnings", ())]
    if unused:
        shown = ", ".join(unused[:8]) + (", …" if len(unused) > 8 else "")
        lines.append(f"{len(unused)} buckets were never used: {shown}")
    return "\n".join(lines) + "\n"
