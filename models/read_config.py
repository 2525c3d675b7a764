"""The configuration of a checkpoint directory, as its family reads it."""

from __future__ import annotations

from pathlib import Path

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.files import has_file
from llmc.models.registry import get_family


def load_config(path: str | Path) -> ModelConfig:
    """Reads config.json and, where present, generation_config.json of the checkpoint directory `path`.

    Raises ModelError on a missing or malformed field and on a model that is not supported.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory; pass the directory of a Hugging Face checkpoint")
    fields = Fields.read(directory / "config.json")
    family = get_family(fields.text("model_type"))
    if fields.has("quantization_config"):
        method = (fields.table("quantization_config") or fields).raw("quant_method", "unknown")
        raise ModelError(
            f"{fields.origin}: the checkpoint is quantized (method {brief(method)}); pass one in f32, f16 or bf16"
        )
    generation_path = directory / "generation_config.json"
    generation = Fields.read(generation_path) if has_file(generation_path) else Fields({}, str(generation_path))
    return family.read_config(fields, generation)
