"""EAGLE-3 drafting heads: one layer that predicts a model's next tokens from the rows of several of its layers.

The model joins these rows with the head's matrix `fc`. The head has a vocabulary of its own: its token t is the model's
token t + d2t[t]. No config.json names this family: `sources/eagle3.py` makes its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from llmc.models.config import ModelConfig
from llmc.models.draft_vocab import places_target
from llmc.models.errors import ModelError
from llmc.models.families.eagle import OF_MODEL
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.weight_map import Source, Target, WeightMap

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder

ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"})
"""Class names in config.json of published heads; some have that of Llama."""
_UNUSED = frozenset({"fc.weight", "d2t", "t2d", "embed_tokens.weight", "midlayer.self_attn.rotary_emb.inv_freq"})
_LAYERS, _EMBEDDINGS = ("midlayer", "layers.0"), ("embed_tokens", f"{OF_MODEL}.embed")
"""Names in published heads."""


def _read_config(fields: Fields, generation: Fields) -> ModelConfig:
    raise ModelError(f"{fields.origin} has the model_type eagle3, which no checkpoint has; download it again")


def _targets(layout: Layout, config: ModelConfig) -> Iterator[Target]:
    hidden, tokens = config.hidden_size, config.draft_vocab_size or config.vocab_size
    layer = layout.layer
    for target in layout.weight_map(config).targets:
        if target.name == "layers.0.attention.qkv.weight":
            sources = tuple(Source(of.name, (of.shape[0], 2 * hidden)) for of in target.sources)
            yield Target(target.name, sources, "act")
            yield Target("layers.0.embed_norm.weight", (Source(f"{layer}.input_layernorm.weight", (hidden,)),), "f32")
            yield Target("layers.0.states_norm.weight", (Source(f"{layer}.hidden_norm.weight", (hidden,)),), "f32")
        elif target.name == "lm_head.weight":
            yield Target(target.name, (Source("lm_head.weight", (tokens, hidden)),), "act")
        else:
            yield target
    if config.draft_vocab_size:
        yield places_target(config.vocab_size)


def _map(layer: str, embed: str, config: ModelConfig) -> WeightMap:
    """The map of `blocks.eagle3.Eagle3Head`."""
    layout = Layout(embed=embed, layer=layer, norm="norm", unused=())
    return WeightMap(tuple(_targets(layout, config)), _UNUSED)


def _build(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    # Imported here: reading configs and weights needs no torch.
    from llmc.models.blocks.eagle3 import Eagle3Head

    return Eagle3Head(config, act_dtype, max_len)


_MAPS: tuple[Callable[[ModelConfig], WeightMap], ...] = tuple(
    partial(_map, layer, embed) for layer in _LAYERS for embed in _EMBEDDINGS
)
EAGLE_3 = Family(
    "eagle3",
    _read_config,
    _MAPS[-1],
    _build,
    other_maps=_MAPS[:-1],
    harmless=frozenset(
        {
            "speculators_config",
            "speculators_model_type",
            "speculators_version",
            "has_no_defaults_at_init",
            "embed_requires_grad",
            "max_window_layers",
        }
    ),
    neutral={
        "eagle_config.use_aux_hidden_state": True,
        "eagle_config.use_input_layernorm_in_first_layer": True,
        "eagle_config.use_last_layernorm": True,
        "eagle_config.use_mtp_layernorm": False,
        "fc_norm": False,
        "mask_hidden": False,
        "norm_before_fc": False,
        "norm_output": False,
        "use_sliding_window": False,
    },
)
