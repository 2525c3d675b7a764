"""The towers of Qwen: rotated in two dimensions, then a norm and two linears over merged patches.

Those of Qwen3.5 and Qwen3.6 also have a learned square table of places, between whose rows a patch lies. A picture is a
film of equal frames.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.towers import VISION, tower_family, vision_fields
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.pooled import Dense, Pooled
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import read_activation, standard_config
from llmc.models.tower import Tower
from llmc.models.weight_map import Source, Target, WeightMap

_EPS = 1e-6
"""Of the tower's norms, in transformers' code."""
_MOST_PATCHES = 1 << 16
_LEAST_PLACES, _DEPTH = 4, 27
_LAYOUT = Layout(
    embed="visual.pos_embed",
    patches="visual.patch_embed.proj",
    layer="visual.blocks.{}",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    out="attn.proj",
    mlp_norm="norm2",
    up="mlp.linear_fc1",
    down="mlp.linear_fc2",
    norm="visual.merger.norm",
    dense=("visual.merger.linear_fc1", "visual.merger.linear_fc2"),
    unused=(),
    other_modules=("model.", "lm_head.", "language_model.", "mtp."),
)
_TEXT = ("model.language_model.", "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")
"""The text model's modules, where the tower's are within `model`."""
_QWEN2_LAYOUT = replace(
    _LAYOUT,
    embed="",
    up="mlp.fc1",
    down="mlp.fc2",
    norm="visual.merger.ln_q",
    dense=("visual.merger.mlp.0", "visual.merger.mlp.2"),
)


def _within(layout: Layout) -> Layout:
    """As newer versions of transformers call its tensors."""
    found = layout.moved("", "model.")
    dense = tuple(f"model.{name}" for name in layout.dense)
    return replace(found, dense=dense, other_modules=_TEXT)


def _with_mergers(config: ModelConfig, found: WeightMap) -> WeightMap:
    """The map with what makes rows of the results of other layers than the last one."""
    assert config.tower is not None
    assert config.pooled is not None
    size = config.tower.merged * config.hidden_size
    patches = next(target for target in found.targets if target.name == "patches.weight")
    beside = patches.sources[0].name.removesuffix("patch_embed.proj.weight")
    targets: list[Target] = []
    for number in range(len(config.tower.stacked)):
        name, source = f"stacked.{number}", f"{beside}deepstack_merger_list.{number}"
        for part in ("weight", "bias"):
            targets.append(Target(f"{name}.norm.{part}", (Source(f"{source}.norm.{part}", (size,)),), "f32"))
        for at, dense in enumerate(config.pooled.dense):
            target, linear = f"{name}.dense.{at}.linear", f"{source}.linear_fc{at + 1}"
            weight = Source(f"{linear}.weight", (dense.size, size))
            targets.append(Target(f"{target}.weight", (weight,), "act", precise=True))
            targets.append(Target(f"{target}.bias", (Source(f"{linear}.bias", (dense.size,)),), "f32"))
    return replace(found, targets=(*found.targets, *targets))


_FIELDS = "rope_parameters depth in_channels in_chans num_heads out_hidden_size spatial_merge_size temporal_patch_size"
QWEN2_TOWER = tower_family("qwen2_tower", (_QWEN2_LAYOUT, _within(_QWEN2_LAYOUT)), f"{_FIELDS} embed_dim hidden_size")
QWEN3_TOWER = tower_family(
    "qwen3_tower", (_LAYOUT, _within(_LAYOUT)), f"{_FIELDS} deepstack_visual_indexes", _with_mergers
)


def read_qwen2_tower(fields: Fields, text: ModelConfig) -> ModelConfig:
    """Of Qwen2-VL."""
    vision = vision_fields(fields, {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "num_heads": 16})
    size = vision.integer("embed_dim")
    inner = int(size * vision.number("mlp_ratio"))
    vision = vision.with_values(hidden_size=size, intermediate_size=inner)
    return _tower(vision, text, QWEN2_TOWER.model_type, activation="quick_gelu", patch_bias=False, places=0)


def read_qwen3_tower(fields: Fields, text: ModelConfig) -> ModelConfig:
    """Of Qwen3-VL, Qwen3.5 and Qwen3.6."""
    vision = vision_fields(
        fields,
        {
            "depth": _DEPTH, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
            "num_position_embeddings": 2304,
        },
    )  # fmt: skip
    places = vision.integer("num_position_embeddings")
    if isqrt(places) ** 2 != places or places < _LEAST_PLACES:
        raise ModelError(
            f"{vision.origin}: num_position_embeddings {places} is not the square of a number from 2 on; download it "
            "again"
        )
    config = _tower(
        vision, text, QWEN3_TOWER.model_type, activation="gelu_pytorch_tanh", patch_bias=True, places=places
    )
    assert config.tower is not None
    return replace(config, tower=replace(config.tower, stacked=stacked_layers(fields)))


def stacked_layers(fields: Fields) -> tuple[int, ...]:
    """Layers of the tower whose results are added to the text behind its first layers, too."""
    vision = fields.table(VISION)
    found = [] if vision is None else vision.raw("deepstack_visual_indexes", [])
    depth = 0 if vision is None else vision.integer("depth", _DEPTH)
    fits = isinstance(found, list) and all(type(layer) is int and 0 <= layer < depth for layer in found)
    if not fits or found != sorted({*found}):
        raise ModelError(
            f"{fields.origin}: deepstack_visual_indexes {brief(found)} is no ascending list of layers below {depth}; "
            "download it again"
        )
    return tuple(found)


def stacked_on(config: ModelConfig, fields: Fields) -> ModelConfig:
    """A text model in whose texts rows of such a tower are."""
    count = len(stacked_layers(fields))
    if count > config.num_layers:
        raise ModelError(
            f"{fields.origin}: deepstack_visual_indexes names {count} layers, more than the {config.num_layers} of the "
            "text model; download it again"
        )
    return replace(config, stacked_rows=count)


def _tower(
    vision: Fields, text: ModelConfig, model_type: str, *, activation: str, patch_bias: bool, places: int
) -> ModelConfig:
    """A row is `spatial_merge_size` patches high and wide. The angles of the rotation come with the patches."""
    made, size = vision.integer("out_hidden_size", text.hidden_size), vision.integer("hidden_size")
    if made != text.hidden_size:
        raise ModelError(
            f"{vision.origin}: rows of images have out_hidden_size {made}, and those of tokens {text.hidden_size}; "
            "download it again"
        )
    heads, merge = vision.integer("num_heads"), vision.integer("spatial_merge_size", 2)
    merged = merge * merge
    tower = Tower(
        vision.integer("in_channels", 3),
        vision.integer("patch_size"),
        merged=merged,
        frames=vision.integer("temporal_patch_size", 2),
        rotation=size // heads,
        patch_bias=patch_bias,
        places=places,
        places_side=isqrt(places),
    )
    return standard_config(
        vision.with_values(
            model_type=model_type,
            vocab_size=max(1, places),
            num_hidden_layers=vision.integer("depth"),
            num_attention_heads=heads,
            norm_eps=_EPS,
            max_position_embeddings=_MOST_PATCHES,
            tie_word_embeddings=True,
        ),
        Fields({}, vision.origin),
        attention_bias=True,
        o_bias=True,
        mlp_bias=True,
        eps="norm_eps",
        activation=read_activation(vision, default=activation),
        rope=NO_ROPE,
        norm="layer",
        norm_bias=True,
        gated=False,
        bidirectional=True,
        states="taken",
        tower=tower,
        pooled=Pooled("merged", (Dense(merged * size, True, "gelu"), Dense(text.hidden_size, True))),
    )
