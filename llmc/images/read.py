"""Reads the form of a model's images from its checkpoint."""

from __future__ import annotations

from pathlib import Path

from llmc.images.checkpoint import Checkpoint
from llmc.images.form import ImageForm, ImageFormError
from llmc.images.kinds.registry import BY_MODEL_TYPE, kind_of
from llmc.shown import shown


def read_image_form(model_dir: str | Path) -> ImageForm:
    """The form that config.json, preprocessor_config.json and processor_config.json say; what they omit is as in
    transformers.

    Raises ImageFormError, one sentence, for a model whose images llmc does not read, and for damaged files.
    """
    checkpoint = Checkpoint(Path(model_dir))
    model_type = checkpoint.config.text("model_type", "none")
    if model_type not in BY_MODEL_TYPE:
        raise ImageFormError(
            f"{checkpoint.path} is a {shown(model_type)} model: images of {', '.join(sorted(BY_MODEL_TYPE))} are read"
        )
    form = BY_MODEL_TYPE[model_type].read(checkpoint)
    kind_of(form)  # its settings are checked as those of a manifest are
    return form
