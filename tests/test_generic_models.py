"""A model with plain torch ops between the llmc ops, compiled through the whole pipeline, against eager torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled import Pages, check_every_bucket, compile_tiny, random_tokens, relative_error, replay
from tiny_models import make_tiny_model
from torch import Tensor, nn

from llmc.cli.graph_view import commands_of
from llmc.compiler.config import CompileError
from llmc.models import ops, registry
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.decoder import Decoder, DecoderLayer
from llmc.models.blocks.layers import Linear
from llmc.models.blocks.mlp import Mlp
from llmc.models.config import ModelConfig
from llmc.models.eager import as_tensor
from llmc.models.families.family import Family
from llmc.models.families.llama import LLAMA
from llmc.models.loader import Checkpoint, load_parameters
from llmc.models.reference import ReferenceCache, use_cache
from llmc.models.rope import cos_sin_table
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.graphs_file import read_graphs

pytestmark = pytest.mark.native

LADDER = "prefill=[1,2]x[16,32],decode=[1,3]x[64]"
CAP = 3.0


class QuirkyMlp(Mlp):
    """The gate is a tanh GELU, written in torch ops."""

    def __init__(self, config: ModelConfig, act_dtype: str) -> None:
        super().__init__(config, act_dtype)
        self.act_dtype = act_dtype
        self.gate_up = Linear(2 * config.intermediate_size, config.hidden_size, config.mlp_bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        inner = F.gelu(gate, approximate="tanh") * up
        return self.down(inner.to(ops.torch_act_dtype(self.act_dtype)), residual)


class QuirkyLayer(DecoderLayer):
    """Packed activations are read by generic ops too, and mixed over heads of the hidden state."""

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__(config, layer, act_dtype)
        self.mlp = QuirkyMlp(config, act_dtype)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        normed = self.attention_norm(x)
        x = self.attention(normed, x + 0.1 * normed.float(), step)
        weights = torch.softmax(x.view(x.shape[0], 3, -1), dim=-1).reshape(x.shape)
        x = torch.where(step.positions[:, None] % 2 == 0, x * (1.0 + weights), x - x.mean(-1, keepdim=True))
        return self.mlp(self.mlp_norm(x), x)


class Quirky(Decoder):
    """Scaled embeddings and capped logits."""

    def __init__(self, config: ModelConfig, act_dtype: str, max_len: int) -> None:
        super().__init__(config, act_dtype, max_len)
        self.layers = nn.ModuleList(QuirkyLayer(config, i, act_dtype) for i in range(config.num_layers))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_start: Tensor,
        sample_index: Tensor,
        token_seq: Tensor,
    ) -> Tensor:
        step = StepInputs(
            positions, slot_mapping, block_tables, context_lens, query_start, token_seq, self.rope.cos_sin
        )
        x = self.embed(input_ids) * self.config.hidden_size**0.5
        for layer in self.layers:
            x = layer(x, step)
        logits = self.lm_head(self.norm(ops.gather_rows(x, sample_index)))
        return torch.tanh(logits / CAP) * CAP


class Mixing(Quirky):
    """Every token sees the mean of all embeddings."""

    def forward(self, input_ids: Tensor, *inputs: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.lm_head(self.norm(ops.gather_rows(x - x.mean(0, keepdim=True), inputs[5])))


class Sharing(Quirky):
    """A generic op reads the weight of a norm."""

    def forward(self, input_ids: Tensor, *inputs: Tensor) -> Tensor:
        x = self.norm(self.embed(input_ids)).float() * self.norm.weight
        return self.lm_head(ops.gather_rows(x, inputs[5]).to(ops.torch_act_dtype("f32")))


def family(build: type[Decoder]) -> Family:
    return Family("quirky", LLAMA.read_config, LLAMA.weight_map, build)


def checkpoint(path: Path, **overrides: object) -> Path:
    """A llama checkpoint under the name of the family."""
    model = make_tiny_model(path, "llama", num_hidden_layers=2, **overrides)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "quirky"}))
    return model


def eager_logits(model: Path, tokens: list[int], act_dtype: str) -> np.ndarray:
    """float32 [T, V] of the eager module on the checkpoint's weights."""
    from llmc.models.read_config import load_config

    config, length = load_config(model), len(tokens)
    module = registry.build_model(config, act_dtype, 128)
    parameters = {p.name: as_tensor(p.value()) for p in load_parameters(config, Checkpoint(model), act_dtype)}
    module.load_state_dict({**parameters, "rope.cos_sin": as_tensor(cos_sin_table(config, 128))}, strict=True)
    cache = ReferenceCache(
        config.num_layers, 8, 32, config.num_kv_heads, config.head_dim, ops.torch_act_dtype(act_dtype)
    )
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    with torch.no_grad(), use_cache(cache):
        at = torch.arange(length, dtype=torch.int32)
        tables = torch.arange(1, 8, dtype=torch.int32)[None]
        same = torch.zeros(length, dtype=torch.int32)
        return module(ints(*tokens), at, at + 32, tables, ints(length), ints(0, length), at, same).numpy()


