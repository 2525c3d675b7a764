"""What a compilation is asked to do, and what it reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets import LadderVariables
from llmc.buckets.verify import MAX_GUESSES
from llmc.compiler.dtypes import FLOATS
from llmc.kv_dtypes import KV_DTYPES
from llmc.quantize import QuantConfig
from llmc.task_names import POOLINGS, TASKS

if TYPE_CHECKING:
    from llmc.models.sources.base import ModelSource

MAX_NUM_SEQS = 4096
DEFAULT_LORA_RANK = 16
"""As vLLM's --max-lora-rank."""

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total); a phase starts with (0, 0), which says that its extent is not known yet, and ends
with done = total."""


class CompileError(Exception):
    """A compilation that cannot go on; the message is one sentence that says what to do."""


def no_progress(phase: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


@dataclass(frozen=True)
class HubSource:
    """A commit of a model on the Hugging Face hub: its bytes are the same wherever it is downloaded."""

    repo: str
    revision: str


@dataclass(frozen=True)
class CompileConfig:
    """One call of the compiler.

    dtype: "auto", "f32", "bf16" or "f16"; auto follows the checkpoint (f32 → f32, f16 and bf16 → bf16). kv_dtype:
    "auto", as dtype, or one of KV_DTYPES. kv_scales: a file with scales of the KV cache, None: those of the checkpoint,
    or none. merge_lora: directories of LoRA adapters that are merged into the weights. lora_slots: most adapters that
    are loaded at once when it runs, None: none can be; lora_rank: the largest of one. speculate: guesses of a sequence
    that a decode step can check with all sequences running, 0: what the ladder has room for. tensor_parallel: ranks
    among which the model is divided, which run each step together; 1: it is not. expert_parallel: each of them holds
    whole experts. quant: how linear weights are quantized, None: not. buckets: a spec, variables of the environment, or
    None: the default ladder. max_model_len in tokens, None: the longest context of the ladder, at most the model's;
    where nothing says otherwise the model's, at most 4096. max_num_seqs None: the largest decode batch, or 16.
    max_num_batched_tokens: most new tokens of a prefill or mixed bucket, None: any number in a spec, elsewhere
    max(2048, max_model_len). jobs: compiling processes, 0: one a CPU. tune_for: what the speed of this machine depends
    on, by name, where schedules of kernels are to be measured on it; None: they are not. tokenizer: "required", "auto"
    (copied where the model has one, which must be sound) or "none" (the artifact takes token ids alone). overwrite: an
    artifact of another model or other options at `output` is replaced. source: what of the hub `model` holds, None
    where it does not come from there. dump: a new directory for what each phase makes, as text; None: nothing.
    allow_unknown_config: what the model's configuration says that llmc does not know is ignored, with a warning, not
    refused. task: "generate", "embed", "rank" or "classify"; "auto": what the model's files say it is for. pooling: of
    embeddings, "mean", "cls" or "last"; "auto": as the model's files say. leave_states: graphs leave the hidden states
    of rows for a head that guesses. head: the directory of such a head, which is compiled in the place of the model;
    None: the model is.
    """

    model: Path
    output: Path
    buckets: str | LadderVariables | None = None
    target: str = "native"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_scales: Path | None = None
    merge_lora: tuple[Path, ...] = ()
    lora_slots: int | None = None
    lora_rank: int = DEFAULT_LORA_RANK
    speculate: int = 0
    tensor_parallel: int = 1
    expert_parallel: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 32
    jobs: int = 0
    quant: QuantConfig | None = None
    cache_dir: Path | None = None
    tune_for: Mapping[str, str] | None = None
    tokenizer: str = "auto"
    overwrite: bool = False
    source: HubSource | None = None
    dump: Path | None = None
    allow_unknown_config: bool = False
    task: str = "auto"
    pooling: str = "auto"
    leave_states: bool = False
    head: Path | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, ("auto", *FLOATS)),
            ("kv_dtype", self.kv_dtype, ("auto", *KV_DTYPES)),
        ):
            if value not in known:
                raise CompileError(f"{name} {value!r} is not one of {', '.join(known)}")
        if self.task not in TASKS:
            raise CompileError(f"task {self.task!r} is not one of {', '.join(TASKS)}")
        if self.pooling not in POOLINGS:
            raise CompileError(f"pooling {self.pooling!r} is not one of {', '.join(POOLINGS)}")
        if self.tokenizer not in ("auto", "required", "none"):
            raise CompileError(f"tokenizer {self.tokenizer!r} is not one of auto, required, none")
        if self.block_size < 16 or self.block_size % 16:
            raise CompileError(f"block size {self.block_size} must be a positive multiple of 16")
        if self.max_num_seqs is not None and not 1 <= self.max_num_seqs <= MAX_NUM_SEQS:
            raise CompileError(f"max-num-seqs {self.max_num_seqs} must be between 1 and {MAX_NUM_SEQS}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            raise CompileError(f"max-num-batched-tokens {self.max_num_batched_tokens} must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise CompileError(f"max-model-len {self.max_model_len} must be at least 1")
        if not 0 <= self.speculate <= MAX_GUESSES:
            raise CompileError(f"speculate {self.speculate} must be between 0 and {MAX_GUESSES} guesses")
        if self.expert_parallel and self.tensor_parallel == 1:
            raise CompileError("--expert-parallel divides experts among ranks: add --tensor-parallel N")
        if self.tensor_parallel < 1:
            raise CompileError(f"tensor-parallel {self.tensor_parallel} must be at least 1 rank")
        if self.jobs < 0:
            raise CompileError(f"jobs {self.jobs} must be 0 (one a CPU) or more")

    def open_source(self) -> ModelSource:
        """The model, with its adapters, as it does the task. Raises ModelError."""
        # Here, for whoever reads a cache needs no numpy types.
        from llmc.models.sources.registry import open_head, open_source

        model = open_source(
            self.model,
            self.merge_lora,
            allow_unknown_config=self.allow_unknown_config,
            task=self.task,
            pooling=self.pooling,
        )
        return model if self.head is None else open_head(self.head, model)

    def num_jobs(self) -> int:
        return self.jobs or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class CompileReport:
    """What was built: counts, bytes, seconds by phase.

    peak_memory_bytes: largest sum of the resident memory of the compiler and the processes it started. tuned: of
    kernels with a measured schedule, how many times as fast it was, by symbol. max_model_len, model_len: tokens of a
    request, at most, and of the longest text that the model was made for. warnings: sentences about what a user may not
    have meant; notes: about what was done that the model does not say.
    """

    artifact: Path
    target: str
    num_prefill_graphs: int
    num_decode_graphs: int
    num_mixed_graphs: int
    num_kernels: int
    kernels_compiled: int
    kernels_cached: int
    code_bytes: int
    weight_bytes: int
    arena_bytes: int
    peak_memory_bytes: int
    phase_seconds: dict[str, float] = field(default_factory=dict)
    tuned: dict[str, float] = field(default_factory=dict)
    max_model_len: int = 0
    model_len: int = 0
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_graphs(self) -> int:
        return self.num_prefill_graphs + self.num_decode_graphs + self.num_mixed_graphs

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "artifact": str(self.artifact), "num_graphs": self.num_graphs}
