"""The memory of a process that packs a checkpoint of several shards, against the size of one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import packing_peak

HIDDEN, INNER, LAYERS, VOCABULARY, RANK = 2048, 4096, 2, 512, 512
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 1024, "torch_dtype": "bfloat16",
    "eos_token_id": 0, "bos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
MATRICES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
}


def write_zeros(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A safetensors file of bf16 zeros, which take no room on most disks; returns its size in bytes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path.stat().st_size


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model with a shard for each layer, and bytes of the largest shard."""
    model, largest = tmp_path_factory.mktemp("shards"), 0
    places: dict[str, str] = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}.{name}.weight": shape for name, shape in MATRICES.items()}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        if layer == 0:
            shapes |= {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
        places |= dict.fromkeys(shapes, f"model-{layer}.safetensors")
        largest = max(largest, write_zeros(model / f"model-{layer}.safetensors", shapes))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (model / "config.json").write_text(json.dumps(CONFIG))
    return model, largest


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for every matrix."""
    path = tmp_path_factory.mktemp("adapter")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        for name, (rows, columns) in MATRICES.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            shapes |= {f"{module}.lora_A.weight": (RANK, columns), f"{module}.lora_B.weight": (rows, RANK)}
    write_zeros(path / "adapter_model.safetensors", shapes)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def grown(*arguments: Path | str) -> int:
    command = [sys.executable, packing_peak.__file__, *map(str, arguments)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("scheme", ["none", "w4a16"])
def test_packing_takes_less_memory_than_the_largest_shard(
    scheme: str, shards: tuple[Path, int], tmp_path: Path
) -> None:
    model, largest = shards
    assert 0 < grown(model, tmp_path / "out", scheme) < largest


def test_an_adapter_is_never_whole_in_memory(shards: tuple[Path, int], adapter: Path, tmp_path: Path) -> None:
    model, _ = shards
    size = (adapter / "adapter_model.safetensors").stat().st_size
    assert 0 < grown(model, tmp_path / "out", "none", adapter) < size
