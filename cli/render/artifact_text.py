"""Contents of an artifact as text: model, kernels, buckets, weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmc.cli.render.artifact_data import artifact_data
from llmc.cli.render.ranks import ranks_text
from llmc.cli.render.stored_weights import (
    error_column,
)
from llmc.cli.render.text_columns import table
from llmc.cli.render.this_device import code_for, lacks
from llmc.graphs_format import DTYPES, STATES_USES
from llmc.graphs_records import ModelRecord, Tables, layers_differ
from llmc.units import format_bytes

_MOST_SOURCES = 4
# Bytes of a recorded command, as budgets of OpenCL devices count them (kClCommandBytes of cl_graphs.h).
_CL_COMMAND_BYTES = 4096
_CUT_BY = {
    "default": "the default; --max-model-len of llmc compile raises it",
    "option": "by --max-model-len",
    "buckets": "by the largest decode bucket",
}


def _adapter_text(adapters: dict[str, int] | None) -> Iterator[str]:
    if adapters is not None:
        yield (
            f"LoRA adapters: {adapters['slots']} at once of rank {adapters['rank']} or less, "
            f"{format_bytes(adapters['slot_bytes'])} each, of {adapters['layers']} layers; {adapters['commands']} "
            "commands of a graph are theirs"
        )


def _states_text(model: ModelRecord, manifest: dict[str, Any]) -> Iterator[str]:
    if model.takes_states and model.vector_width:
        form = manifest.get("images") or {}
        merged = int(form.get("merge", 0)) ** 2
        rows = f", {merged} of which make a row of {model.vector_width} for its model" if merged else ""
        yield f"images: reads patches of {model.states_width} numbers{rows}; give it as --images of that"
    elif STATES_USES[model.takes_states].startswith("placed"):
        yield f"images: rows of {model.states_width} numbers can take the place of tokens; --images makes them"
    elif model.takes_states:
        few = (manifest.get("model") or {}).get("draft_vocab_size")
        guesses = f", guesses {few} of {model.vocab_size} tokens" if few else ""
        yield f"head: reads hidden states of {model.states_width} numbers{guesses}; give it as --draft of its model"
    elif model.states_width:
        yield f"hidden states of {model.states_width} numbers are left for a head"


def _kv_text(model: ModelRecord, pool: dict[str, int]) -> str:
    text = f"KV pool: {format_bytes(pool['full_context_bytes'])} hold one sequence of {model.max_model_len} tokens"
    if pool["state_bytes"]:
        text += f"; a sequence's states take {format_bytes(pool['state_bytes'])}, and the default pool has "
        text += f"{pool['default_states']} slots for them"
    least = pool["default_max_request_tokens"]
    return text if least == model.max_model_len else f"{text}; the default pool holds {least}: see --kv-bytes"


def _context(max_model_len: int, manifest: dict[str, Any]) -> str:
    """Compares the longest request with the model's own context length; empty if they are equal."""
    context = manifest.get("context")
    if context is None or max_model_len == context["model_len"]:
        return ""
    model_len = context["model_len"]
    if max_model_len > model_len:
        return f" (the model was trained for {model_len})"
    why = _CUT_BY.get(str(context["cut_by"]))
    return f" of the model's {model_len}" + (f" ({why})" if why else "")


def _origin(data: dict[str, Any]) -> Iterator[str]:
    """Lines on the origin of the weights, as far as known."""
    if source := data["source"]:
        yield f"from the hub: {source['repo']} at {source['revision']}"
    if merged := data["merged_lora"]:
        yield f"LoRA adapters merged: {', '.join(adapter['name'] for adapter in merged)}"


def _task(tables: Tables, manifest: dict[str, Any]) -> Iterator[str]:
    """Output of a model that generates no text."""
    width, task = tables.model.vector_width, (manifest.get("model") or {}).get("task")
    if width and not tables.model.takes_states:
        name = f"task {task['name']}: " if task else ""
        whole = ", all of a prompt in one step" if tables.model.whole_prompts else ""
        yield f"{name}vectors of {width}{whole}"


def _here(tables: Tables, folder: Path | None) -> Iterator[str]:
    """Whether this machine has a device for the artifact's code, if that is not for a CPU."""
    from llmc.runtime.binding.devices import Device
    from llmc.runtime.binding.handle import LlmcError

    kind = tables.target.kind
    if kind == "cpu":
        return
    try:
        with Device(kind) as device:
            facts = device.facts
    except LlmcError as error:
        yield f"this machine: no device of kind {kind}: {error}"
        return
    shown = (f"{name} {facts[name]}" for name in ("device", "target", "memory_bytes") if name in facts)
    yield f"this machine: {', '.join(shown)}"
    yield from lacks(facts)
    if folder is not None:
        yield from code_for(facts, tables, folder)


