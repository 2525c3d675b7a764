"""Recipes: the schemes of a model's matrices, as they are stored or as they are to be quantized."""

from __future__ import annotations

from dataclasses import replace

from llmc.compiler.partition import EMBEDDING, HEAD
from llmc.models.config import ModelConfig
from llmc.models.loader import check_checkpoint, load_parameters
from llmc.models.registry import get_family
from llmc.models.sources.base import ModelSource
from llmc.quantize import QuantConfig, Recipe
from llmc.quantize.scheme import stored_scheme


def stored_recipe(source: ModelSource, model: ModelConfig) -> Recipe:
    """The schemes of matrices whose stored numbers kernels can read as they are."""
    if not source.is_quantized:
        return Recipe({})
    checkpoint, schemes, methods, act_order = source.checkpoint(), {}, {}, set()
    targets = check_checkpoint(model, checkpoint).targets
    sources = {target.name: target.sources for target in targets}
    tables = {target.name for target in targets if target.table}
    for parameter in load_parameters(model, checkpoint, "f32"):
        stored, name = parameter.stored, parameter.name
        # A table is read row by row, in the model's order.
        if stored is not None and (name not in tables or stored.columns is None):
            schemes[name] = stored_scheme(stored.format, int8_inputs=stored.int8_inputs)
            methods[name] = ", ".join(sorted({checkpoint.dtype(source.name) for source in sources[name]}))
            if stored.columns is not None:
                act_order.add(name)
    # Reordering rows is free when they are stored as read.
    made = {target.makes for target in targets if target.makes in act_order and target.name in schemes}
    rows_of = {target.name: target.makes for target in targets if target.makes and target.makes in made}
    return Recipe(schemes, methods, frozenset(act_order), rows_of)


def recipe_of(quant: QuantConfig, model: ModelConfig, source: ModelSource) -> Recipe:
    """The schemes of the model's linear layers, and of an embedding tied to one; other tables stay as stored."""
    head = EMBEDDING if model.tie_word_embeddings and model.pooled is None else HEAD
    targets = get_family(model.model_type).weight_map(model).targets
    recipe = Recipe.of(quant, [target.name for target in targets if target.is_linear or target.name == head], head)
    stored = stored_recipe(source, model)
    tables = [t.name for t in targets if t.table and t.name != head and t.name in stored.schemes]
    if not tables:
        return recipe
    return replace(
        recipe,
        schemes={**recipe.schemes, **{name: stored.schemes[name] for name in tables}},
        methods={name: stored.methods[name] for name in tables},
    )
