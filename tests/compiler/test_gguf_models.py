"""A GGUF file compiled and run: logits and tokens are those of transformers on the weights that it stands for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open

from llmc import LLM, SamplingParams
from llmc.cli.main import main
from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.store import keys
from llmc.compiler.targets.cpu.quant_packing import unpack_quantized
from llmc.models import open_source
from llmc.models.loader import load_parameters
from llmc.quantize import QuantConfig
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.registry import format_of
from llmc.runtime.binding import Artifact
from llmc.runtime.text.tokenizer import Tokenizer

from support.compiled import check_every_bucket, compile_tiny
from support.failing import fails
from support.gguf_cases import ENCODERS, TOLD, in_blocks, read_as, told_fields
from support.gguf_converter import write_converted
from support.gguf_models import CASES, SIZES, write_gguf
from support.gguf_tokenizers import byte_level_words
from support.marks import rare
from support.new_family import targets_here
from support.parity import reference_logits
from support.paths import ROOT
from support.tiny_encoders import check_close, hidden_states, make_encoder, pooled, random_texts
from support.tiny_models import make_tiny_model
from support.verified import Claim, checked, on_targets, verifies

CHAT = ROOT / "examples" / "tiny-chat"
LADDER = "prefill=[1]x[32],decode=[1]x[64]"
# As a file of Q4_K_M mixes them, and others in the matrices that it leaves.
MIXED = {"token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q3_K", "attn_v": "Q8_0", "attn_output": "IQ4_XS",
         "ffn_down": "Q5_K", "ffn_gate": "Q2_K", "ffn_up": "Q4_K"}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """gguf: of `mixed` types, with a tokenizer. dequantized: the checkpoint of its values."""

    gguf: Path
    dequantized: Path
    artifact: Path


def mixed(name: str) -> str:
    return MIXED[name.removesuffix(".weight").rpartition(".")[2]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Model:
    root = tmp_path_factory.mktemp("gguf")
    document = json.loads((CHAT / "tokenizer.json").read_text(encoding="utf-8"))
    checkpoint = make_tiny_model(
        root / "checkpoint", "llama", vocab_size=len(document["model"]["vocab"]) + 3, hidden_size=256, head_dim=64,
        intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    words = byte_level_words(
        document, "gpt-2", roles={"bos": 0, "eos": 1}, flags={"add_bos_token": True},
        template=(CHAT / "chat_template.jinja").read_text(encoding="utf-8"),
    )  # fmt: skip
    path = root / "model-q4_k_m.gguf"
    write_gguf(checkpoint, path, mixed, dequantized=root / "dequantized", tokenizer=words.add)
    compile_tiny(path, root / "artifact", kernel_cache, buckets=LADDER, dtype="f32").close()
    return Model(path, root / "dequantized", root / "artifact")


@verifies(lambda: on_targets(Claim("qwen2", stored="gguf")))
def test_an_embedding_of_its_own_and_its_head_keep_their_types(tmp_path: Path, kernel_cache: Path) -> None:
    checkpoint = make_tiny_model(
        tmp_path / "checkpoint", "qwen2", hidden_size=256, head_dim=64, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    types = {"token_embd.weight": "Q4_K", "output.weight": "IQ4_NL"}
    path, dequantized = tmp_path / "model.gguf", tmp_path / "dequantized"
    write_gguf(checkpoint, path, lambda name: types.get(name, "Q8_0"), dequantized=dequantized)
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 500, 40)]
    expected = reference_logits(dequantized, tokens)
    for target in targets_here():
        out = tmp_path / target
        artifact = compile_tiny(path, out, kernel_cache, buckets=LADDER, dtype="f32", target=target)
        check_every_bucket(artifact, tokens, expected)
        artifact.close()
        weights = json.loads((out / "manifest.json").read_text())["weights"]
        assert weights["embed.weight"]["format"] == Affine(4, scale_kind="f16").record()
        assert weights["lm_head.weight"]["format"] == Codes("iq4_nl", 32, "f16").record()


OTHERS = ("gemma", "gemma2", "gemma3_text", "granite", "mixtral", "olmo2", "qwen2_moe", "qwen3_moe", "starcoder2")


@verifies(lambda family: on_targets(Claim(family, stored="gguf")))
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if family == "qwen2_moe" else pytest.mark.exhaustive)
        for family in OTHERS
    ],
)
def test_other_architectures(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    _, fields = CASES[family]
    sizes = {**SIZES, "max_position_embeddings": 64, **fields}
    checkpoint = make_tiny_model(tmp_path / "checkpoint", family, **sizes)
    path, dequantized = tmp_path / "model.gguf", tmp_path / "dequantized"
    write_gguf(checkpoint, path, "Q8_0", dequantized=dequantized)
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 90, 40)]
    expected = reference_logits(dequantized, tokens)
    for target in targets_here():
        with compile_tiny(
            path, tmp_path / target, kernel_cache, buckets=LADDER, dtype="f32", target=target
        ) as artifact:
            check_every_bucket(artifact, tokens, expected)


def in_q8_0(name: str) -> Type:
    """Routers are left as they are, as llama.cpp leaves them."""
    return Type.F32 if "ffn_gate_inp" in name else Type.Q8_0


@verifies(lambda case: [Claim(read_as(case), stored="gguf")])
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", TOLD)
def test_every_architecture(case: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Numbers that are kept, in rows of whole blocks."""
    kind, sizes = told_fields(case, in_blocks(case))
    model, path, values = make_tiny_model(tmp_path / "m", kind, **sizes), tmp_path / "m.gguf", tmp_path / "values"
    config = open_source(model).config()
    write_converted(model, path, config, TOLD[case][1], in_q8_0, dequantized=values)
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 500, 40)]
    with compile_tiny(path, tmp_path / "out", kernel_cache, buckets=LADDER, dtype="f32", tokenizer="none") as artifact:
        check_every_bucket(artifact, tokens, reference_logits(values, tokens))


