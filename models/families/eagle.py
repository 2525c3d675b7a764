"""EAGLE drafting heads, versions 1 and 2: a layer that predicts a model's next hidden state, and so its next tokens.

For each token but the first, a head reads the token's embedding and the previous token's hidden state. It shares the
model's embedding and output projection. No config.json names this family: `sources/eagle.py` makes its configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.draft_vocab import with_few_tokens
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.weight_map import Source, Target, WeightMap

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder

OF_MODEL = "of_model"
"""Prefix of the model's own matrices among the tensors of a head, followed by a dot."""
_LAYOUT = Layout(embed=f"{OF_MODEL}.embed", layer="layers.{}", head=f"{OF_MODEL}.lm_head", unused=())
_COPIES = frozenset({"embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq"})
"""Tensors in published heads that are copies of the model's, or unused tables."""


def _read_config(fields: Fields, generation: Fields) -> ModelConfig:
    raise ModelError(f"{fields.origin} has the model_type eagle, which no checkpoint has; download it again")


def weight_map(config: ModelConfig) -> WeightMap:
    """The map of `blocks.eagle.EagleHead`."""
    hidden = config.hidden_size
    found = [target for target in _LAYOUT.weight_map(config).targets if not target.name.startswith("norm.")]
    found.append(Target("fc.weight", (Source("fc.weight", (hidden, 2 * hidden)),), "act"))
    if config.fc_bias:
        found.append(Target("fc.bias", (Source("fc.bias", (hidden,)),), "f32"))
    made = WeightMap(tuple(found), _COPIES | {f"{OF_MODEL}.lm_head.weight"})
    count = config.draft_vocab_size
    return with_few_tokens(made, np.arange(count, dtype=np.int32)) if count else made


def _build(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    # Imported here: reading configs and weights needs no torch.
    from llmc.models.blocks.eagle import EagleHead

    return EagleHead(config, act_dtype, max_len)


EAGLE = Family("eagle", _read_config, weight_map, _build)
