"""Tiny random models that see images, images as their towers read them, and what transformers makes of those."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmc.models.sources.registry import open_source, open_tower

from support.tiny_models import make_tiny_model, reference_model

_SIGLIP: dict[str, Any] = {"intermediate_size": 80, "num_attention_heads": 2, "patch_size": 8}
_EYES: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "scale_factor": 3,
        "vision_config": {**_SIGLIP, "hidden_size": 48, "num_hidden_layers": 3, "image_size": 48},
    },
    # Heads of 72, as those of the published model are.
    "idefics3": {"vision_config": {**_SIGLIP, "hidden_size": 144, "num_hidden_layers": 2, "image_size": 64}},
    "mistral3": {
        "vision_config": {
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 3,
            "image_size": 48, "patch_size": 4, "hidden_act": "silu",
        },
    },
}  # fmt: skip
SEEING = tuple(_EYES)
SIZES = {"smolvlm": [(48, 48)], "idefics3": [(64, 64)], "mistral3": [(48, 48), (24, 40), (8, 16)]}
"""Heights and widths of images, in pixels; the first is the largest."""
PLACEHOLDER = 7
"""The token of images."""


def make_seeing(path: Path, family: str, **options: Any) -> Path:
    """Saves such a model, with the files that say what becomes of images."""
    make_tiny_model(path, family, eyes=_EYES[family], **options)
    file, edge = path / "config.json", {"longest_edge": _EYES[family]["vision_config"]["image_size"]}
    fields = json.loads(file.read_text())
    name = "image_token_index" if "image_token_index" in fields else "image_token_id"
    file.write_text(json.dumps({**fields, name: PLACEHOLDER}))
    told = {"size": edge} if family == "mistral3" else {"size": edge, "max_image_size": edge}
    (path / "preprocessor_config.json").write_text(json.dumps(told))
    return path


def pixels_of(size: tuple[int, int], seed: int = 0) -> Tensor:
    """A normalized image of noise, float32 [3, height, width]."""
    return torch.randn((3, *size), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Patches:
    """What a tower reads of an image: float32 [T, numbers of a patch], int32 [T], int32 [rows]."""

    rows: NDArray[np.float32]
    places: NDArray[np.int32]
    first: NDArray[np.int32]


def patches_of(path: Path, pixels: Tensor) -> Patches:
    """The patches of an image in the order of merged rows, for the tower of the model at `path`."""
    config = open_tower(open_source(path)).config()
    assert config.tower is not None
    size, merged = config.tower.patch_size, config.tower.merged
    side, (height, width) = int(merged**0.5), (length // size for length in pixels.shape[1:])
    grid = pixels.view(3, height, size, width, size).permute(1, 3, 0, 2, 4).reshape(height, width, -1)
    at = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)

    def merged_order(values: Tensor) -> Tensor:
        groups = values.view(height // side, side, width // side, side, -1)
        return groups.transpose(1, 2).reshape(height * width, -1)

    rows, where = merged_order(grid), merged_order(at)
    if config.tower.rotation:
        rotary = reference_model(path).model.vision_tower.patch_positional_embedding
        angles = [half.chunk(2, dim=-1)[0] for half in rotary(rows, where)]
        rows = torch.cat((rows, *angles), dim=-1)
    places = where[:, 0] * width + where[:, 1] if config.tower.places else torch.zeros(len(rows))
    first = np.arange(0, len(rows), merged, dtype=np.int32)
    return Patches(rows.numpy(), places.numpy().astype(np.int32), first)


@torch.no_grad()
def rows_of_transformers(path: Path, pixels: Tensor, dtype: torch.dtype = torch.float32) -> NDArray[np.float32]:
    """float32 [rows, D] in place of the tokens of an image."""
    whole = reference_model(path, dtype).model
    if hasattr(whole, "vision_tower"):
        found = whole.get_image_features(pixels[None].to(dtype), image_sizes=torch.tensor([pixels.shape[1:]]))
    else:
        found = whole.get_image_features(pixels[None, None].to(dtype))
    rows: NDArray[np.float32] = found.pooler_output[0].float().numpy()
    return rows


@torch.no_grad()
def logits_with_rows(path: Path, tokens: list[int], rows: NDArray[np.float32], first: int) -> NDArray[np.float32]:
    """transformers' logits float32 [T, V] of a text in which rows take the place of tokens from `first` on."""
    whole = reference_model(path)
    embedded = whole.get_input_embeddings()(torch.tensor(tokens))
    embedded[first : first + len(rows)] = torch.from_numpy(rows)
    logits: NDArray[np.float32] = whole(inputs_embeds=embedded[None], use_cache=False).logits[0].numpy()
    return logits
