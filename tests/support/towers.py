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
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from llmc.models.sources.registry import open_source, open_tower
from llmc.models.tower import Tower

from support.families import CASES
from support.tiny_models import make_tiny_model, reference_model

_SIGLIP: dict[str, Any] = {"intermediate_size": 80, "num_attention_heads": 2, "patch_size": 8}
_QWEN3: dict[str, Any] = {
    "depth": 3, "hidden_size": 48, "intermediate_size": 72, "num_heads": 3, "patch_size": 4, "out_hidden_size": 60,
}  # fmt: skip
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
    "qwen2_vl": {
        "vision_config": {
            "depth": 2, "embed_dim": 48, "hidden_size": 60, "num_heads": 3, "patch_size": 4, "mlp_ratio": 2,
        },
    },
    "qwen3_5": {"vision_config": {**_QWEN3, "num_position_embeddings": 25}},
    "qwen3_vl": {
        "vision_config": {
            **_QWEN3, "depth": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
        },
    },
}  # fmt: skip
SEEING = tuple(_EYES)
ON_AXES = ("qwen2_vl", "qwen3_5", "qwen3_vl")
"""Of those, the families whose rows have places on axes in a text."""
SIZES = {
    "smolvlm": [(48, 48)], "idefics3": [(64, 64)], "mistral3": [(48, 48), (24, 40), (8, 16)],
    "qwen2_vl": [(48, 48), (24, 40), (8, 16)], "qwen3_5": [(48, 48), (24, 40), (8, 8)],
    "qwen3_vl": [(48, 48), (8, 16)],
}  # fmt: skip
"""Heights and widths of images, in pixels; the first is the largest."""
PLACEHOLDER = 7
"""The token of images."""


def make_seeing(path: Path, family: str, **options: Any) -> Path:
    """Saves such a model, with the files that say what becomes of images."""
    make_tiny_model(path, family, eyes=_EYES[family], **(CASES[family][1] if family in ON_AXES else {}), **options)
    file = path / "config.json"
    fields = json.loads(file.read_text())
    name = "image_token_index" if "image_token_index" in fields else "image_token_id"
    file.write_text(json.dumps({**fields, name: PLACEHOLDER}))
    edge = {"longest_edge": _EYES[family]["vision_config"].get("image_size")}
    told: dict[str, Any] = {"size": edge} if family == "mistral3" else {"size": edge, "max_image_size": edge}
    if family in ON_AXES:
        told = {"size": {"shortest_edge": 8 * 8, "longest_edge": 48 * 48}, "patch_size": 4}
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
    first = np.arange(0, len(rows), merged, dtype=np.int32)
    if config.tower.frames > 1:
        frames = rows.view(len(rows), 3, 1, size * size).expand(-1, -1, config.tower.frames, -1)
        extra, at_first = _beside_patches(path, config.tower, (height, width), side)
        return Patches(torch.cat((frames.reshape(len(rows), -1), extra), dim=-1).numpy(), at_first, first)
    if config.tower.rotation:
        rotary = reference_model(path).model.vision_tower.patch_positional_embedding
        angles = [half.chunk(2, dim=-1)[0] for half in rotary(rows, where)]
        rows = torch.cat((rows, *angles), dim=-1)
    places = where[:, 0] * width + where[:, 1] if config.tower.places else torch.zeros(len(rows))
    return Patches(rows.numpy(), places.numpy().astype(np.int32), first)


