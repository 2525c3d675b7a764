"""Decides every "auto" of a CompileConfig."""

from __future__ import annotations

import json
from dataclasses import dataclass

from llmc.buckets import BucketLadder, Limits, default_ladder, parse_spec
from llmc.compiler import keys
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.targets.cpu import Target, resolve_target
from llmc.compiler.templates import GraphParams
from llmc.models.config import ModelConfig, load_config
from llmc.models.context import sound_scaling, trained_length
from llmc.models.registry import get_family
from llmc.quantize import QuantConfig, Recipe

DEFAULT_MAX_MODEL_LEN = 4096
EMBEDDING, HEAD = "embed.weight", "lm_head.weight"


@dataclass(frozen=True)
class Resolved:
    """A CompileConfig with every "auto" decided.

    cut_by: what made max_model_len less than the model's own: "default", "buckets" or "option"; None: nothing did.
    """

    model: ModelConfig
    target: Target
    act_dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    ladder: BucketLadder
    recipe: Recipe
    cut_by: str | None = None

    @property
    def model_len(self) -> int:
        """Tokens of the longest text that the model was made for."""
        return trained_length(self.model)

    def warnings(self) -> tuple[str, ...]:
        """What a user may not have meant, in sentences."""
        if self.max_model_len > self.model_len:
            scaling = json.dumps(sound_scaling(self.model, self.max_model_len))
            return (
                f"max-model-len {self.max_model_len} is beyond the {self.model_len} tokens that the model was trained "
                f"for: it reads longer texts badly unless rope_parameters of its config.json (rope_scaling of an older "
                f"one) has {scaling}",
            )
        if self.cut_by == "default":
            return (
                f"the context is cut to {self.max_model_len} of the model's {self.model_len} tokens: --max-model-len "
                f"{self.model_len} compiles all of it",
            )
        return ()

    def graph_params(self) -> GraphParams:
        """What the templates need; what depends on the graph replaces the zeros."""
        return GraphParams(
            target=self.target,
            row_tile=0,
            sample_row_tile=0,
            tokens=0,
            segments=0,
            max_model_len=self.max_model_len,
            act_dtype=self.act_dtype,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            packed_embedding=self.model.tie_word_embeddings,
        )

    def graph_components(self) -> dict[str, str]:
        """Key components that all graphs share."""
        return keys.graph_components(self.model, self.max_model_len, self.graph_params(), self.recipe)

    def trace_components(self) -> dict[str, str]:
        """Key components of the lowered model."""
        return keys.trace_components(self.model, self.max_model_len, self.act_dtype)


def resolve(config: CompileConfig) -> Resolved:
    """Decides dtypes, target, lengths and ladder. Raises CompileError, BucketError, QuantizeError, TargetError
    or ModelError.
    """
    model = load_config(config.model)
    get_family(model.model_type)
    max_model_len = config.max_model_len or min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    cut_by = None
    if max_model_len < trained_length(model):
        cut_by = "default" if config.max_model_len is None else "option"
    act_dtype = config.dtype if config.dtype != "auto" else ("f32" if model.dtype == "f32" else "bf16")
    max_num_seqs = config.max_num_seqs
    if config.buckets is None:
        ladder = default_ladder(max_num_seqs, max_model_len, config.block_size)
    else:
        ladder = parse_spec(config.buckets, Limits(max_num_seqs, max_model_len, config.block_size))
        max_num_seqs = min(max_num_seqs, ladder.max_batch)
        if ladder.max_context < max_model_len and config.max_model_len is not None:
            raise CompileError(
                f"the largest decode bucket holds {ladder.max_context} tokens of context but max-model-len is "
                f"{max_model_len}; add a decode bucket or lower --max-model-len"
            )
        if ladder.max_context < max_model_len:
            max_model_len, cut_by = ladder.max_context, "buckets"
    return Resolved(
        model=model,
        target=resolve_target(config.target),
        act_dtype=act_dtype,
        kv_dtype=config.kv_dtype if config.kv_dtype != "auto" else act_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=config.block_size,
        ladder=ladder,
        recipe=recipe_of(config.quant, model),
        cut_by=cut_by,
    )


def recipe_of(quant: QuantConfig | None, model: ModelConfig) -> Recipe:
    """The schemes of the model's linear layers. An embedding that no linear shares stays as it is."""
    if quant is None:
        return Recipe({})
    matrices = [t.name for t in get_family(model.model_type).weight_map(model).targets if t.dtype == "act"]
    if model.tie_word_embeddings:
        return Recipe.of(quant, matrices, head=EMBEDDING)
    return Recipe.of(quant, [name for name in matrices if name != EMBEDDING], head=HEAD)
