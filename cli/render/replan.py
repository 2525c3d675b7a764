"""A proposal of buckets as text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llmc.buckets.replanning.proposal import Proposal
from llmc.cli.render.text_columns import table
from llmc.runtime.simulation.figures import count, duration
from llmc.units import format_bytes


def replan_text(proposal: Proposal, state: Mapping[str, Any] | None = None) -> str:
    """The text. state: state of the server that the proposal is for."""
    lines = []
    if proposal.changes:
        rows = [
            (
                change.action,
                str(change.bucket),
                count(change.steps),
                "–" if change.saved_s is None else duration(change.saved_s),
                f"{change.saved_tokens:,.1f}",
                "compiled" if change.compiled else duration(change.compile_s) if change.action == "add" else "",
                format_bytes(change.bytes) if change.action == "add" else "",
            )
            for change in proposal.changes
        ]
        lines += [table(("change", "bucket", "steps", "time saved", "padding saved", "compile", "memory"), rows), ""]
        lines.append("time and tokens of padding saved are those of a mean step that changes its bucket")
    lines.append(proposal.line())
    if proposal.seconds_now is not None and proposal.seconds_then is not None and proposal.seconds_now > 0:
        lines.append(
            f"all steps: {duration(proposal.seconds_now)}, then {duration(proposal.seconds_then)}; "
            f"padding {count(proposal.padding_now)} tokens, then {count(proposal.padding_then)}"
        )
    else:
        lines.append(f"padding: {count(proposal.padding_now)} tokens, then {count(proposal.padding_then)}")
    if proposal.compile_s:
        lines.append(f"compiling takes about {duration(proposal.compile_s)} from an empty cache")
    if state is not None:
        lines += _server(state)
    return "\n".join(lines) + "\n"


def _server(state: Mapping[str, Any]) -> list[str]:
    lines = ["", f"the server: --replan {state['mode']}, {len(state['on'])} graphs in use, {len(state['off'])} off"]
    for one in state["decisions"][-10:]:
        named = ", ".join([*(f"+{text}" for text in one["added"]), *(f"-{text}" for text in one["retired"])])
        at = time.strftime("%H:%M:%S", time.localtime(one["time"]))
        lines.append(f"  {at}  {one['kind']}  {named}  {one['reason']}".rstrip())
    return lines
