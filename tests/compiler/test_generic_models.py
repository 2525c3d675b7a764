"""A model with plain torch ops between the llmc ops, compiled through the whole pipeline, against eager torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from llmc.compiler.config import CompileError
from llmc.models import ops, registry
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.graph_view import commands_of
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, check_every_bucket, compile_tiny, random_tokens, relative_error, replay
from support.marks import rare
from support.quirky_model import LADDER, Quirky, checkpoint, eager_logits, family

pytestmark = pytest.mark.native


class Mixing(Quirky):
    """Every token sees the mean of all embeddings."""

    def forward(self, input_ids: Tensor, *inputs: Any) -> Tensor:
        x = self.embed(input_ids)
        return self.lm_head(self.norm(ops.gather_rows(x - x.mean(0, keepdim=True), inputs[5])))


class Sharing(Quirky):
    """A generic op reads the weight of a norm."""

    def forward(self, input_ids: Tensor, *inputs: Any) -> Tensor:
        x = self.norm(self.embed(input_ids)).float() * self.get_parameter("norm.weight")
        return self.lm_head(ops.gather_rows(x, inputs[5]).to(ops.torch_act_dtype("f32")))


@pytest.fixture(scope="module")
def quirky(tmp_path_factory: pytest.TempPathFactory, quirky_cache: Path) -> tuple[Path, Artifact]:
    root = tmp_path_factory.mktemp("quirky")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, "quirky", family(Quirky))
        model = checkpoint(root / "model")
        return model, compile_tiny(model, root / "artifact", quirky_cache, buckets=LADDER, dtype="f32")


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


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2e-2), rare("f16", 2.5e-3)])
def test_16_bits_are_close(dtype: str, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "quirky", family(Quirky))
    # An odd hidden size: the last word of a packed row is half padding.
    model = checkpoint(tmp_path / "model", intermediate_size=101)
    artifact = compile_tiny(model, tmp_path / "out", tmp_path / "cache", buckets=LADDER, dtype=dtype)
    tokens = random_tokens(artifact.info.vocab_size, 24)
    expected = eager_logits(model, tokens, dtype)
    replayer = Replayer(artifact, num_threads=2, num_blocks=16)
    graph = next(i for i, g in enumerate(artifact.graphs()) if g.phase == "prefill" and g.max_tokens >= 24)
    logits = replay(replayer, graph, Pages(16, artifact.info.block_size), [(0, tokens, 0)])
    assert relative_error(logits, expected[-1:]) < bound


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
