"""Layers for multi-token prediction, which many models have behind their last one: drafting heads of their own.

No config.json names this family: `sources/mtp.py` makes its configuration, and `mtp_layout.py` names its tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.draft_vocab import with_few_tokens
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT
from llmc.models.mtp_layout import QWEN_MTP
from llmc.models.weight_map import WeightMap

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder


def _read_config(fields: Fields, generation: Fields) -> ModelConfig:
    raise ModelError(f"{fields.origin} has the model_type mtp, which no checkpoint has; download it again")


def weight_map(config: ModelConfig) -> WeightMap:
    """The map of `blocks.mtp.MtpHead`, with names of sources that stand for those of the model's own family."""
    found, count = QWEN_MTP.weight_map(config, LLAMA_LAYOUT.weight_map(config)), config.draft_vocab_size
    return with_few_tokens(found, np.arange(count, dtype=np.int32)) if count else found


def _build(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    # Imported here: reading configs and weights needs no torch.
    from llmc.models.blocks.mtp import MtpHead

    return MtpHead(config, act_dtype, max_len)


MTP = Family("mtp", _read_config, weight_map, _build)
