"""Writes each phase's result as readable text: `llmc compile --dump DIR`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.compiler.graph.commands import CommandList, Operand
    from llmc.compiler.state import CompileState


def settings(state: CompileState, folder: Path) -> None:
    """settings.json: the request, with every automatic choice resolved."""
    (folder / "settings.json").write_text(json.dumps(state.manifest, indent=1, default=str) + "\n", encoding="utf-8")


def traced(state: CompileState, folder: Path) -> None:
    """exported.txt: the program that torch traced. lowered.txt: Relax with llmc's ops, after quantization. sites.txt:
    their sites."""
    exported = state.tracer.exported
    if exported is not None:
        (folder / "exported.txt").write_text(f"{exported.program}\n", encoding="utf-8")
    lowered = state.tracer.lowered
    (folder / "lowered.txt").write_text(f"{lowered.module.script()}\n", encoding="utf-8")
    sites = [
        f"llmc_site_{number}: {site.op} {json.dumps(site.attributes, default=str)}, of {', '.join(site.tensors)}"
        for number, site in enumerate(lowered.sites)
    ]
    (folder / "sites.txt").write_text("\n".join(sites) + "\n", encoding="utf-8")


def graphs(state: CompileState, folder: Path) -> None:
    """Per distinct graph, named after its first bucket: BUCKET.bound.txt, with rows bound and memory planned, and
    BUCKET.commands.txt."""
    from llmc.compiler.graph.passes import bind_bucket

    seen: set[int] = set()
    for bucket, (shape, commands) in state.graphs.items():
        if id(commands) in seen:
            continue
        seen.add(id(commands))
        name = str(bucket).replace(":", "-")
        bound = bind_bucket(state.tracer.lowered.module, shape.tokens, shape.samples)
        (folder / f"{name}.bound.txt").write_text(f"{bound.script()}\n", encoding="utf-8")
        (folder / f"{name}.commands.txt").write_text(_listed(commands), encoding="utf-8")


def _listed(commands: CommandList) -> str:
    lines = [f"arena of {commands.arena_bytes} bytes"]
    for number, command in enumerate(commands.commands):
        layer = "" if command.layer < 0 else f" KV layer {command.layer}"
        lines.append(f"{number:4d} {command.spec.symbol()}{layer}: {', '.join(map(_operand, command.operands))}")
    return "\n".join(lines) + "\n"


def _operand(operand: Operand) -> str:
    if operand.kind == "arena":
        return f"arena[{operand.offset}:{operand.offset + operand.nbytes}]"
    return f"{operand.kind} {operand.name or operand.layer}" if operand.kind != "output" else "logits"


def choices(state: CompileState, folder: Path) -> None:
    """choices.json: the schedule and speed-up of each measured kernel."""
    found = {spec.symbol(): {"variant": c.variant, "gain": c.gain} for spec, c in state.choices.items()}
    (folder / "choices.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def kernels(state: CompileState, folder: Path) -> None:
    """Per kernel: SYMBOL.json with its parameters, and the target's listings, as SYMBOL.tir.txt and SYMBOL.asm."""
    variants = state.variants
    for kernel in state.kernels:
        spec = kernel.spec
        about = {"family": spec.family, "op": spec.op, "params": spec.as_dict(), "variant": variants.get(spec)}
        (folder / f"{spec.symbol()}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for ending, text in state.resolved.target.listings(spec, variants.get(spec)).items():
            (folder / f"{spec.symbol()}.{ending}").write_text(text, encoding="utf-8")


def weights(state: CompileState, folder: Path) -> None:
    """layout.txt: each tensor of weights.safetensors, with offset and layout."""
    lines = [
        f"{w.file_offset:12d} {w.nbytes:12d} {w.dtype:4} {w.layout:10} {'x'.join(map(str, w.shape)):20} {w.name}"
        for w in state.layout.weights
    ]
    (folder / "layout.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