@pytest.fixture(scope="module")
def quirky(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    root = tmp_path_factory.mktemp("quirky")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, "quirky", family(Quirky))
        model = checkpoint(root / "model")
        return model, compile_tiny(model, root / "artifact", root / "cache", buckets=LADDER, dtype="f32")


def test_every_bucket_matches_eager(quirky: tuple[Path, Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "quirky", family(Quirky))
    model, artifact = quirky
    tokens = random_tokens(artifact.info.vocab_size)
    expected = eager_logits(model, tokens, "f32")
    check_every_bucket(artifact, tokens, expected)


def test_bits_depend_on_the_request_alone(quirky: tuple[Path, Artifact]) -> None:
    _, artifact = quirky
    graphs, vocab = artifact.graphs(), artifact.info.vocab_size
    tokens = [random_tokens(vocab, 12, seed) for seed in range(2)]
    prefills = [i for i, g in enumerate(graphs) if g.phase == "prefill"]
    seen: dict[int, set[bytes]] = {0: set(), 1: set()}
    for threads in (1, 2):
        replayer = Replayer(artifact, num_threads=threads, num_blocks=64)
        for graph in prefills:
            for s in (0, 1):
                pages = Pages(64, artifact.info.block_size, seed=s)
                seen[s].add(replay(replayer, graph, pages, [(s, tokens[s], 0)])[0].tobytes())
            if graphs[graph].batch == 2:
                pages = Pages(64, artifact.info.block_size, seed=7)
                both = replay(replayer, graph, pages, [(1, tokens[1], 0), (0, tokens[0], 0)])
                seen[1].add(both[0].tobytes())
                seen[0].add(both[1].tobytes())
        decode = next(i for i, g in enumerate(graphs) if g.phase == "decode" and g.batch == 3)
        pages = Pages(64, artifact.info.block_size, seed=11)
        for s in (0, 1):
            replay(replayer, prefills[0], pages, [(s, tokens[s][:-1], 0)])
        last = replay(replayer, decode, pages, [(s, tokens[s][-1:], 11) for s in (0, 1)])
        for s in (0, 1):
            seen[s].add(last[s].tobytes())
    assert {s: len(bits) for s, bits in seen.items()} == {0: 1, 1: 1}


def test_bf16_is_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "quirky", family(Quirky))
    # An odd hidden size: the last word of a packed bf16 row is half padding.
    model = checkpoint(tmp_path / "model", intermediate_size=101)
    artifact = compile_tiny(model, tmp_path / "out", tmp_path / "cache", buckets=LADDER, dtype="bf16")
    tokens = random_tokens(artifact.info.vocab_size, 24)
    expected = eager_logits(model, tokens, "bf16")
    replayer = Replayer(artifact, num_threads=2, num_blocks=16)
    graph = next(i for i, g in enumerate(artifact.graphs()) if g.phase == "prefill" and g.max_tokens >= 24)
    logits = replay(replayer, graph, Pages(16, artifact.info.block_size), [(0, tokens, 0)])
    assert relative_error(logits, expected[-1:]) < 2e-2


def test_a_model_that_mixes_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "quirky", family(Mixing))
    model = checkpoint(tmp_path / "model")
    with pytest.raises(CompileError, match=r"op aten\.mean\.dim \(node mean, .*60\]\) reduces over the token rows"):
        compile_tiny(model, tmp_path / "out", tmp_path / "cache", buckets=LADDER, dtype="f32")
    assert not (tmp_path / "out").exists()


def test_a_weight_shared_by_generic_and_llmc_ops_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "quirky", family(Sharing))
    model = checkpoint(tmp_path / "model")
    with pytest.raises(CompileError, match=r"weight norm\.weight is read by generic ops and by llmc ops; give each"):
        compile_tiny(model, tmp_path / "out", tmp_path / "cache", buckets=LADDER, dtype="f32")
    assert not (tmp_path / "out").exists()


def test_fused_commands_have_readable_names(quirky: tuple[Path, Artifact]) -> None:
    model, _ = quirky
    tables = read_graphs(model.parent / "artifact")
    ops_of_last = {commands_of(tables, graph)[-1].op for graph in tables.graphs}
    assert ops_of_last == {"fused_divide_tanh_multiply"}
