"""The ladder of a CompileConfig, and the limits that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc.buckets import BucketError, BucketLadder, LadderVariables, Limits, default_ladder, parse_spec
from llmc.buckets.bucket import REQUIRED_PHASES, beyond, check_total
from llmc.buckets.ladder import DEFAULT_MAX_NUM_SEQS, default_tokens
from llmc.compiler.config import MAX_NUM_SEQS, CompileConfig, CompileError


@dataclass(frozen=True, slots=True)
class LadderLimits:
    """The limits of a ladder. max_num_batched_tokens: most new tokens of a prefill or mixed bucket."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    max_num_batched_tokens: int


def cut_to_step(config: CompileConfig, limits: LadderLimits, longest: int) -> LadderLimits:
    """Limits for a model that reads its prompt in one step. Raises CompileError if longer prompts were requested."""
    if config.max_model_len is not None:
        raise CompileError(
            f"the largest prefill bucket holds {longest} tokens of a prompt, which this model reads in one step, but "
            f"max-model-len is {config.max_model_len}; add a bucket or lower --max-model-len"
        )
    return replace(limits, max_model_len=longest)


def resolve_ladder(
    config: CompileConfig,
    block_size: int,
    default_len: int,
    trained_len: int,
    phases: tuple[str, ...] = REQUIRED_PHASES,
) -> tuple[LadderLimits, BucketLadder]:
    """The ladder of a model trained for contexts of trained_len tokens, and its limits, for KV blocks of block_size.

    Limits not given follow the ladder, or default_len if the ladder leaves them open. phases: of the ladder. Raises
    BucketError, and CompileError for a ladder that does not reach max_model_len.
    """
    max_model_len = config.max_model_len or default_len
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    tokens = config.max_num_batched_tokens
    limits = Limits(max_num_seqs, max_model_len, block_size, tokens)
    if config.buckets is None:
        ladder = default_ladder(max_num_seqs, max_model_len, block_size, tokens, phases)
    elif isinstance(config.buckets, LadderVariables):
        ladder = config.buckets.ladder(limits, phases)
    else:
        ladder = parse_spec(config.buckets, limits, phases)
    if tokens is None:
        tokens = max(bucket.max_tokens for bucket in (*ladder.prefill, *ladder.mixed))
        if not isinstance(config.buckets, str):
            tokens = default_tokens(max_model_len)
    if config.buckets is not None:
        _check_reach(config, block_size, ladder, trained_len)
        max_num_seqs = min(config.max_num_seqs or MAX_NUM_SEQS, ladder.max_batch)
        max_model_len = min(trained_len, ladder.max_context) if config.max_model_len is None else config.max_model_len
    return LadderLimits(max_num_seqs, max_model_len, block_size, tokens), ladder


def _check_reach(config: CompileConfig, block_size: int, ladder: BucketLadder, trained_len: int) -> None:
    """Raises BucketError for a bucket that no request could fill, CompileError for a limit that no bucket reaches."""
    max_num_seqs = config.max_num_seqs or min(max(ladder.max_batch, DEFAULT_MAX_NUM_SEQS), MAX_NUM_SEQS)
    max_model_len = config.max_model_len or trained_len
    source = f"{config.buckets.names}: " if isinstance(config.buckets, LadderVariables) else ""
    for bucket in ladder:
        # Rows of a decode step are sequences, each with its draft tokens.
        most = max_num_seqs * (1 + config.speculate) if bucket.phase == "decode" else max_num_seqs
        check_total(bucket, block_size)
        excess = beyond(bucket, most, max_model_len, block_size)
        if excess == "batch":
            raise BucketError(
                f"{source}bucket {bucket} holds {bucket.batch} sequences but max-num-seqs is {max_num_seqs}: lower it "
                "or raise --max-num-seqs"
            )
        if excess == "seq":
            given = config.max_model_len is not None
            why = f"max-model-len is {max_model_len}" if given else f"the model was made for {max_model_len}"
            least = -(-bucket.seq // bucket.batch) if bucket.phase == "mixed" or bucket.total else bucket.seq
            raise BucketError(
                f"{source}bucket {bucket} holds {bucket.seq} tokens but {why}: lower it, or give "
                f"--max-model-len {least}"
            )
    if ladder.decode and config.max_model_len is not None and ladder.max_context < config.max_model_len:
        raise CompileError(
            f"the largest decode bucket holds {ladder.max_context} tokens of context but max-model-len is "
            f"{config.max_model_len}; add a decode bucket or lower --max-model-len"
        )
