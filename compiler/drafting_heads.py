"""A model and its drafting head: two artifacts, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmc.compiler.config import DEFAULT_LORA_RANK, CompileConfig, CompileReport, Progress, no_progress
from llmc.compiler.hub import locate
from llmc.compiler.pipeline import compile_model
from llmc.compiler.store.described import read_described


def head_output(output: Path, kind: str) -> Path:
    """Path of the artifact of a head of this kind, beside the model's: `llama-eagle.llmc` beside `llama.llmc`."""
    return output.with_name(f"{output.stem}-{kind}{output.suffix}")


def compile_with_head(
    config: CompileConfig, head: Path | None, progress: Progress = no_progress
) -> tuple[CompileReport, CompileReport]:
    """Compiles a model whose graphs leave hidden states, and its head. Returns both reports.

    head: an EAGLE head, by its directory or name on the hub. None: the model's own layer for multi-token prediction.

    The head gets a default ladder for the same number of sequences, and the model's precision. Its context is the
    shorter of its own config.json's and the model's. Errors in the head are reported before the model is compiled.
    Raises the errors of `compile_model`.
    """
    found, head = locate(config.model), None if head is None else locate(head).path
    mtp = head is None
    config = replace(config, model=found.path, source=found.source or config.source, mtp=mtp)
    of_head = replace(
        config,
        output=head_output(config.output, "mtp" if mtp else "eagle"),
        head=head,
        buckets=None,
        max_num_batched_tokens=None,
        speculate=0,
        lora_slots=None,
        lora_rank=DEFAULT_LORA_RANK,
        lora_experts=False,
        kv_scales=None,
        dump=None,
    )
    longest = of_head.open_source().config().max_position_embeddings
    report = compile_model(replace(config, head=head, leave_states=True), progress)
    made = read_described(config.output).resolved
    length = min(longest, made.max_model_len)
    of_head = replace(of_head, max_num_seqs=made.max_num_seqs, max_model_len=length)
    return report, compile_model(of_head, progress)
