"""Small models to quantize, and what their artifacts must give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.compiler.targets.cpu.quant_packing import quantize_activation
from llmc.models.blocks.decoder import Decoder
from llmc.models.blocks.layers import Projection
from llmc.models.eager import load_model
from llmc.quantize import QuantConfig, Recipe
from llmc.quantize.rtn import quantize
from llmc.runtime.binding import Artifact, Replayer

from support.compiled import Pages, compared, replay
from support.paged_reference import PagedRunner
from support.tiny_models import make_tiny_model

LADDER = "prefill=[1,4]x[16],decode=[1,4]x[64]"


REQUESTS = {
    "w8a16": QuantConfig("w8a16"),
    "w8a8": QuantConfig("w8a8"),
    "w8a8-tied": QuantConfig("w8a8"),
    "w4a16-skip": QuantConfig("w4a16", skip=("attention.out", "lm_head")),
    "w4a16-asymmetric": QuantConfig("w4a16", group_size=32, asymmetric=True),
    "w4a8": QuantConfig("w4a8", group_size=32),
}


def make_model(folder: Path, name: str) -> Path:
    return make_tiny_model(folder, "qwen2", num_hidden_layers=2, tie_word_embeddings=name.endswith("tied"))


class _Int8Input(nn.Module):
    """A linear whose input is rounded to int8, as the compiled kernels round it."""

    def __init__(self, linear: Projection) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        numbers, scale = quantize_activation(x.float().numpy())
        out: torch.Tensor = self.linear(torch.from_numpy(numbers * scale[:, None]), *rest)
        return out


def reference_logits(model: Path, config: QuantConfig, tokens: list[int]) -> np.ndarray:
    """float32 [T, V] of the eager model with every quantized weight replaced by what its numbers stand for."""
    eager = load_model(model)
    tied = eager.config.tie_word_embeddings
    linears = {name: module for name, module in eager.named_modules() if isinstance(module, Projection)}
    weights = {"embed.weight" if tied and name == "lm_head" else f"{name}.weight": name for name in linears}
    recipe = Recipe.of(config, weights, head="embed.weight" if tied else "lm_head.weight")
    assert recipe.schemes
    for weight, scheme in recipe.schemes.items():
        name = weights[weight]
        value = quantize(linears[name].weight.detach().numpy(), scheme.weight).value()
        linears[name].weight.data.copy_(torch.from_numpy(value))
        if scheme.act_bits == 8:
            parent, _, child = name.rpartition(".")
            setattr(eager.get_submodule(parent), child, _Int8Input(linears[name]))
    return PagedRunner(eager).step([tokens])[0].numpy()


def rounded(model: Path, config: QuantConfig) -> Decoder:
    """The eager model, float32, with every quantized weight replaced by what its numbers stand for."""
    eager = load_model(model)
    for name, scheme in resolve(CompileConfig(model=model, output=model, quant=config)).recipe.schemes.items():
        weight = eager.get_parameter(name)
        weight.data.copy_(torch.from_numpy(quantize(weight.detach().numpy(), scheme.weight).value()))
    return eager


def stored_logits(model: Path, tokens: list[int]) -> np.ndarray:
    """float32 [T, V] of the eager model of what a quantized checkpoint's numbers stand for."""
    eager = load_model(model)
    recipe = resolve(CompileConfig(model=model, output=model)).recipe
    for name, module in list(eager.named_modules()):
        scheme = recipe.schemes.get(f"{name}.weight")
        if scheme is not None and scheme.act_bits == 8 and isinstance(module, Projection):
            parent, _, child = name.rpartition(".")
            setattr(eager.get_submodule(parent), child, _Int8Input(module))
    return PagedRunner(eager).step([tokens])[0].numpy()


def logits_error(model: Path, config: QuantConfig, artifact: Artifact) -> float:
    """Largest difference from the reference, of its largest logit: a prompt in pieces, decode between them."""
    return _error(artifact, lambda text: reference_logits(model, config, text))


def stored_logits_error(model: Path, artifact: Artifact) -> float:
    """The same of a checkpoint that is quantized already."""
    return _error(artifact, lambda text: stored_logits(model, text))


def _error(artifact: Artifact, reference: Callable[[list[int]], np.ndarray]) -> float:
    text = [int(t) for t in np.random.default_rng(3).integers(3, artifact.info.vocab_size, 40)]
    expected = reference(text)
    graphs = artifact.graphs()
    rows, at = [], []
    replayer, pages = Replayer(artifact, num_threads=2, num_blocks=16), Pages(16, artifact.info.block_size)
    done = 0
    for phase, batch, count in (("prefill", 1, 13), ("decode", 1, 1), ("prefill", 4, 25), ("decode", 4, 1)):
        index = next(i for i, g in enumerate(graphs) if (g.phase, g.batch) == (phase, batch))
        rows.append(replay(replayer, index, pages, [(0, text[done : done + count], done)])[0])
        done += count
        at.append(done - 1)
    assert done == 40
    compared(artifact)
    return float(np.abs(np.array(rows) - expected[at]).max() / np.abs(expected).max())


def assert_company_changes_no_bit(artifact: Artifact) -> None:
    rng = np.random.default_rng(5)
    texts = [[int(t) for t in rng.integers(3, artifact.info.vocab_size, 13)] for _ in range(4)]
    graphs = {(g.phase, g.batch): i for i, g in enumerate(artifact.graphs())}
    alone = []
    for seq, text in enumerate(texts):
        replayer, pages = Replayer(artifact, num_threads=1, num_blocks=16), Pages(16, artifact.info.block_size, seq)
        alone.append(replay(replayer, graphs["prefill", 1], pages, [(seq, text, 0)])[0])
    # Together, in chunks, the last token of each in one decode step.
    replayer, pages = Replayer(artifact, num_threads=2, num_blocks=16), Pages(16, artifact.info.block_size, 9)
    replay(replayer, graphs["prefill", 4], pages, [(s, text[:5], 0) for s, text in enumerate(texts)])
    replay(replayer, graphs["prefill", 4], pages, [(s, text[5:12], 5) for s, text in enumerate(texts)])
    together = replay(replayer, graphs["decode", 4], pages, [(s, text[12:], 12) for s, text in enumerate(texts)])
    for seq, row in enumerate(together):
        assert np.array_equal(row.view(np.int32), alone[seq].view(np.int32)), seq