@torch.no_grad()
def _beside_patches(path: Path, tower: Tower, grid: tuple[int, int], merge: int) -> tuple[Tensor, NDArray[np.int32]]:
    """What Qwen's towers read besides pixels: float32 [T, extra], int32 [T]."""
    visual, frames = reference_model(path).model.visual, torch.tensor([[1, *grid]])
    found = visual.rotary_pos_emb(torch.zeros(1), get_vision_position_ids(frames, merge))
    angles = torch.cat([half.chunk(2, dim=-1)[0] for half in found], dim=-1)
    if not tower.places_side:
        return angles, np.zeros(len(angles), np.int32)
    corners, weights = get_vision_interpolation_indices_and_weights(
        frames, tower.places_side, align_corners=True, spatial_merge_size=merge
    )
    # llmc's four places are neighbours everywhere: at the table's end, the weight goes to the last of them.
    side = tower.places_side
    first = torch.stack((corners[:, 0] // side, corners[:, 0] % side)).clamp(max=side - 2)
    moved = torch.zeros(len(angles), 4)
    for corner, weight in zip(corners.T, weights.T, strict=True):
        at = 2 * (corner // side - first[0]) + corner % side - first[1]
        moved[torch.arange(len(at)), at] += weight
    return torch.cat((moved, angles), dim=-1), (first[0] * side + first[1]).numpy().astype(np.int32)


def on_axes(family: str, size: tuple[int, int], times: int = 1) -> dict[str, Any]:
    """Fields of PlacedRows for `times` images of one size, one below the other; none for a family with one axis."""
    if family not in ON_AXES:
        return {}
    lines, columns = times * size[0] // 8, size[1] // 8
    places = [(0, line, column) for line in range(lines) for column in range(columns)]
    return {"positions": np.array(places, np.int32), "advance": max(lines, columns)}


@torch.no_grad()
def rows_of_transformers(path: Path, pixels: Tensor, dtype: torch.dtype = torch.float32) -> NDArray[np.float32]:
    """float32 [rows, D] in place of the tokens of an image."""
    whole = reference_model(path, dtype).model
    if hasattr(whole, "visual"):
        patches = patches_of(path, pixels)
        size = whole.visual.config.patch_size
        grid = torch.tensor([[1, *(length // size for length in pixels.shape[1:])]])
        width = 3 * whole.visual.config.temporal_patch_size * size * size
        given = torch.from_numpy(patches.rows[:, :width]).to(dtype)
        found = whole.get_image_features(given, grid)
    elif hasattr(whole, "vision_tower"):
        found = whole.get_image_features(pixels[None].to(dtype), image_sizes=torch.tensor([pixels.shape[1:]]))
    else:
        found = whole.get_image_features(pixels[None, None].to(dtype))
    stacked = [part[0] for part in getattr(found, "deepstack_features", None) or ()]
    rows: NDArray[np.float32] = torch.cat((found.pooler_output[0], *stacked), dim=-1).float().numpy()
    return rows


@torch.no_grad()
def logits_with_rows(
    path: Path,
    tokens: list[int],
    rows: NDArray[np.float32],
    first: int,
    positions: NDArray[np.int32] | None = None,
    advance: int = 0,
) -> NDArray[np.float32]:
    """transformers' logits float32 [T, V] of a text in which rows take the place of tokens from `first` on. positions,
    advance: as in PlacedRows."""
    whole = reference_model(path)
    embedded = whole.get_input_embeddings()(torch.tensor(tokens))
    own, *stacked = torch.from_numpy(rows).split(embedded.shape[1], dim=1)
    embedded[first : first + len(rows)] = own
    told: dict[str, Any] = {}
    if positions is not None:
        after = first + advance + np.arange(len(tokens) - first - len(rows))
        before, behind = (np.repeat(part[:, None], 3, axis=1) for part in (np.arange(first), after))
        axes = np.concatenate((before, first + positions, behind))
        told["position_ids"] = torch.from_numpy(axes.T[:, None].astype(np.int64))
    if stacked and len(rows):
        seen = torch.zeros((1, len(tokens)), dtype=torch.bool)
        seen[:, first : first + len(rows)] = True
        told |= {"visual_pos_masks": seen, "deepstack_visual_embeds": stacked}
    found = whole.model.language_model if stacked else whole.model
    states = found(inputs_embeds=embedded[None], use_cache=False, **told).last_hidden_state
    logits: NDArray[np.float32] = whole.lm_head(states)[0].numpy()
    return logits
