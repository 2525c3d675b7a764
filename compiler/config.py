"""The request to the compiler, and its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets import LadderVariables
from llmc.buckets.verify_buckets import MAX_GUESSES
from llmc.compiler.dtypes import FLOATS
from llmc.kv_dtypes import KV_DTYPES
from llmc.quantize import QuantConfig
from llmc.task_names import POOLINGS, RANK_PROMPTS, TASKS

if TYPE_CHECKING:
    from llmc.models.sources.base import ModelSource

MAX_NUM_SEQS = 4096
MAX_BLOCK_SIZE = 1 << 16
"""The largest that the runtime opens; it counts a pool's tokens in 32 bits."""
DEFAULT_LORA_RANK = 16
"""As vLLM's --max-lora-rank."""

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total). A phase starts with (0, 0), while its extent is unknown, and ends with done =
total."""


class CompileError(Exception):
    """A compilation cannot continue; the message is one sentence with the remedy."""


def no_progress(phase: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


@dataclass(frozen=True)
class HubSource:
    """A commit of a model on the Hugging Face hub; it identifies the files' bytes."""

    repo: str
    revision: str


@dataclass(frozen=True)
class CompileConfig:
    """One call of the compiler.

    model: directory, GGUF or ONNX file, or name on the hub.
    dtype: "auto", "f32", "bf16" or "f16". auto follows the checkpoint: f32 → f32, f16 and bf16 → bf16.
    kv_dtype: "auto" (same as dtype) or one of KV_DTYPES.
    kv_scales: a file with scales of the KV cache; None uses those of the checkpoint, if any.
    merge_lora: directories of LoRA adapters to merge into the weights.
    lora_slots: most adapters loaded at once at run time; None for no adapters. lora_rank: the largest of any.
    lora_experts: they may change experts, too.
    speculate: draft tokens per sequence that a decode step can verify with all sequences running; 0 for what the ladder
    has room for.
    tensor_parallel: number of ranks that share each layer; 1 for none.
    pipeline_parallel: number of stages among which the layers are divided, each of tensor_parallel ranks; 1 for none.
    expert_parallel: each rank holds whole experts instead of a part of each.
    quant: quantization of linear weights; None for none.
    buckets: a spec, environment variables, or None for the default ladder.
    max_model_len: in tokens. None: the longest context of the ladder, at most the model's; by default the model's, at
    most 4096.
    max_num_seqs: None for the largest decode batch, or 16.
    max_num_batched_tokens: most new tokens of a prefill or mixed bucket. None: no limit in a spec, otherwise max(2048,
    max_model_len).
    block_size: tokens of a KV block. None for 32.
    jobs: compiling processes; 0 for one per CPU.
    tune_for: properties that this machine's speed depends on, by name, to measure kernel schedules; None to skip.
    tokenizer: "required"; "auto" copies the model's if it has one, which must be valid; "none" for token ids only.
    overwrite: replace an artifact of another model or other options at `output`.
    source: the hub commit that `model` holds; None if it is not from the hub.
    dump: a new directory for each phase's result as text; None for none.
    allow_unknown_config: ignore unknown configuration of the model with a warning instead of refusing it.
    task: "generate", "embed", "rank", "classify", or "auto" from the model's files.
    pooling: of embeddings: "mean", "cls", "last", or "auto" from the model's files.
    rank_prompt: around pairs of texts: "none", "qwen3-reranker", or "auto" from the model's files.
    leave_states: graphs leave hidden states for a drafting head.
    head: directory of a drafting head, compiled instead of the model unless leave_states; None for the model.
    mtp: the head is the model's own layer for multi-token prediction; head is then None.
    draft_tokens: those that the head may guess, ascending; empty for all.
    images: rows of images can take the place of the model's tokens. tower: compiles what makes rows of its images,
    instead of the model.
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
    lora_experts: bool = False
    speculate: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
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
    rank_prompt: str = "auto"
    leave_states: bool = False
    head: Path | None = None
    mtp: bool = False
    draft_tokens: tuple[int, ...] = ()
    images: bool = False
    tower: bool = False

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
        if self.rank_prompt not in RANK_PROMPTS:
            raise CompileError(f"rank prompt {self.rank_prompt!r} is not one of {', '.join(RANK_PROMPTS)}")
        if self.tokenizer not in ("auto", "required", "none"):
            raise CompileError(f"tokenizer {self.tokenizer!r} is not one of auto, required, none")
        size = self.block_size
        if size is not None and (not 16 <= size <= MAX_BLOCK_SIZE or size % 16):
            raise CompileError(f"block-size {size} must be a multiple of 16 from 16 to {MAX_BLOCK_SIZE}")
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
        if self.pipeline_parallel < 1:
            raise CompileError(f"pipeline-parallel {self.pipeline_parallel} must be at least 1 stage")
        if self.jobs < 0:
            raise CompileError(f"jobs {self.jobs} must be 0 (one a CPU) or more")

    def open_source(self) -> ModelSource:
        """The model with its adapters, set up for the task. Raises ModelError."""
        # Imported here: readers of a cache need no numpy types.
        from llmc.models.sources.registry import leaving_states, open_head, open_source, open_tower

        model = open_source(
            self.model,
            self.merge_lora,
            allow_unknown_config=self.allow_unknown_config,
            task=self.task,
            pooling=self.pooling,
            rank_prompt=self.rank_prompt,
        )
        if self.tower:
            return open_tower(model)
        if self.leave_states:
            return model if self.head is None else leaving_states(model, self.head)
        return model if self.head is None and not self.mtp else open_head(self.head, model, self.draft_tokens)

    def num_jobs(self) -> int:
        return self.jobs or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class CompileReport:
    """The result of a compilation: counts, bytes, seconds by phase.

    peak_memory_bytes: largest total resident memory of the compiler and its processes. tuned: kernel symbol → speed-up
    of its measured schedule. max_model_len: most tokens of a request. model_len: longest context that the model was
    made for. warnings: sentences on what the user may not have intended. notes: sentences on what was done beyond the
    model's own settings.
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
