"""Model families in plain torch over the llmc ops: configs, weights and graphs."""

from llmc.models.config import ModelConfig, ModelError, RopeScaling, load_config
from llmc.models.loader import Checkpoint, load_model, load_parameters
from llmc.models.registry import build_model, get_family
from llmc.models.rope import cos_sin_table

__all__ = [
    "Checkpoint",
    "ModelConfig",
    "ModelError",
    "RopeScaling",
    "build_model",
    "cos_sin_table",
    "get_family",
    "load_config",
    "load_model",
    "load_parameters",
]
