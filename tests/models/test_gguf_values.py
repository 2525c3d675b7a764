"""Tensors and configurations of GGUF files, against the gguf package and the checkpoints that they were made of."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmc.models import ModelConfig, ModelError, open_source
from llmc.models.context import trained_length
from llmc.models.convert import DTYPES
from llmc.models.loader import Parameter, check_checkpoint, load_parameters
from llmc.models.rope import cos_sin_table
from llmc.models.sources.gguf.architectures import ARCHITECTURES
from llmc.models.sources.gguf.stored import LAYOUTS
from llmc.models.sources.gguf.tensor import HeadRows, QuantizedTensor
from llmc.models.sources.gguf.types import READ
from llmc.models.sources.stored import Stored
from llmc.quantize.formats.base import Quantized
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.integers import Integers

from support.gguf_models import CASES, QUANTIZED, SIZES, gguf_name, paired, random_blocks, write_gguf
from support.tiny_models import ModelFields, make_tiny_model


def tensor_of(data: np.ndarray, type: str, order: HeadRows | None = None) -> QuantizedTensor:
    stored = READ[Type[type].value]
    shape = (len(data), data.shape[1] // stored.nbytes * stored.elements)
    return QuantizedTensor("x.gguf: tensor x", data, shape, stored, order)


@pytest.mark.parametrize("type", QUANTIZED)
def test_every_bit_is_that_of_the_gguf_package(type: str) -> None:
    """Of random bytes, so of every number and every scale, negative ones too, and of any cut in rows."""
    columns, data = 512, half_random(type, 300)
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(data, Type[type])
    tensor = tensor_of(data, type)
    assert tensor.shape == expected.shape
    whole = np.empty_like(expected)
    tensor.read(0, whole)
    assert np.array_equal(whole.view(np.uint32), expected.view(np.uint32))
    for first, count in ((0, 1), (7, 150), (299, 1)):
        wide = np.full((count, columns + 8), 7, np.float32)
        tensor.read(first, wide[:, 8:])
        assert np.array_equal(wide[:, 8:].view(np.uint32), expected[first : first + count].view(np.uint32))
        assert (wide[:, :8] == 7).all()


def half_random(type: str, rows: int) -> np.ndarray:
    """Blocks of 512 elements a row, half of them with scales of any bits but infinite ones."""
    rng = np.random.default_rng(READ[Type[type].value].nbytes)
    data = random_blocks(rows, 512, type, rng)
    blocks = data.reshape(-1, READ[Type[type].value].nbytes)
    for at in READ[Type[type].value].scales:
        half = len(blocks) // 2
        blocks[:half, at : at + 2] = rng.integers(0, 256, (half, 2), dtype=np.uint8)
        # All but those that are infinite or no numbers.
        blocks[:half, at + 1] &= 0xFB
    return data


def check_stored(stored: Stored, data: np.ndarray, type: str) -> None:
    """Of any cut in rows. Zeros may differ in their sign, beside offsets."""
    expected = gguf.quants.dequantize(data, Type[type])
    for first, count in ((0, len(data)), (7, 20), (len(data) - 1, 1)):
        found = Quantized.empty(stored.format, count, 512)
        stored.read(first, found)
        assert np.array_equal(found.value().astype(np.float32), expected[first : first + count]), type


@pytest.mark.parametrize("type", LAYOUTS)
def test_numbers_that_are_kept_are_those_values(type: str) -> None:
    stored, data = tensor_of(half_random(type, 300), type).stored, half_random(type, 300)
    assert stored is not None
    check_stored(stored, data, type)
    bits = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}
    whole = {type: Integers(number, 32, scale_kind="f16") for type, number in bits.items()}
    assert stored.format == {**LAYOUTS, **whole, "IQ4_NL": Codes("iq4_nl", 32, "f16")}[type]


@pytest.mark.parametrize("types", list(combinations(LAYOUTS, 2)))
def test_two_types_have_a_format_that_keeps_both(types: tuple[str, str]) -> None:
    data = [half_random(type, 40) for type in types]
    first, second = (tensor_of(some, type).stored for some, type in zip(data, types, strict=True))
    assert first is not None
    assert second is not None
    alike = first.alike([second])
    assert alike is not None
    assert alike[0].format == alike[1].format
    for stored, some, type in zip(alike, data, types, strict=True):
        check_stored(stored, some, type)


@pytest.mark.parametrize(
    ("types", "bits"), [(("Q4_K", "Q6_K"), 6), (("Q5_K", "Q6_K"), 6), (("Q4_K", "Q5_K"), 5), (("Q4_K", "Q8_0"), 8)]
)
def test_signed_and_unsigned_numbers_take_a_bit_more(types: tuple[str, str], bits: int) -> None:
    first, second = (tensor_of(half_random(type, 2), type).stored for type in types)
    assert first is not None
    assert second is not None
    for one, other in ((first, second), (second, first)):
        alike = one.alike([other])
        assert alike is not None
        assert {stored.format.bits for stored in alike} == {bits}


def test_both_types_of_codes_go_together() -> None:
    data = half_random("IQ4_NL", 4), half_random("IQ4_XS", 4)
    nl, xs = (tensor_of(some, type).stored for some, type in zip(data, ("IQ4_NL", "IQ4_XS"), strict=True))
    assert nl is not None
    assert xs is not None
    alike = nl.alike([xs])
    assert alike is not None
    assert [one.format for one in alike] == [Codes("iq4_nl", 32)] * 2


def test_what_is_not_kept() -> None:
    assert set(QUANTIZED) == LAYOUTS.keys()
    kept = tensor_of(half_random("Q8_0", 2), "Q8_0").stored
    assert kept is not None
    matrix = Integers(8, 32)

    class Other(Stored):
        format = matrix

        def read(self, first: int, out: Quantized) -> None: ...

    assert kept.alike([Other()]) is None


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K"])
def test_rows_of_heads_are_put_in_our_order(type: str) -> None:
    rng = np.random.default_rng(1)
    heads, head_dim = 3, 16
    data = random_blocks(heads * head_dim, 256, type, rng)
    expected = gguf.quants.dequantize(data, Type[type])
    tensor = tensor_of(paired(data, heads), type, HeadRows(head_dim, head_dim))
    for first, count in ((0, 48), (5, 1), (13, 20)):
        out = np.empty((count, 256), np.float32)
        tensor.read(first, out)
        assert np.array_equal(out, expected[first : first + count])
        stored = tensor.stored
        assert stored is not None
        numbers = Quantized.empty(stored.format, count, 256)
        stored.read(first, numbers)
        assert np.array_equal(numbers.value().astype(np.float32), out)
    # Rows that are not rotated stay where they are.
    rows = HeadRows(8, 4).stored(np.arange(16))
    assert rows.tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type", QUANTIZED)
def test_a_scale_that_is_no_finite_number_is_named(type: str, value: float) -> None:
    stored = READ[Type[type].value]
    for at in stored.scales:
        data = random_blocks(20, 512, type, np.random.default_rng(0))
        blocks = data.reshape(20, -1, stored.nbytes)
        blocks[13, 1, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        tensor = tensor_of(data, type)
        tensor.read(0, np.empty((13, 512), np.float32))
        message = f"x.gguf: tensor x of type {type} has a scale of {value} in row 13"
        with pytest.raises(ModelError, match=message):
            tensor.read(0, np.empty((20, 512), np.float32))
        if (kept := tensor.stored) is not None:
            with pytest.raises(ModelError, match=message):
                kept.read(0, Quantized.empty(kept.format, 20, 512))


def values(parameters: list[Parameter]) -> dict[str, np.ndarray]:
    return {p.name: p.value() for p in parameters}


def check_same(path: Path, dequantized: Path) -> ModelConfig:
    """That a GGUF has the configuration and the parameters of a checkpoint; returns the former."""
    source, other = open_source(path), open_source(dequantized)
    config = source.config()
    for act_dtype in ("f32", "bf16"):
        ours = values(list(load_parameters(config, source.checkpoint(), act_dtype)))
        theirs = values(list(load_parameters(other.config(), other.checkpoint(), act_dtype)))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype
            assert ours[name].tobytes() == value.tobytes(), name
    return config


ONE_LAYER: ModelFields = {**SIZES, "num_hidden_layers": 1}


@pytest.mark.parametrize("case", CASES)
def test_families_are_read_as_their_checkpoints(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    sizes: dict[str, Any] = {**SIZES, **fields}
    model = make_tiny_model(tmp_path / "m", family, **sizes)
    path = write_gguf(model, tmp_path / "m.gguf", "F32", dequantized=tmp_path / "d")
    config, expected = check_same(path, tmp_path / "d"), open_source(model).config()
    # A GGUF of Mistral's is one of llama, unless it has a window; without a tokenizer it names no tokens.
    kind = "llama" if family == "mistral" and expected.sliding_window is None else family
    assert config == replace(expected, model_type=kind, eos_token_ids=(), bos_token_id=None)


@pytest.mark.parametrize("type", [*QUANTIZED, "F16", "BF16"])
def test_types_are_read_as_the_values_they_stand_for(type: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", "llama", **ONE_LAYER)
    path = write_gguf(model, tmp_path / "m.gguf", type, dequantized=tmp_path / "d")
    config = check_same(path, tmp_path / "d")
    assert config.dtype == {"F16": "f16"}.get(type, "bf16")
    checkpoint = open_source(path).checkpoint()
    assert checkpoint.dtype("model.layers.0.mlp.up_proj.weight") == type.lower()
    assert checkpoint.dtype("model.norm.weight") == "f32"


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_rope_scaling_is_that_of_the_model(kind: str, tmp_path: Path) -> None:
    scaling = {
        "linear": {"factor": 3.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32},
    }[kind]  # fmt: skip
    rope = {"rope_theta": 10000.0, "rope_type": kind, **scaling}
    fields: ModelFields = {**SIZES, "num_hidden_layers": 1, "rope_parameters": rope}
    model = make_tiny_model(tmp_path / "m", "llama", **fields)
    path = write_gguf(model, tmp_path / "m.gguf", "F32", dequantized=tmp_path / "d")
    config, expected = check_same(path, tmp_path / "d"), open_source(model).config()
    assert config.rope.scaling is not None
    assert config.rope.scaling.rope_type == {"llama3": "factors"}.get(kind, kind)
    assert trained_length(config) == trained_length(expected)
    found, wanted = cos_sin_table(config.rope, 128), cos_sin_table(expected.rope, 128)
    if kind == "llama3":
        # Factors are what was rounded once more.
        assert np.abs(found - wanted).max() < 1e-4
        assert np.abs(found - cos_sin_table(replace(expected.rope, scaling=None), 128)).max() > 0.1
    else:
        assert np.array_equal(found, wanted)


def our_name(theirs: str) -> str:
    ((ours, place),) = ARCHITECTURES["llama"].places(theirs, (4, 4))
    assert place.name == theirs
    return ours


def test_names_are_each_others_inverse() -> None:
    parts = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "input_layernorm")
    layers = [f"model.layers.{i}.{part}.{kind}" for i in (0, 7, 39) for part in parts for kind in ("weight", "bias")]
    for ours in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight", *layers):
        assert ARCHITECTURES["llama"].their_name(ours) == gguf_name(ours)
        assert our_name(gguf_name(ours)) == ours
    for theirs in ("blk.01.attn_q.weight", "blk.0.attn_q.weight.x", "blk.0.x.weight", "output"):
        assert our_name(theirs) == theirs


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_experts_are_parts_of_a_tensor(name: str) -> None:
    architecture = ARCHITECTURES[name]
    for theirs in architecture.experts:
        places = list(architecture.places(f"blk.3.{theirs}", (4, 6) if theirs.endswith("bias") else (4, 6, 8)))
        assert [place.expert for _, place in places] == [0, 1, 2, 3]
        assert {architecture.their_name(ours) for ours, _ in places} == {f"blk.3.{theirs}"}


def test_a_split_model_is_one(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", "qwen3", **SIZES)
    write_gguf(model, tmp_path / "s.gguf", "Q8_0", dequantized=tmp_path / "d", split=7)
    shards = sorted(tmp_path.glob("s-*.gguf"))
    assert len(shards) == 4
    assert shards[0].name == "s-00001-of-00004.gguf"
    check_same(shards[0], tmp_path / "d")
    source = open_source(shards[0])
    assert list(source.weight_files()) == list(source.all_files()) == shards
    with pytest.raises(ModelError, match=r"is file 2 of 4 of a split model: give the first one.*-00001-of-00004\.gguf"):
        open_source(shards[1]).config()
    kept = shards[2].read_bytes()
    shards[2].write_bytes(shards[1].read_bytes())
    with pytest.raises(ModelError, match=r"s-00003-of-00004\.gguf says that it is file 2 of 4, not 3 of 4"):
        open_source(shards[0]).config()
    shards[2].unlink()
    with pytest.raises(ModelError, match=r"s-00003-of-00004\.gguf does not exist"):
        open_source(shards[0]).config()
    shards[2].write_bytes(kept)
    alone = shards[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelError, match=r"split\.count is 4, so its name must end in -00001-of-00004\.gguf"):
        open_source(alone).config()


def refusal(path: Path) -> str:
    source = open_source(path)
    try:
        check_checkpoint(source.config(), source.checkpoint())
    except ModelError as error:
        return str(error)
    pytest.fail("the model is taken")


def test_a_model_that_does_not_fit_is_told_in_its_own_names(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", "llama", **ONE_LAYER)
    fields = json.loads((model / "config.json").read_text())

    def error(**changes: object) -> str:
        (model / "config.json").write_text(json.dumps({**fields, **changes}))
        path = write_gguf(model, tmp_path / "m.gguf", "F32")
        return refusal(path)

    assert "lacks the tensor blk.1.attn_norm.weight of shape [256]" in error(num_hidden_layers=2)
    message = error(intermediate_size=128)
    assert "tensor blk.0.ffn_gate.weight has shape [256, 256] where its metadata implies [128, 256]" in message
    message = error(model_type="deci")
    assert "architecture 'deci' is not supported; supported are llama, qwen2, qwen3" in message


def test_bf16_of_a_tensor_is_rounded_from_its_value() -> None:
    data = random_blocks(8, 256, "Q8_0", np.random.default_rng(3))
    out, exact = np.empty((8, 256), DTYPES["bf16"]), gguf.quants.dequantize(data, Type.Q8_0)
    tensor_of(data, "Q8_0").read(0, out)
    assert np.array_equal(out.view(np.uint16), exact.astype(DTYPES["bf16"]).view(np.uint16))
