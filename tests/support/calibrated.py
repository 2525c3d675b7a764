"""Tiny models with a tokenizer, what `llmc quantize -o` writes of them, and how far that is from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from llmc.compiler.calibration import driver
from llmc.compiler.calibration.request import CalibrationConfig
from llmc.models.eager import load_model
from llmc.quantize import QuantConfig

from support.paged_reference import PagedRunner
from support.tiny_models import make_tiny_model

TEXT = "It was a truth which nobody cared to deny, that a walk before dinner does no harm at all. " * 12
W4A16 = QuantConfig("w4a16", group_size=32)


def make_model(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, intermediate_size: int = 96, **more: Any
) -> Path:
    """A tiny random model whose heads share keys, with a tokenizer of bytes."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **more}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    make_tiny_model(
        folder, family, dtype=dtype, num_hidden_layers=2, hidden_size=64, intermediate_size=intermediate_size, **sizes
    )
    tokenizer = Tokenizer(BPE({char: index for index, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def request_of(
    model: Path, output: Path, quant: QuantConfig = W4A16, method: str = "gptq", **more: Any
) -> CalibrationConfig:
    more = {"text": TEXT, "samples": 8, "sample_tokens": 64, "jobs": 1, **more}
    return CalibrationConfig(model, output, quant, method, **more)


def quantized(model: Path, output: Path, *given: Any, **more: Any) -> Path:
    driver.quantize_checkpoint(request_of(model, output, *given, **more))
    return output


def logits(path: Path, tokens: list[int] | None = None) -> np.ndarray:
    tokens = tokens or list(Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT[:90]).ids)
    found: np.ndarray = PagedRunner(load_model(path)).step([tokens])[0].numpy()
    return found


def divergence(path: Path, model: Path) -> float:
    """The mean KL divergence of a checkpoint from its model, on text like that it was calibrated with."""
    ours, theirs = (torch.log_softmax(torch.from_numpy(logits(p)).double(), -1) for p in (path, model))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())
