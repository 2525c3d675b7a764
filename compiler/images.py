"""A model that sees images: two artifacts side by side, the text model, and the tower that makes rows of images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmc.compiler.beside import check_early, output_beside
from llmc.compiler.config import DEFAULT_LORA_RANK, CompileConfig, CompileReport, Progress, no_progress
from llmc.compiler.hub import locate
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.resolved import Resolved


def compile_with_images(config: CompileConfig, progress: Progress = no_progress) -> tuple[CompileReport, CompileReport]:
    """Compiles a model whose graphs take rows of images in place of tokens, and its tower. Returns both reports.

    The tower gets the model's type of activations, a bucket for each usual number of patches of an image, and weights
    that are not quantized. Errors in it are reported before the model is compiled. Raises the errors of
    `compile_model`.
    """
    found = locate(config.model)
    config = replace(config, model=found.path, source=found.source or config.source, images=True)
    # Adapters change the text model alone.
    of_tower = replace(config, images=False, tower=True, merge_lora=())
    tower = of_tower.open_source()
    tower.config()  # a model without one is refused by name
    form, of_model = tower.image_form(), resolve(config)
    assert form is not None
    of_tower = replace(
        of_tower,
        output=output_beside(config.output, "images"),
        dtype=of_model.act_dtype,
        kv_dtype="auto",
        kv_scales=None,
        quant=None,
        # A step holds one image.
        buckets=f"prefill=1x[{','.join(map(str, form.usual_patches))}]",
        max_model_len=None,
        max_num_seqs=1,
        max_num_batched_tokens=None,
        block_size=None,
        speculate=0,
        lora_slots=None,
        lora_rank=DEFAULT_LORA_RANK,
        lora_experts=False,
        tokenizer="none",
        dump=None,
    )
    check_early(of_tower)
    report = compile_model(config, progress)
    of_images = compile_model(of_tower, progress)
    return report, replace(of_images, notes=(*of_images.notes, *_of_text_alone(config, of_model)))


def _of_text_alone(config: CompileConfig, of_model: Resolved) -> Iterator[str]:
    """Sentences on what was asked of the model and not done to its tower."""
    if of_model.recipe.schemes:
        yield f"what makes rows of images keeps its weights as {of_model.act_dtype}: schemes are for the text model"
    if config.merge_lora:
        yield "what makes rows of images is without adapters: they are merged into the text model"
