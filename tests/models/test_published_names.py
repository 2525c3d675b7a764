"""Published indices of tensors: a family's weight map reads each tensor that they list, by name and to the byte."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.dry_run import describable
from llmc.models.registry import get_family
from llmc.models.weight_map import Source

from support.paths import SHARED


@dataclass(frozen=True)
class Published:
    """A folder with a config.json beside an index of tensors.

    nbytes: of an element. unused: bytes of listed tensors that the model does not read, by name with {} for a layer.
    config: values that replace those of the file. other_head: bytes of tensors that the file has in place of the output
    projection, by name.
    """

    nbytes: int = 2
    unused: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    other_head: Mapping[str, int] = field(default_factory=dict)


PUBLISHED = {
    "configs/falcon-180b-chat": Published(unused={"lm_head.weight": 2 * 65024 * 14848}),
    "configs/llama2-7b-hf": Published(unused={"model.layers.{}.self_attn.rotary_emb.inv_freq": 4 * 64}),
    "tokenizers/mistral-7b-instruct-v0.3": Published(),
    "tokenizers/phi3-mini": Published(),
    # A reward model: all but the output projection is a GPT-NeoX.
    "tokenizers/pythia-gptneox": Published(
        4,
        config={"model_type": "gpt_neox", "pooling": None},
        other_head={"out_proj.weight": 4 * 2048, "out_proj.bias": 4},
    ),
    "tokenizers/yi1.5-6b": Published(),
}

needs_shared = pytest.mark.skipif(not (SHARED / "configs").is_dir(), reason="needs the shared configurations")


def indices(folder: str) -> list[Path]:
    return sorted((SHARED / folder).glob("*.index.json"))


def nbytes_of(sources: Mapping[str, Source], each: int) -> int:
    return each * sum(math.prod(source.stored_shape) for source in sources.values())


@needs_shared
def test_every_published_index_is_compared() -> None:
    found = {file.parent.relative_to(SHARED).as_posix() for file in SHARED.glob("*/*/*.index.json")}
    assert found == PUBLISHED.keys()


@needs_shared
@pytest.mark.parametrize("folder", PUBLISHED)
def test_names_and_bytes_are_those_of_the_index(folder: str, tmp_path: Path) -> None:
    published = PUBLISHED[folder]
    file = tmp_path / "config.json"
    values = json.loads((SHARED / folder / "config.json").read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, **published.config}), encoding="utf-8")
    config = describable(file).config()
    assert indices(folder)
    for path in indices(folder):
        index = json.loads(path.read_text(encoding="utf-8"))
        listed = index["weight_map"].keys() - published.other_head.keys()
        weights = get_family(config.model_type).weight_map(config)
        sources = {source.name: source for source in weights.sources()}
        if published.other_head:
            del sources[f"{weights.head}.weight"]
        assert sources.keys() <= listed
        unused = {
            name.format(layer): size for name, size in published.unused.items() for layer in range(config.num_layers)
        }
        assert listed - sources.keys() == unused.keys()
        assert unused.keys() <= weights.unused
        others = sum(unused.values()) + sum(published.other_head.values())
        assert nbytes_of(sources, published.nbytes) + others == index["metadata"]["total_size"]
