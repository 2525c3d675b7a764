"""Layers with a state: what their artifacts say of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets.ladder import DEFAULT_BLOCK_SIZE
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.kv_layers import kv_layer_records, state_layers
from llmc.compiler.resolve import resolve
from llmc.compiler.resolved import Resolved
from llmc.compiler.stages import bound_to, stage_ends
from llmc.compiler.store.described import version_with
from llmc.compiler.targets.registry import resolve_target
from llmc.graphs_format import VERSION_OF_KV_LAYERS, VERSION_OF_STATE_LAYERS
from llmc.graphs_records import KvLayerRecord, StageRecord
from llmc.models.delta_net import DeltaNet
from llmc.models.mamba import Mamba2
from llmc.models.short_conv import ShortConv
from llmc.models.sources.base import ModelSource

from support.tiny_models import make_tiny_model

NET = DeltaNet(layers=(0, 1, 2), key_heads=2, value_heads=4, key_dim=16, value_dim=16, taps=4)
REFERENCE = resolve_target("reference")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("states") / "model", "llama", num_hidden_layers=4)


@pytest.fixture
def source(llama: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """The model as if its first three layers had a state."""
    opened = CompileConfig(model=llama, output=llama).open_source()
    model = replace(opened.config(), delta_net=NET)
    monkeypatch.setattr(opened, "config", lambda: model)
    return opened


def resolved(source: ModelSource, path: Path, **options: Any) -> Resolved:
    return resolve(CompileConfig(model=path, output=path, target="reference", **options), source)


def test_the_records_of_layers(llama: Path, source: ModelSource) -> None:
    found = resolved(source, llama, block_size=32)
    attention = found.target.kv_block_bytes(*found.model.kv_heads(3), 32, found.kv_dtype)
    state = KvLayerRecord(4 * 4 * 16 * 16, 4 * 3 * NET.channels)
    assert found.state_layers() == (0, 1, 2)
    assert found.kv_layer_records() == (state, state, state, KvLayerRecord(*attention))
    assert version_with(found.ladder, found) == VERSION_OF_STATE_LAYERS
    without = resolve(CompileConfig(model=llama, output=llama, target="reference"))
    assert without.state_layers() == ()
    assert version_with(without.ladder, without) < VERSION_OF_KV_LAYERS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel": 2}, "llama has layers with a state, which --tensor-parallel does not divide yet"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], said: str, llama: Path, source: ModelSource) -> None:
    with pytest.raises(CompileError, match=f"^{said}: leave it out$"):
        resolved(source, llama, **options)


def test_stages_divide_them(llama: Path, source: ModelSource) -> None:
    assert sum(resolved(source, llama, pipeline_parallel=2).stage_layers) == 4


def test_a_window_alone_lies_in_the_k_pool(source: ModelSource) -> None:
    """Of a convolution without other states."""
    conv = ShortConv((0, 1, 2), channels=60, taps=3)
    model = replace(source.config(), delta_net=None, short_conv=conv)
    records = kv_layer_records(model, REFERENCE, 32, "f32")
    assert records[:3] == (KvLayerRecord(4 * 2 * 60, 0),) * 3
    assert records[3].value_block_bytes > 0
    assert state_layers(model) == (0, 1, 2)


def test_states_do_not_change_the_size_of_blocks(llama: Path, source: ModelSource) -> None:
    found = resolved(source, llama)
    assert found.block_size == found.model_record().block_size == DEFAULT_BLOCK_SIZE
    assert resolved(source, llama, block_size=16).block_size == 16
    other = resolved(source, llama, block_size=64)
    assert other.kv_layer_records()[:3] == found.kv_layer_records()[:3]
    assert other.kv_layer_records()[3] != found.kv_layer_records()[3]


MIXERS = Mamba2((0, 3), heads=4, head_dim=16, state_size=8, groups=2, taps=4, conv_bias=True, bias=False)


@pytest.fixture
def of_single_blocks(llama: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """The model as if it had a mixer, a feed-forward block, attention, and a mixer."""
    opened = CompileConfig(model=llama, output=llama).open_source()
    model = replace(opened.config(), mamba=MIXERS, mlp_only_layers=(1,), mixer_only_layers=(0, 2, 3))
    monkeypatch.setattr(opened, "config", lambda: model)
    return opened


def test_a_layer_of_a_feed_forward_block_has_no_kv_blocks(llama: Path, of_single_blocks: ModelSource) -> None:
    found = resolved(of_single_blocks, llama, block_size=32)
    model = found.model
    assert model.cached_layers == (0, 2, 3)
    assert [model.kv_layer(layer) for layer in model.cached_layers] == [0, 1, 2]
    assert (model.has_state(1), model.makes_kv(1), model.makes_kv(2)) == (False, False, True)
    attention = found.target.kv_block_bytes(*model.kv_heads(1), 32, found.kv_dtype)
    state = KvLayerRecord(4 * 64 * 8, 4 * 3 * (64 + 2 * 2 * 8))
    assert found.kv_layer_records() == (state, KvLayerRecord(*attention), state)
    assert found.state_layers() == (0, 2)
    assert found.model_record().num_layers == 3


def test_a_mixer_beside_attention_has_kv_blocks_of_its_own(
    llama: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind those of keys and values, in the same stage."""
    beside = replace(MIXERS, layers=(0, 1, 3), beside=True)
    model = replace(source.config(), delta_net=None, mamba=beside, mlp_only_layers=(2,))
    assert model.cached_layers == (0, 0, 1, 1, 3, 3)
    assert [model.kv_layer(layer) for layer in (0, 1, 3)] == [0, 2, 4]
    assert [model.state_layer(layer) for layer in (0, 1, 3)] == [1, 3, 5]
    assert all(model.has_state(layer) and model.makes_kv(layer) for layer in (0, 1, 3))
    records, states = kv_layer_records(model, REFERENCE, 32, "f32"), state_layers(model)
    attention = REFERENCE.kv_block_bytes(*model.kv_heads(0), 32, "f32")
    assert records == (KvLayerRecord(*attention), KvLayerRecord(*beside.pool_bytes)) * 3
    assert states == (1, 3, 5)
    monkeypatch.setattr(source, "config", lambda: model)
    found = resolved(source, llama, pipeline_parallel=2)
    assert found.stage_layers == (3, 1)
    assert found.stage_records() == [StageRecord(0, 4), StageRecord(4, 2)]


def test_every_stage_has_a_layer_of_the_kv_cache(llama: Path, of_single_blocks: ModelSource) -> None:
    found = resolved(of_single_blocks, llama, pipeline_parallel=3)
    assert found.stage_layers == (2, 1, 1)
    assert found.stage_records() == [StageRecord(0, 1), StageRecord(1, 1), StageRecord(2, 1)]
    said = "layers of llama that have a feed-forward block alone have to be in the stage of another layer"
    with pytest.raises(CompileError, match=f"pipeline-parallel is 4, but {said}, so 4 layers make 3 at most"):
        resolved(of_single_blocks, llama, pipeline_parallel=4)


def test_a_stage_begins_with_its_first_layer_of_the_kv_cache(of_single_blocks: ModelSource) -> None:
    """Also where that is behind a feed-forward block."""
    model = replace(of_single_blocks.config(), mlp_only_layers=(0, 3), mixer_only_layers=(1, 2))
    assert stage_ends(bound_to(model)) == [2, 4]
