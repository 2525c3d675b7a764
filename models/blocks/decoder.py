"""The decoder: embedding, layers, final norm, and logits of the sampled rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmc.models import axes_ops, ops, states_ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.beside_plain import MlpBesideExperts
from llmc.models.blocks.kinds import attention_of, feed_forward_of, has_experts
from llmc.models.blocks.layers import Block, Linear, RepeatedBlock, empty
from llmc.models.blocks.norms import Rounded, norm, result_norm, rows_norm
from llmc.models.blocks.pooled import PooledHead
from llmc.models.blocks.single import MixerLayer, MlpLayer
from llmc.models.config import ModelConfig
from llmc.models.rotary import Rope


class Embedding(Block):
    """weight: [V, D] in the activation dtype."""

    def __init__(self, count: int, hidden_size: int, act_dtype: str) -> None:
        super().__init__()
        self.weight = empty(count, hidden_size, dtype=ops.torch_act_dtype(act_dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """int32 [T] → float32 [T, D]."""
        return ops.embedding(ids, self.weight)


class RopeTable(nn.Module):
    """Holds the buffer cos_sin, float32 [max_len, rope.dim], with the values of `rope.cos_sin_table`."""

    cos_sin: Tensor

    def __init__(self, rope: Rope, max_len: int) -> None:
        super().__init__()
        self.register_buffer("cos_sin", torch.empty((max_len, rope.dim), dtype=torch.float32))


class BlocksLayer(RepeatedBlock):
    """An attention and a feed-forward block, with norms placed as `ModelConfig.residual` says.

    A residual added without a norm is added inside the block's last linear. scale: float32 [1], or None.
    """

    scale: Tensor | None

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.residual = config.residual
        self.multiplier = config.residual_multiplier
        self.input_is_shared = layer in config.states_layers or 0 < layer <= config.stacked_rows
        before, after = config.residual not in ("post", "sums"), config.residual in ("sandwich", "post", "sums")
        two = config.residual != "parallel" or config.parallel_norms > 1
        normed = before and (layer > 0 or config.first_norm)
        self.attention_norm = norm(config, act_dtype) if normed else Rounded(act_dtype)
        self.attention = attention_of(config, layer, act_dtype)
        self.attention_post_norm = result_norm(config, act_dtype) if after else None
        self.mlp_norm = None if not two else norm(config, act_dtype) if before else Rounded(act_dtype)
        self.mixed = has_experts(config, layer)
        self.mlp = feed_forward_of(config, layer, act_dtype)
        self.mlp_post_norm = result_norm(config, act_dtype) if after else None
        self.register_parameter("scale", empty(1) if config.scaled_layers else None)

    def scaled(self, x: Tensor) -> Tensor:
        """The layer's result."""
        return x if self.scale is None else x * self.scale

    def with_blocks(self, x: Tensor, step: StepInputs) -> Tensor:
        """float32 [T, D] → float32 [T, D]: x plus the results of both blocks."""
        of_mlp = (step,) if self.mixed else ()
        if self.residual == "parallel":
            normed = self.attention_norm(x)
            other = normed if self.mlp_norm is None else self.mlp_norm(x)
            x = self._add(x, self.attention, normed, None, step)
            return self._add(x, self.mlp, other, None, *of_mlp)
        assert self.mlp_norm is not None
        if self.residual == "sums":
            assert self.attention_post_norm is not None
            assert self.mlp_post_norm is not None
            x = self.attention_post_norm(self._add(x, self.attention, self.attention_norm(x), None, step))
            return self.mlp_post_norm(self._add(x, self.mlp, self.mlp_norm(x), None, *of_mlp))
        x = self._add(x, self.attention, self.attention_norm(x), self.attention_post_norm, step)
        if isinstance(self.mlp, MlpBesideExperts):
            made = self.mlp.beside(x, self.mlp_norm(x), step)
            return x + (made if self.mlp_post_norm is None else self.mlp_post_norm(made))
        return self._add(x, self.mlp, self.mlp_norm(x), self.mlp_post_norm, *of_mlp)

    def _add(self, x: Tensor, block: Block, block_input: Tensor, after: Block | None, *step: StepInputs) -> Tensor:
        """x plus the output of `block` on its input."""
        if after is None and self.multiplier == 1.0:
            return block(block_input, x, *step)
        made = block(block_input, None, *step)
        if after is not None:
            made = after(made)
        return x + (made if self.multiplier == 1.0 else made * self.multiplier)


