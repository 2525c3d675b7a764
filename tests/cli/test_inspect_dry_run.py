"""`llmc inspect --dry-run`: what a compilation would make of a model, from its config.json alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from llmc.cli import main as cli
from llmc.compiler.config import CompileConfig
from llmc.compiler.dry_run import DryRun, describable, dry_run
from llmc.manifest import read_manifest
from llmc.models import ModelError

from support.compiled import compile_tiny
from support.paths import SHARED
from support.real_configs import REFUSED, RESOLVED, size_in_name
from support.tiny_encoders import make_encoder
from support.tiny_models import make_tiny_model
from support.verified import Limit, refuses

CONFIGS = SHARED / "configs"
shared = pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"no configs at {CONFIGS}")
SENTENCES = frozenset(REFUSED.values())
MOST_OFF = 0.12
EXACT = {
    "aiconfigurator/meta-llama--Meta-Llama-3.1-70B_config.json": 70_553_706_496,
    "ome-testdata/qwen2.5_7b.json": 7_615_616_512,
}
# Files beside configurations, which are none.
_OTHERS = re.compile(r".*(quant_config|quantize_config|generation_config|\.index|config_sentence_transformers)\.json")


def config_files() -> list[Path]:
    return [file for file in sorted(CONFIGS.glob("**/*.json")) if not _OTHERS.fullmatch(file.name)]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], dict[str, Any]]:
    """What the command says of a model, as JSON."""

    def command(model: Path) -> dict[str, Any]:
        assert cli.main(["inspect", "--dry-run", str(model), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return command


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_step_that_is_planned_is_named(phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Models that give vectors have no decode steps."""
    if phase == "decode":
        make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    else:
        make_encoder(tmp_path / "m", "bert", num_hidden_layers=1)
    assert cli.main(["inspect", "--dry-run", str(tmp_path / "m")]) == 0
    assert f"commands of a {phase} step" in capsys.readouterr().out


def test_a_compilation_makes_what_it_says(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    buckets, cache = "prefill=[1]x[32],decode=[1]x[64]", tmp_path / "cache"
    compile_tiny(path, tmp_path / "out", cache, buckets=buckets, max_model_len=64).close()
    manifest = read_manifest(tmp_path / "out")

    def found() -> DryRun:
        return dry_run(CompileConfig(path, path, buckets=buckets, max_model_len=64, cache_dir=cache))

    first = found()
    assert first.weight_bytes == manifest["bytes"]["weights"]
    assert [bucket for of in first.buckets.values() for bucket in of] == manifest["buckets"]
    assert first.num_buckets == len(manifest["buckets"])
    # Without weights a folder tells the same.
    (path / "model.safetensors").unlink()
    assert found() == first


def test_ranks_have_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "intermediate_size": 128,
    }
    path = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1, **sizes) / "config.json"
    whole, parts = (
        dry_run(CompileConfig(path, path, cache_dir=tmp_path / "cache", tensor_parallel=ranks)) for ranks in (1, 2)
    )
    assert whole.rank_weight_bytes == whole.weight_bytes
    assert (parts.ranks, parts.parameters) == (2, whole.parameters)
    assert whole.weight_bytes / 2 < parts.rank_weight_bytes < parts.weight_bytes
    assert parts.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert parts.flops_per_token * 2 == whole.flops_per_token
    assert cli.main(["inspect", "--dry-run", str(path), "--tensor-parallel", "2"]) == 0
    assert "each of 2 ranks" in capsys.readouterr().out
    assert cli.main(["inspect", "--dry-run", str(path), "--tensor-parallel", "3"]) == 1
    assert "4 attention heads cannot be divided among 3 ranks" in capsys.readouterr().err
    assert cli.main(["inspect", str(path), "--tensor-parallel", "2"]) == 2
    assert "--tensor-parallel goes with --dry-run" in capsys.readouterr().err


