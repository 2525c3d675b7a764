"""GGUF files that `llmc quantize` writes: what the gguf package reads in them, and what we do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from llmc.compiler.calibration import driver
from llmc.compiler.calibration.request import CalibrationConfig
from llmc.compiler.config import CompileError
from llmc.models import ModelError
from llmc.models.eager import as_tensor, load_model
from llmc.models.loader import load_parameters
from llmc.models.read_config import load_config
from llmc.models.sources.gguf.tensor import QuantizedTensor
from llmc.models.sources.gguf.types import READ
from llmc.models.sources.registry import open_source
from llmc.quantize import QuantConfig, QuantizeError
from llmc.quantize.export.gguf import TYPES, Gguf
from llmc.quantize.methods.grids import ONE, find_grid, round_to_nearest

from support.compiled import check_every_bucket, compile_tiny, random_tokens, relative_error
from support.gguf_models import gguf_name, paired, write_gguf
from support.gguf_tokenizers import ODD
from support.marks import rare
from support.paged_reference import PagedRunner
from support.paths import ROOT, SHARED
from support.tiny_models import make_tiny_model

ENGLISH, STORIES = ROOT / "examples" / "tiny-english", SHARED / "models" / "stories260k"
SCHEMES = {
    "Q8_0": QuantConfig("w8a16"),
    "Q4_0": QuantConfig("w4a16"),
    "Q4_1": QuantConfig("w4a16", asymmetric=True),
    "MXFP4": QuantConfig("mxfp4"),
}
LADDER = "prefill=[4]x[12],decode=[4]x[64]"
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("gguf") / "model", "llama", **SHAPE)


def written(model: Path, output: Path, quant: QuantConfig, method: str = "rtn", **more: Any) -> Path:
    driver.quantize_checkpoint(CalibrationConfig(model, output, quant, method, layout="gguf", jobs=1, **more))
    return output


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    found: np.ndarray = PagedRunner(model).step([tokens])[0].numpy()
    return found


def rounded(model: Path, quant: QuantConfig) -> dict[str, np.ndarray]:
    """What the linear layers of a float model become in memory, by the names of transformers."""
    format, checkpoint = Gguf.format_for(quant), open_source(model).checkpoint()
    found = {}
    for name in checkpoint.names():
        if name.endswith("_proj.weight"):
            weight = np.empty(checkpoint.shape(name), np.float32)
            checkpoint.tensor(name).read(0, weight)
            grid = find_grid(weight, format, dtype="f16", shrinks=ONE)
            found[name] = round_to_nearest(weight, format, grid).value().astype(np.float32)
    return found


def in_memory(model: Path, values: dict[str, np.ndarray]) -> Any:
    """The float model with other values of its linear layers."""
    decoder = load_model(model)
    state = decoder.state_dict()
    for target in open_targets(model):
        if target.sources[0].name in values:
            joined = np.concatenate([values[source.name] for source in target.sources])
            state[target.name] = as_tensor(joined)
    decoder.load_state_dict(state, assign=True)
    return decoder


def open_targets(model: Path) -> Any:
    from llmc.models.registry import get_family

    config = load_config(model)
    return get_family(config.model_type).weight_map(config).targets


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("type", [rare(type) if type == "Q4_0" else type for type in SCHEMES])
def test_the_numbers_are_those_of_rounding_in_memory(
    type: str, model: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    """Bit for bit as the gguf package dequantizes them, as we do, and as compiled kernels multiply them."""
    path = written(model, tmp_path / "out.gguf", SCHEMES[type])
    expected, reader = rounded(model, SCHEMES[type]), gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    ours = open_source(path).checkpoint()
    for name, values in expected.items():
        tensor = tensors[gguf_name(name)]
        assert tensor.tensor_type.name == type
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = 4 if ".q_proj." in name else 2 if ".k_proj." in name else 0
        assert np.array_equal(found, paired(values, heads) if heads else values)
        read = np.empty_like(values)
        ours.tensor(name).read(0, read)
        assert np.array_equal(read, values)
    tokens = random_tokens(515)
    memory = logits(in_memory(model, expected), tokens)
    assert relative_error(logits(load_model(path), tokens), memory) < 1e-5
    artifact = compile_tiny(path, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype="f32")
    check_every_bucket(artifact, tokens, memory)
    kept = json.loads((tmp_path / "artifact" / "manifest.json").read_text())["weights"]["layers.1.mlp.down.weight"][
        "format"
    ]
    assert kept["kind"] == {"Q4_1": "affine", "MXFP4": "codes"}.get(type, "integers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_quantized_stays_as_the_checkpoint_has_it(dtype: torch.dtype, tmp_path: Path) -> None:
    """Matrices in the checkpoint's type, vectors in F32."""
    model = make_tiny_model(tmp_path / "model", "qwen2", dtype=dtype, **{**SHAPE, "intermediate_size": 80})
    path = written(model, tmp_path / "out.gguf", QuantConfig("w8a8", skip=("attention.out",)))
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    plain = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert types["token_embd.weight"] == types["output.weight"] == types["blk.0.attn_output.weight"] == plain
    assert types["blk.1.ffn_down.weight"] == plain  # rows of 80
    assert types["blk.1.ffn_up.weight"] == types["blk.1.attn_q.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == types["blk.0.attn_q.bias"] == types["output_norm.weight"] == "F32"
    theirs, ours = ({p.name: p.value() for p in load_parameters(load_config(at), open_source(at).checkpoint(), "f32")}
                    for at in (model, path))  # fmt: skip
    for name in ("embed.weight", "layers.0.attention_norm.weight", "layers.0.attention.qkv.bias", "lm_head.weight"):
        assert np.array_equal(theirs[name], ours[name]), name


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}), ("llama", {"tie_word_embeddings": True, "attention_bias": True}), ("qwen2", {}), ("qwen3", {}),
        ("mistral", {"sliding_window": 24}), *(("llama", {"rope_parameters": rope}) for rope in ROPES.values()),
    ],
    ids=["llama", "tied", "qwen2", "qwen3", "mistral", *ROPES],
)  # fmt: skip
def test_the_metadata_are_those_of_a_converter(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    """As the tests of the reader write them by hand, and the same model comes out."""
    model = make_tiny_model(tmp_path / "model", family, **{**SHAPE, **more})
    path = written(model, tmp_path / "out.gguf", QuantConfig("w8a16"))
    by_hand = write_gguf(model, tmp_path / "hand.gguf", "Q8_0")
    ours, theirs = ({key: field.contents() for key, field in gguf.GGUFReader(at).fields.items()}
                    for at in (path, by_hand))  # fmt: skip
    assert {key: ours.get(key) for key in theirs if not key.startswith("GGUF.")} == {
        key: value for key, value in theirs.items() if not key.startswith("GGUF.")
    }
    assert (ours["general.quantization_version"], ours["general.file_type"]) == (2, 7)
    names = [{tensor.name for tensor in gguf.GGUFReader(at).tensors} for at in (path, by_hand)]
    assert names[0] == names[1]
    tokens = random_tokens(515)
    assert relative_error(logits(load_model(path), tokens), logits(load_model(model), tokens)) < 0.2
    assert relative_error(logits(load_model(path), tokens), logits(load_model(by_hand), tokens)) < 0.05


def tokenizer_of(path: Path) -> Tokenizer:
    with open_source(path).model_files().open("tokenizer.json") as file:
        return Tokenizer.from_buffer(file.read())


@pytest.mark.parametrize("model", [ENGLISH, STORIES], ids=["byte-level", "sentence-piece"])
def test_the_tokenizer_makes_the_same_ids(model: Path, tmp_path: Path) -> None:
    if not model.is_dir():
        pytest.skip(f"{model.name} is not here")
    path = written(model, tmp_path / "out.gguf", QuantConfig("w8a16"))
    ours, theirs = tokenizer_of(path), Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [*ODD, (ROOT / "README.md").read_text(encoding="utf-8")]
    assert [ours.encode(text).ids for text in texts] == [theirs.encode(text).ids for text in texts]
    assert [ours.decode(ours.encode(text).ids) for text in texts] == [
        theirs.decode(theirs.encode(text).ids) for text in texts
    ]
    found, expected = open_source(path).config(), load_config(model)
    assert (found.bos_token_id, found.eos_token_ids) == (expected.bos_token_id, expected.eos_token_ids)


def test_templates_and_tokens_of_a_chat_are_kept(tmp_path: Path) -> None:
    model = ROOT / "examples" / "tiny-chat"
    path = written(model, tmp_path / "out.gguf", QuantConfig("w4a16"))
    with open_source(path).model_files().open("chat_template.jinja") as file:
        found = file.read().decode()
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    beside = model / "chat_template.jinja"
    assert found == (beside.read_text(encoding="utf-8") if beside.is_file() else settings["chat_template"])
    assert set(load_config(path).eos_token_ids) == set(load_config(model).eos_token_ids)
    text = "<|im_start|>user\nHello<|im_end|>\n"
    assert tokenizer_of(path).encode(text).ids == Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids


def test_a_tokenizer_that_cuts_otherwise_is_refused(model: Path, tmp_path: Path) -> None:
    for file in ENGLISH.iterdir():
        (tmp_path / "odd").mkdir(exist_ok=True)
        (tmp_path / "odd" / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(ENGLISH / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("e", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(tmp_path / "odd" / "tokenizer.json"))
    with pytest.raises(CompileError, match="cuts texts as none of GGUF's pre-tokenizers"):
        written(tmp_path / "odd", tmp_path / "out.gguf", QuantConfig("w8a16"))
    assert not (tmp_path / "out.gguf").exists()


def test_blocks_of_mxfp4_are_read_as_the_package_reads_them() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (510, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(510) % 255
    code = gguf.GGMLQuantizationType.MXFP4
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(blocks, code)
    tensor = QuantizedTensor("a tensor", blocks, (510, 32), READ[code.value], None)
    found = np.empty((510, 32), np.float32)
    tensor.read(0, found)
    assert np.array_equal(found, expected)
    blocks[7, 0] = 255
    with pytest.raises(ModelError, match="a tensor of type MXFP4 has a scale of nan in row 7"):
        tensor.read(0, found)


def test_every_type_of_the_layout_is_tested() -> None:
    assert set(SCHEMES) == set(TYPES.values())


def test_requests_that_no_file_holds(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(QuantizeError, match="has groups of 32, not of 64"):
        written(model, out, QuantConfig("w4a16", group_size=64))
    with pytest.raises(QuantizeError, match="holds w8a16, w8a8, w4a16, w4a8 and mxfp4"):
        written(model, out, QuantConfig("fp8"))
    dynamic = make_tiny_model(
        tmp_path / "dynamic", "llama", **SHAPE,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )  # fmt: skip
    with pytest.raises(CompileError, match="no place for rope scaling dynamic"):
        written(dynamic, out, QuantConfig("w8a16"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CompileError, match="needs the gguf package"):
        written(model, out, QuantConfig("w8a16"))
    assert not out.exists()
