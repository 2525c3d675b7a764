"""Model families in plain torch over the llmc ops: configs, weights and graphs.

Configs, checkpoints and weight maps need no torch; building the first module imports it.
"""

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.loader import Parameter, load_parameters
from llmc.models.read_config import load_config
from llmc.models.registry import build_model, get_family
from llmc.models.rope import cos_sin_table
from llmc.models.rotary import Rope, RopeScaling
from llmc.models.sources.base import ArrayTensor, Checkpoint, ModelSource, Tensor
from llmc.models.sources.registry import open_source

__all__ = [
    "ArrayTensor",
    "Checkpoint",
    "ModelConfig",
    "ModelError",
    "ModelSource",
    "Parameter",
    "Rope",
    "RopeScaling",
    "Tensor",
    "build_model",
    "cos_sin_table",
    "get_family",
    "load_config",
    "load_parameters",
    "open_source",
]