def _recordings(tables: Tables) -> Iterator[str]:
    """Memory of recorded graphs, where it is known before they are recorded."""
    if tables.target.kind == "opencl":
        recorded = _CL_COMMAND_BYTES * sum(graph.num_commands for graph in tables.graphs)
        yield f"recordings of all graphs: about {format_bytes(recorded)} of a device with command buffers"


def _sources(names: list[str]) -> str:
    """Names of the source tensors, shortened: a stack of experts comes from many."""
    more = len(names) - _MOST_SOURCES
    shown = names if more <= 0 else [*names[:_MOST_SOURCES], f"{more} more"]
    return ", ".join(shown) or "-"


def _bits_text(bits: dict[str, float]) -> str:
    """As in `  4.7 bits a weight: w4a8 4.2, w8a8 8.04`; empty for an artifact without shapes."""
    parts = ", ".join(f"{scheme} {value:g}" for scheme, value in bits.items() if scheme != "all")
    return f"  {bits['all']:g} bits a weight of a matrix, scales included: {parts}" if bits else ""


def artifact_text(tables: Tables, manifest: dict[str, Any], folder: Path | None = None) -> str:
    """The artifact as text. folder: where its code is; None if nobody asks whether it runs here."""
    data = artifact_data(tables, manifest)
    model = tables.model
    total = sum(w["bytes"] for w in data["weights"])
    # An encoder's layers share one KV cache in turn, and its tables count just that one.
    layers = (manifest.get("model") or {}).get("num_layers", model.num_layers)
    with_states = set(tables.state_layers)
    differ = layers_differ([one for layer, one in enumerate(tables.kv_layers) if layer not in with_states])
    heads = "KV heads that differ by layer" if differ else f"{model.num_kv_heads} KV heads of {model.head_dim}"
    states = f", {len(with_states)} of them with a state" if with_states else ""
    parts = [
        f"artifact format {data['format_version']}, fingerprint {data['fingerprint'] or 'unknown'}",
        f"target: {tables.target.name}, for devices of kind {tables.target.kind} with level {tables.target.level} or "
        f"more; activations and KV cache lie in {tables.target.layout}",
        *_here(tables, folder),
        f"model: {layers} layers{states}, {heads}, vocabulary "
        f"{model.vocab_size}, up to {model.max_model_len} tokens{_context(model.max_model_len, manifest)} and "
        f"{model.max_num_seqs} sequences",
        f"dtypes: activations {DTYPES[model.act_dtype]}, KV cache {model.kv.name}, blocks of {model.block_size} tokens",
        _kv_text(tables.model, data["kv_pool"]),
        *_task(tables, manifest),
        *_origin(data),
        *_adapter_text(data["adapters"]),
        *_states_text(tables.model, manifest),
        *ranks_text(data["ranks"]),
        *_recordings(tables),
        f"\nbuckets ({len(tables.graphs)}); largest arena {format_bytes(max(g.arena_bytes for g in tables.graphs))}",
        table(
            ("bucket", "tokens", "sequences", "row unit", "commands", "arena bytes"),
            [(g.name, g.max_tokens, g.max_seqs, g.row_unit, g.num_commands, g.arena_bytes) for g in tables.graphs],
        ),
        f"\nkernels ({len(tables.kernels)})",
        table(
            ("kernel", "family", "buffers", "calls"),
            [(k["symbol"], k["family"], k["num_buffers"], k["calls"]) for k in data["kernels"]],
        ),
        f"\nweights ({len(tables.weights)}), {format_bytes(total)}",
        table(
            ("weights of", "scheme", "numbers in", "method", "error", "count", "bits a weight", "bytes"),
            [
                (
                    w["class"],
                    w["scheme"],
                    w["groups"],
                    w["method"],
                    error_column(w),
                    w["count"],
                    f"{w['bits_per_weight']:g}",
                    w["bytes"],
                )
                for w in data["weights_by_class"]
            ],
        ),
        _bits_text(data["bits_per_weight"]),
        "",
        table(
            ("weight", "dtype", "shape", "layout", "bytes", "from"),
            [
                (
                    w["name"],
                    w["dtype"],
                    "x".join(map(str, w["shape"])),
                    w["layout"],
                    w["bytes"],
                    _sources(w["sources"]),
                )
                for w in data["weights"]
            ],
        ),
    ]
    return "\n".join(parts) + "\n"
