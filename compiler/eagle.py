"""A model and its EAGLE drafting head: two artifacts, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmc.compiler.config import DEFAULT_LORA_RANK, CompileConfig, CompileReport, Progress, no_progress
from llmc.compiler.hub import locate
from llmc.compiler.pipeline import compile_model
from llmc.compiler.store.described import read_described


def head_output(output: Path) -> Path:
    """Path of the head's artifact, beside the model's: `llama-eagle.llmc` beside `llama.llmc`."""
    return output.with_name(f"{output.stem}-eagle{output.suffix}")


def compile_with_head(
    config: CompileConfig, head: Path, progress: Progress = no_progress
) -> tuple[CompileReport, CompileReport]:
    """Compiles a model whose graphs leave hidden states, and its head (a directory or hub name). Returns both reports.

    The head gets a default ladder for the same number of sequences, and the model's precision. Its context is the
    shorter of its own config.json's and the model's. Errors in the head are reported before the model is compiled.
    Raises the errors of `compile_model`.
    """
    found, head = locate(config.model), locate(head).path
    config = replace(config, model=found.path, source=found.source or config.source)
    of_head = replace(
        config,
        output=head_output(config.output),
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