@verifies(lambda: [Claim("qwen3_5_text", stored="gguf", target="reference")])
def test_gated_delta_nets_on_the_reference_target(tmp_path: Path, kernel_cache: Path) -> None:
    """Value heads of a key head lie apart in the file."""
    kind, sizes = told_fields("qwen3_5_text", in_blocks("qwen3_5_text"))
    model, path, values = make_tiny_model(tmp_path / "m", kind, **sizes), tmp_path / "m.gguf", tmp_path / "values"
    config = open_source(model).config()
    write_converted(model, path, config, TOLD["qwen3_5_text"][1], in_q8_0, dequantized=values)
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 500, 40)]
    with compile_tiny(
        path, tmp_path / "out", kernel_cache, buckets=LADDER, dtype="f32", target="reference", tokenizer="none"
    ) as artifact:
        check_every_bucket(artifact, tokens, reference_logits(values, tokens))
        weights = json.loads((tmp_path / "out" / "manifest.json").read_text())["weights"]
        assert "format" in weights["layers.0.attention.inputs.weight"]


def gemma3n_file(folder: Path, **sizes: Any) -> tuple[Path, Path]:
    """(a file in Q8_0, the checkpoint of its values). The table of per-layer inputs has rows of whole blocks."""
    kind, told = told_fields("gemma3n_text", {**in_blocks("gemma3n_text"), **sizes})
    model = make_tiny_model(folder / "m", kind, **{**told, "hidden_size_per_layer_input": 32})
    metadata = {**TOLD["gemma3n_text"][1], "embedding_length_per_layer_input": 32}
    path, values = folder / "m.gguf", folder / "values"
    write_converted(model, path, open_source(model).config(), metadata, in_q8_0, dequantized=values)
    return path, values


@pytest.mark.parametrize("tied", [False, True])
def test_tables_keep_their_numbers_where_layers_are_rounded(tied: bool, tmp_path: Path) -> None:
    """No scheme rounds them; the per-layer inputs are most of a Gemma 3n. A tied embedding is the output projection."""
    path, _ = gemma3n_file(tmp_path, tie_word_embeddings=tied)
    quant = QuantConfig("w4a16", skip=("mlp.down",))
    recipe = resolve(CompileConfig(model=path, output=tmp_path / "out", quant=quant)).recipe
    kept = {"inputs.table.weight"} if tied else {"inputs.table.weight", "embed.weight"}
    assert recipe.methods == dict.fromkeys(kept, "q8_0")
    checkpoint = open_source(path)
    parameters = {p.name: p for p in load_parameters(checkpoint.config(), checkpoint.checkpoint(), "f32")}
    for name in kept:
        stored = parameters[name].stored
        assert stored is not None
        assert recipe.schemes[name].weight == stored.format
    assert recipe.schemes["layers.0.mlp.gate_up.weight"] == quant.layers
    assert recipe.schemes["embed.weight" if tied else "lm_head.weight"] == quant.head
    assert "layers.0.mlp.down.weight" not in recipe.schemes
    # With --skip lm_head, a tied embedding has the type of the activations.
    skipping = QuantConfig("w4a16", skip=("lm_head",))
    skipped = resolve(CompileConfig(model=path, output=tmp_path / "out", quant=skipping)).recipe
    assert ("embed.weight" in skipped.schemes) is not tied