def test_the_command(run: Callable[[Path], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1) / "config.json"
    found = run(path)
    assert found["model_type"] == "llama"
    assert found["num_buckets"] == sum(map(len, found["buckets"].values()))
    assert cli.main(["inspect", "--dry-run", str(path)]) == 0
    assert f"{found['parameters']:,}" in capsys.readouterr().out


def test_numbers_of_a_known_model(tmp_path: Path) -> None:
    hidden, inner, layers, vocab, heads, kv_heads, dim = 64, 160, 3, 500, 4, 2, 16
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "vocab_size": vocab, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip
    file = tmp_path / "any-name.json"
    file.write_text(json.dumps(config))
    found = dry_run(CompileConfig(model=file, output=file, cache_dir=tmp_path / "cache"))
    matrices = layers * (hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    assert found.parameters == matrices + 2 * vocab * hidden + (2 * layers + 1) * hidden
    assert found.flops_per_token == 2 * (matrices + vocab * hidden)
    assert found.attention_flops_per_token == layers * 4 * heads * dim * 128
    assert found.kv_bytes_per_token == layers * 2 * kv_heads * dim * 2
    assert (found.act_dtype, found.kv_dtype, found.max_model_len, found.model_len) == ("bf16", "bf16", 128, 128)
    assert found.compile_s > 0


def test_out_of_reach_is_said_by_name(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config, said in (
        (
            {"model_type": "deepseek_v9", "kv_lora_rank": 512, "n_routed_experts": 8, "index_topk": 4},
            "'deepseek_v9' (sparse attention) is not",
        ),
        ({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}, r"'mine' (code of its own (auto_map)) is not"),
        ({"model_type": "mine"}, "model_type 'mine' is not supported; supported are llama"),
        ({"hidden_size": 4}, "lacks the field 'model_type'"),
        ({"dim": 4, "n_layers": 1}, "ExecuTorch write it; give the config.json of the model in transformers' format"),
    ):
        file.write_text(json.dumps(config))
        with pytest.raises(ModelError, match=re.escape(said)):
            dry_run(CompileConfig(model=file, output=file))
    file.write_text(json.dumps({"model_type": "mine", "time_step_limit": [0.0, float("inf")]}))
    with pytest.raises(ModelError, match="'mine' is not supported"):
        describable(file).config()
    with pytest.raises(ModelError, match="a configuration without weights"):
        describable(file).checkpoint()


_GATED = "gates on the results of heads"
# What a refusal names, and what a config says of it beside its model_type, where transformers does not write that.
OUT_OF_REACH: dict[str, tuple[tuple[str, ...], dict[str, Any] | None]] = {
    "mimo_v2_flash": (
        ("values shorter than keys", "layers of different numbers of heads"),
        {"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4, "swa_num_key_value_heads": 8},
    ),
    "step3p7": ((_GATED, "layers of different numbers of heads"), {"num_experts": 288}),
}


@refuses(lambda model_type: [Limit(model_type, ", ".join(OUT_OF_REACH[model_type][0]))])
@pytest.mark.parametrize("model_type", OUT_OF_REACH)
def test_what_a_model_out_of_reach_is_built_of(model_type: str, tmp_path: Path) -> None:
    """By what transformers writes of it, or its authors do; what llmc has is no reason."""
    parts, fields = OUT_OF_REACH[model_type]
    if fields is None:
        text = CONFIG_MAPPING[model_type]().to_json_string(use_diff=False)
    else:
        text = json.dumps({"model_type": model_type, "num_hidden_layers": 8, **fields})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as refusal:
        describable(tmp_path / "config.json").config()
    said = re.search(rf"model_type '{model_type}' \(([^()]*)\) is not supported", str(refusal.value))
    assert said is not None
    assert said[1] == ", ".join(parts)


def test_it_takes_no_artifact_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--dry-run", str(tmp_path), "--bucket", "decode:1x32"]) == 2
    assert "--dry-run looks at a model" in capsys.readouterr().err


@shared
def test_every_config_resolves_or_is_refused_by_name() -> None:
    """The file of one that is in another format than transformers' lacks model_type."""
    resolved, refused = [], {}
    for file in config_files():
        name = str(file.relative_to(CONFIGS))
        try:
            config = describable(file).config()
            assert config.model_type == json.loads(file.read_text())["model_type"]
            resolved.append(name)
        except ModelError as error:
            said = re.sub(rf"^{re.escape(str(file))}(: text_config)?:? ", "", str(error))
            refused[name] = next((known for known in SENTENCES if said.startswith(known)), said)
    assert sorted(resolved) == sorted(RESOLVED)
    assert refused == REFUSED


@shared
@pytest.mark.parametrize("name", ["llama3_2_1b"])
def test_a_real_config_in_full_size(name: str, tmp_path: Path) -> None:
    (file,) = CONFIGS.glob(f"**/{name}.json")
    found = dry_run(CompileConfig(model=file, output=file, cache_dir=tmp_path))
    assert found.parameters == 1_235_814_400
    assert found.weight_bytes > 2 * found.parameters


@shared
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RESOLVED)
def test_every_config_in_full_size(name: str, tmp_path: Path) -> None:
    """Sizes are those that files are named after, within the roundings of names."""
    found = dry_run(CompileConfig(model=CONFIGS / name, output=tmp_path / "out", cache_dir=tmp_path))
    size = size_in_name(name)
    assert size is None or abs(found.parameters / size / 1e9 - 1) < MOST_OFF
    assert found.parameters == EXACT.get(name, found.parameters)
    # A weight has a byte or two; a token uses every one of a dense model, but for rows of the embedding.
    assert found.weight_bytes > found.parameters
    assert found.flops_per_token > 0
    assert found.attention_flops_per_token > 0
    assert found.kv_bytes_per_token > 0
    assert found.compile_s > 0
    assert found.num_buckets == sum(map(len, found.buckets.values())) > 0
    assert found.commands >= found.kernels > 0