class DecoderLayer(BlocksLayer):
    """The layer of most models: both blocks, and perhaps a factor of their result."""

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """float32 [T, D] → float32 [T, D]."""
        return self.scaled(self.with_blocks(x, step))


class Decoder(Block):
    """A whole model. Parameters are frozen, and have no values until loaded.

    act_dtype: "f32", "bf16" or "f16", for linear weights and activations that feed a linear.
    max_len: positions in the rotary tables.
    With tied embeddings lm_head.weight is the embedding's parameter, without a name of its own. With ALiBi there is a
    buffer slopes, float32 [H]; where another rank holds some of E experts, expert_places, float32 [E]. A pooled model
    has no lm_head and returns no logits. states_norm is a copy of norm for exported hidden states, so that the norm
    that rounds rows for lm_head is unchanged. states_fc [states_size, layers D] joins the rows of several layers
    instead.
    """

    slopes: Tensor | None
    expert_places: Tensor | None
    places: Tensor | None
    kind: Tensor | None

    def __init__(self, config: ModelConfig, act_dtype: str, max_len: int) -> None:
        super().__init__()
        self.config, self.has_states, self.on_axes = config, config.has_states, config.on_axes
        self.embed = Embedding(config.vocab_size, config.hidden_size, act_dtype)
        self.positions = None
        if config.learned_positions:
            self.positions = Embedding(config.learned_positions, config.hidden_size, act_dtype)
        self.types = None
        if config.typed_inputs:
            self.types = Embedding(config.token_types, config.hidden_size, act_dtype)
        one_kind = config.token_types > 0 and not config.typed_inputs
        self.register_parameter("kind", empty(config.hidden_size) if one_kind else None)
        self.embed_norm = result_norm(config, act_dtype) if config.embedding_norm else None
        self.ropes = nn.ModuleList(RopeTable(rope, max_len) for rope in config.ropes)
        self.register_buffer("slopes", None if config.alibi is None else torch.empty(config.num_heads))
        experts = config.experts
        elsewhere = experts is not None and experts.held is not None
        self.register_buffer("expert_places", torch.empty(experts.count) if experts and elsewhere else None)
        self.layers = nn.ModuleList(self.layer(i, act_dtype) for i in range(config.num_layers))
        self.pooled = None if config.pooled is None else PooledHead(config, act_dtype)
        if self.pooled is not None:
            return
        self.norm: Block = norm(config, act_dtype)
        joined = len(config.states_layers) * config.hidden_size
        self.states_fc = Linear(config.states_width, joined, False, act_dtype) if joined else None
        self.states_norm = rows_norm(config) if config.states == "left" and not joined else None
        self.rounded = Rounded(act_dtype)
        tokens = config.draft_vocab_size or config.vocab_size
        self.lm_head = Linear(tokens, config.hidden_size, config.head_bias, act_dtype)
        self.register_parameter("places", empty(config.vocab_size) if config.draft_vocab_size else None)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    def layer(self, number: int, act_dtype: str) -> RepeatedBlock:
        """A new layer."""
        if number in self.config.mixer_only_layers:
            return MixerLayer(self.config, number, act_dtype)
        if number in self.config.mlp_only_layers:
            return MlpLayer(self.config, number, act_dtype)
        return DecoderLayer(self.config, number, act_dtype)

    def through_layers(self, x: Tensor, input_ids: Tensor, step: StepInputs) -> tuple[Tensor, list[Tensor]]:
        """Applies all layers: float32 [T, D], from `embedded` → (float32 [T, D], such rows for each of
        `ModelConfig.states_layers`). input_ids: int32 [T]."""
        wanted, found = self.config.states_layers, []
        for number, layer in enumerate(self.layers):
            if number in wanted:
                found.append(x)
            x = layer(x, step)
            if number < self.config.stacked_rows:
                behind = (number + 1) * self.config.hidden_size
                x = states_ops.placed_rows(x, input_ids, self.config.states_width, behind, added=True)
        return x, [*found, x] if len(self.layers) in wanted else found

    def entered(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """int32 [T] → (the input of the first layer, float32 [T, D]; the rotary table of each of
        `ModelConfig.ropes`)."""
        return self.embedded(input_ids, positions), tuple(self.get_buffer(name) for name in self.config.rope_tables)

    def embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int32 [T] → float32 [T, D]: the input of the first layer."""
        if self.types is None:
            x = self.embed(input_ids)
        else:
            vocab = self.config.vocab_size
            kinds = (input_ids >= vocab).to(torch.int32)
            for kind in range(2, self.config.token_types):
                kinds = kinds + (input_ids >= kind * vocab).to(torch.int32)
            x = self.embed(input_ids - kinds * vocab) + self.types(kinds)
        if self.kind is not None:
            x = x + self.kind
        if self.config.embedding_multiplier != 1.0:
            x = x * self.config.embedding_multiplier
        if self.config.states == "placed":
            # The id of a placed row is negative, for which the embedding gives some row that nobody reads.
            x = states_ops.placed_rows(x, input_ids, self.config.states_width)
        if self.positions is not None:
            x = x + self.positions(positions)
        return x if self.embed_norm is None else self.embed_norm(x)

    def sampled(self, x: Tensor, sample_index: Tensor, of_layers: list[Tensor]) -> Tensor:
        """float32 [T, D] → float32 [S, D]: the rows whose logits are needed. of_layers: see `through_layers`."""
        if self.states_fc is not None:
            states = self.states_fc(self.rounded(torch.cat(of_layers, dim=-1)))
            return states_ops.gather_rows_leaving(x, sample_index, states)
        if self.states_norm is None:
            return ops.gather_rows(x, sample_index)
        return states_ops.gather_rows_leaving(x, sample_index, self.states_norm(x))

    def vectors(self, x: Tensor, of_layers: list[Tensor], step: StepInputs, sample_index: Tensor) -> Tensor:
        """float32 [T, D] → float32 [S, width of a pooled model's output]. of_layers: see `through_layers`."""
        assert self.pooled is not None
        made: Tensor = self.pooled(x, step.query_start, step.token_seq, sample_index)
        return made

    def logits(self, x: Tensor) -> Tensor:
        """float32 [S, D] → float32 [S, V]."""
        logits = self.lm_head(self.norm(x))
        if self.config.logit_multiplier != 1.0:
            logits = logits * self.config.logit_multiplier
        if self.config.logit_cap is not None:
            logits = torch.tanh(logits / self.config.logit_cap) * self.config.logit_cap
        return logits if self.places is None else states_ops.spread_logits(logits, self.places)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_start: Tensor,
        sample_index: Tensor,
        token_seq: Tensor,
        state_slots: Tensor | None = None,
        rope_positions: Tensor | None = None,
    ) -> Tensor:
        """int32 inputs of one packed step (see StepInputs; sample_index [S]) → logits float32 [S, V], or a pooled
        model's vectors. state_slots: of a model with `has_states`. rope_positions: [T, axes] of a model `on_axes`."""
        x, ropes = self.entered(input_ids, positions)
        turned_at = None
        if rope_positions is not None:
            axes, turned_at = self.config.rope.axes, axes_ops.row_numbers(positions)
            ropes = tuple(axes_ops.rope_rows(table, rope_positions, axes) for table in ropes)
        step = StepInputs(
            positions, slot_mapping, block_tables, context_lens, query_start, token_seq, ropes, self.slopes,
            self.expert_places, state_slots, turned_at,
        )  # fmt: skip
        x, of_layers = self.through_layers(x, input_ids, step)
        if self.pooled is not None:
            return self.vectors(x, of_layers, step, sample_index)
        return self.logits(self.sampled(x, sample_index, of_layers))