@pytest.mark.slow
def test_a_table_with_its_numbers_beside_rounded_layers(tmp_path: Path, kernel_cache: Path) -> None:
    path, values = gemma3n_file(tmp_path)
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 500, 40)]
    options: dict[str, Any] = {"buckets": LADDER, "dtype": "f32", "tokenizer": "none", "quant": QuantConfig("w8a16")}
    with compile_tiny(path, tmp_path / "out", kernel_cache, **options) as artifact:
        weights = json.loads((tmp_path / "out" / "manifest.json").read_text())["weights"]
        methods = {name: weights[name]["method"] for name in ("inputs.table.weight", "layers.0.mlp.down.weight")}
        assert methods == {"inputs.table.weight": "q8_0", "layers.0.mlp.down.weight": "rtn"}
        check_every_bucket(artifact, tokens, reference_logits(values, tokens), bound=0.1)


@pytest.mark.parametrize("family", [*(rare(one) for one in ENCODERS if one != "bert"), "bert"])
def test_every_encoder(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    make_encoder(tmp_path / "m", family)
    path, out, metadata = tmp_path / "m.gguf", tmp_path / "out", {"attention.causal": False, "pooling_type": 1}
    write_converted(tmp_path / "m", path, open_source(tmp_path / "m").config(), {**metadata, **ENCODERS[family]})
    compile_tiny(path, out, kernel_cache, buckets="prefill=[4]x[64]", dtype="f32", tokenizer="none").close()
    texts = random_texts((5, 17, 32))
    with LLM(out, num_threads=1) as llm:
        for text, found in zip(texts, llm.embed(texts), strict=True):
            check_close(found.vector, pooled(hidden_states(tmp_path / "m", text), "mean", normalised=True))


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@verifies(lambda: [Claim("llama", stored="gguf")])
def test_logits_and_tokens_are_those_of_transformers(model: Model) -> None:
    tokens = [int(t) for t in np.random.default_rng(3).integers(3, 2000, 40)]
    check_every_bucket(Artifact(model.artifact), tokens, reference_logits(model.dequantized, tokens))
    checked(model.artifact)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    (output,) = LLM(model.artifact, num_threads=1).generate([tokens[:20]], params)
    found = output.outputs[0].token_ids
    assert list(found) == greedy(model.dequantized, tokens[:20], 16)
    assert len(set(found)) > 3


def test_an_artifact_has_every_bit_of_the_values(model: Model, tmp_path: Path, kernel_cache: Path) -> None:
    """What is kept stands for the values of the gguf package; the rest has the bytes of a checkpoint of them."""
    out = tmp_path / "out"
    config = CompileConfig(
        model.dequantized, out, LADDER, dtype="f32", cache_dir=kernel_cache, jobs=1, tokenizer="none"
    )
    assert compile_model(config).notes == ()
    weights = json.loads((model.artifact / "manifest.json").read_text())["weights"]
    source, kept = open_source(model.dequantized), {}
    with (
        safe_open(model.artifact / "weights.safetensors", "np") as ours,
        safe_open(out / "weights.safetensors", "np") as theirs,
    ):
        for parameter in load_parameters(source.config(), source.checkpoint(), "f32"):
            name = parameter.name
            if "format" not in weights[name]:
                assert ours.get_tensor(name).tobytes() == theirs.get_tensor(name).tobytes(), name
                continue
            format = format_of(weights[name]["format"])
            n, k = parameter.shape
            names = {"numbers": name, **{plane.name: f"{name}.{plane.name}" for plane in format.planes(k)}}
            arrays = {part: ours.get_tensor(tensor) for part, tensor in names.items()}
            parts = 2 if "gate_up" in name else 1
            halves = ({part: np.split(array, parts)[i] for part, array in arrays.items()} for i in range(parts))
            value = np.concatenate([unpack_quantized(half, n // parts, k, format).value() for half in halves])
            assert np.array_equal(value.astype(np.float32), parameter.value()), name
            kept[name.removeprefix("layers.0.").removesuffix(".weight")] = weights[name]["method"], format
    assert kept == {
        "embed": ("q6_k", Affine(6, 16, offsets=False, scale_kind="f16")),
        "attention.out": ("iq4_xs", Affine(4, 32, offsets=False, table="iq4_nl", scale_kind="f16")),
        "attention.qkv": ("q3_k, q4_k, q8_0", Affine(8, 16, block=32, scale_kind="f16")),
        "mlp.gate_up": ("q2_k, q4_k", Affine(4, 16, scale_kind="f16")),
        "mlp.down": ("q5_k", Affine(5, 32, scale_kind="f16")),
    }


@verifies(lambda: [Claim("llama", stored="gguf", target="reference")])
def test_the_reference_target_has_the_same_logits(model: Model, tmp_path: Path, kernel_cache: Path) -> None:
    tokens = [int(t) for t in np.random.default_rng(4).integers(3, 2000, 40)]
    artifact = compile_tiny(model.gguf, tmp_path / "out", kernel_cache, buckets=LADDER, dtype="f32", target="reference")
    check_every_bucket(artifact, tokens, reference_logits(model.dequantized, tokens))
    artifact.close()


def test_text_files_are_those_of_the_tokenizer(model: Model) -> None:
    ours, original = Tokenizer(model.artifact), json.loads((CHAT / "tokenizer.json").read_text(encoding="utf-8"))
    from tokenizers import Tokenizer as Backend

    text = "I am very unhappy; nobody comes!"
    assert ours.encode(text) == [0, *Backend.from_str(json.dumps(original)).encode(text, add_special_tokens=False).ids]
    assert (ours.bos_token, ours.eos_token, ours.eos_token_ids) == ("<s>", "</s>", (1,))
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(json.dumps(original)), bos_token="<s>", eos_token="</s>"
    )
    reference.chat_template = (CHAT / "chat_template.jinja").read_text(encoding="utf-8")
    messages = [{"role": "user", "content": text}]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == expected
    info = Artifact(model.artifact).info
    assert info.vocab_size == 2051


def test_the_command_says_what_becomes_of_the_weights(
    model: Model, tmp_path: Path, kernel_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compile", str(model.gguf), "-o", str(tmp_path / "out"), "--buckets", LADDER, "--dtype", "f32",
               "--cache-dir", str(kernel_cache), "--jobs", "1"]  # fmt: skip
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    notes = [
        "attention.out (IQ4_XS): kept as stored, iq4_nl in groups of 32, in blocks of 256, exact",
        "mlp.gate_up (Q2_K, Q4_K): kept as stored, w4a16 in groups of 16 with offsets, in blocks of 256, exact",
        "mlp.down (Q5_K): kept as stored, w5a16 in groups of 32 with offsets, in blocks of 256, exact",
        "embed (Q6_K): kept as stored, w6a16 in groups of 16, in blocks of 256, exact",
        "attention.qkv (Q3_K, Q4_K, Q8_0): kept as stored, w8a16 in groups of 16 with offsets, in blocks of 32, exact",
    ]
    assert all(f"llmc: note: {note}" in captured.err for note in notes)
    assert json.loads(captured.out)["notes"] == notes
    # The same model again replaces the artifact without being asked to, another one does not.
    assert main(command) == 0
    capsys.readouterr()
    other = Path(shutil.copy(model.gguf, tmp_path / "other.gguf"))
    data = bytearray(other.read_bytes())
    data[-100] ^= 1
    other.write_bytes(data)
    fails(capsys, 1, [command[0], other, *command[2:]], "values of weights", "--overwrite")


def test_what_is_lost_is_said_by_kind_of_layer(
    model: Model, tmp_path: Path, kernel_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Matrices that are joined with one of F16 become bf16; the manifest and llmc inspect keep what that costs."""
    path, values = tmp_path / "m.gguf", tmp_path / "values"
    types = {"blk.0.attn_k.weight": "F16", "token_embd.weight": "F16"}
    write_gguf(model.dequantized, path, lambda name: types.get(name, "Q8_0"), dequantized=values)
    out = tmp_path / "out"
    command = ["compile", str(path), "-o", str(out), "--buckets", LADDER, "--no-tokenizer", "--json",
               "--cache-dir", str(kernel_cache), "--jobs", "2"]  # fmt: skip
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)["notes"]
    source = open_source(values)
    parameters = {p.name: p.value() for p in load_parameters(source.config(), source.checkpoint(), "f32")}

    def error(name: str) -> float:
        value = torch.from_numpy(parameters[name]).double()
        return float((value.bfloat16().double() - value).norm() / value.norm())

    qkv, embed = error("layers.0.attention.qkv.weight"), error("embed.weight")
    assert found == [
        "attention.out (Q8_0), mlp.down (Q8_0), mlp.gate_up (Q8_0): kept as stored, w8a16 in symmetric groups of 32, "
        "exact",
        f"attention.qkv (F16, Q8_0): dequantized to bf16, relative error {100 * qkv:.2f} %; --quant SCHEME rounds them "
        "anew",
        f"embed (F16): rounded to bf16, relative error {100 * embed:.2f} %",
    ]
    conversions = json.loads((out / "manifest.json").read_text())["weights_converted"]
    assert {name: one["types"] for name, one in conversions.items()} == {
        "embed.weight": "f16", "layers.0.attention.qkv.weight": "f16, q8_0"
    }  # fmt: skip
    assert conversions["embed.weight"]["error"] == pytest.approx(embed, rel=1e-3)
    assert main(["inspect", str(out), "--format", "json"]) == 0
    classes = {one["class"]: one for one in json.loads(capsys.readouterr().out)["weights_by_class"]}
    assert (classes["mlp.down"]["error"], classes["mlp.down"]["types"]) == (0, None)
    assert classes["attention.qkv"]["error"] == pytest.approx(qkv, rel=1e-3)
    assert 0 < classes["embed"]["max_error"] <= 2**-8
    assert main(["inspect", str(out)]) == 0
    text = capsys.readouterr().out
    assert f"{100 * embed:.2f} % of F16" in text
    assert "exact" in text
    # Weights that are taken over, and an artifact that grows, keep it.
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == found
    assert main(["compile", str(out), "--add", "decode:1x32", "--cache-dir", str(kernel_cache)]) == 0
    assert json.loads((out / "manifest.json").read_text())["weights_converted"] == conversions


def test_keys_follow_the_files_and_the_readers(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copy(model.gguf, tmp_path / "m.gguf"))
    resolved = resolve(CompileConfig(path, path, LADDER))

    def components() -> dict[str, Mapping[str, str]]:
        source = open_source(path)
        return {
            "weights": keys.weights_components(
                source.weight_files(), resolved.model, resolved.max_model_len, resolved.target, b"header"
            ),
            "artifact": keys.artifact_components(source.all_files(), resolved.target),
        }

    first = components()
    assert components() == first
    folders = (keys._MODELS / "sources" / "gguf", keys._MODELS / "tokenizers")
    readers = {file.name for folder in folders for file in folder.rglob("*.py")}
    assert {"header.py", "k_blocks.py", "byte_level.py"} <= readers
    digested: list[str] = []
    real = keys._digest

    def listening(files: Iterable[Path]) -> str:
        found = list(files)
        digested.extend(file.name for file in found)
        return real(found)

    monkeypatch.setattr(keys, "_digest", listening)
    keys.sources_digest.cache_clear()
    keys.compiler_digest.cache_clear()
    assert components() == first
    assert readers <= set(digested)
    path.write_bytes(path.read_bytes() + b" ")
    changed = components()
    for kind, parts in first.items():
        assert {name for name in parts if parts[name] != changed[kind][name]} == {"files"}


def test_a_file_without_a_tokenizer_needs_to_be_told(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = write_gguf(model.dequantized, tmp_path / "bare.gguf", "F32")
    fails(
        capsys, 1, ["compile", bare, "-o", tmp_path / "out"], f"tokenizer.json of {bare} is missing", "--no-tokenizer"
    )
    fails(capsys, 1, ["compile", tmp_path / "gone.gguf", "-o", tmp_path / "out"], "gone.gguf does not exist: give")
    fails(capsys, 1, ["run", tmp_path / "gone.gguf", "--prompt", "a"], "gone.gguf does not exist")
    assert not (tmp_path / "out").exists()
