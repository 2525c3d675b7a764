"""A model and its drafting head: two artifacts, side by side."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

from llmc.compiler.beside import check_early, output_beside
from llmc.compiler.config import DEFAULT_LORA_RANK, CompileConfig, CompileReport, Progress, no_progress
from llmc.compiler.draft_vocab import choose_tokens
from llmc.compiler.hub import locate
from llmc.compiler.pipeline import compile_model
from llmc.compiler.store.described import read_described
from llmc.models.loader import check_checkpoint

_MANY_TOKENS, _FEW_TOKENS = 65536, 32768


def compile_with_head(
    config: CompileConfig,
    head: Path | None,
    progress: Progress = no_progress,
    *,
    draft_vocab: int = 0,
    draft_text: str = "",
) -> tuple[CompileReport, CompileReport]:
    """Compiles a model whose graphs leave hidden states, and its head. Returns both reports.

    head: an EAGLE head, by its directory or name on the hub. None: the model's own layer for multi-token prediction.
    draft_vocab: how many tokens the head may guess; 0 for all. draft_text: see `choose_tokens`.

    The head gets a default ladder for the same number of sequences, and the model's precision. Its context is the
    shorter of its own config.json's and the model's. Errors in the head are reported before the model is compiled.
    Raises the errors of `compile_model`.
    """
    found, head = locate(config.model), None if head is None else locate(head).path
    mtp = head is None
    config = replace(config, model=found.path, source=found.source or config.source, mtp=mtp)
    of_head = replace(
        config,
        output=output_beside(config.output, "mtp" if mtp else "eagle"),
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
    source = of_head.open_source()
    longest = source.config().max_position_embeddings
    if draft_vocab:
        tokens = choose_tokens(source.model_files(), source.config(), draft_vocab, draft_text)
        of_head = replace(of_head, draft_tokens=tokens)
    check_early(of_head)
    report = compile_model(replace(config, head=head, leave_states=True), progress)
    made = read_described(config.output).resolved
    length = min(longest, made.max_model_len)
    of_head = replace(of_head, max_num_seqs=made.max_num_seqs, max_model_len=length)
    of_head_report = compile_model(of_head, progress)
    advice = () if draft_vocab else _advice(of_head)
    return report, replace(of_head_report, notes=(*of_head_report.notes, *advice))


def _advice(of_head: CompileConfig) -> tuple[str, ...]:
    """A sentence if a guess spends most of its time on choosing among many tokens."""
    source = of_head.open_source()
    model = source.config()
    if model.draft_vocab_size or model.vocab_size < _MANY_TOKENS:
        return ()
    read = 0
    for target in check_checkpoint(model, source.checkpoint()).targets:
        of_experts = target.matrices > 1 and model.experts is not None
        if target.dtype == "act" and target.name != "embed.weight":
            used = model.experts.top_k / model.experts.count if of_experts and model.experts is not None else 1.0
            read += int(prod(target.shape) * used)
    output = model.vocab_size * model.hidden_size
    whole = read + (output if model.tie_word_embeddings else 0)
    if 2 * output < whole:
        return ()
    return (
        f"of the {whole / 1e6:.0f} million weights that a guess reads, {output / 1e6:.0f} million choose among the "
        f"{model.vocab_size} tokens: --draft-vocab {_FEW_TOKENS} has it choose among the most frequent ones",
    )
