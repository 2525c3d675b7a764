"""Qwen's images: pixels, places, angles, texts and positions are those of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model, Qwen3_5VisionRotaryEmbedding
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from llmc.images.form import ImageFormError
from llmc.images.kinds.qwen import Qwen
from llmc.images.kinds.registry import kind_of
from llmc.images.tiling import Tile
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.patches import patches_of
from llmc.runtime.images.picture import Picture
from llmc.runtime.images.pixels import tiles_of
from llmc.runtime.images.placing import places_on_axes

from support.image_forms import MODES, QWEN2_VL, QWEN3_5, form_of, picture, sizes

LIMITS = ImageLimits()
SIDE, MERGE, PATCH = 8, 2, 8
RATIO = 200


def images(count: int) -> list[tuple[int, int]]:
    """Widths and heights that the model sees."""
    return [size for size in sizes(count) if max(size) <= RATIO * min(size)]


@pytest.mark.parametrize("files", [QWEN3_5, QWEN2_VL], ids=["qwen3_5", "qwen2_vl"])
def test_patches_are_those_of_the_processor(files: Any, tmp_path: Path) -> None:
    form = form_of(tmp_path, files)
    kind = kind_of(form)
    reference = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 32 * 32, "longest_edge": 200 * 200}, patch_size=PATCH, merge_size=MERGE
    )
    for number, (width, height) in enumerate(images(40)):
        image = picture(width, height, MODES[number % len(MODES)], number)
        try:
            tiling = kind.tiling(width, height)
        except ImageFormError:
            assert max(width, height) > 8 * min(width, height)
            continue
        expected = reference(image, return_tensors="np")
        (tile,) = tiling.tiles
        assert expected["image_grid_thw"].tolist() == [[1, *tile.grid]]
        (pixels,) = tiles_of(Picture(image, LIMITS).pixels(), tiling, form)
        found = patches_of(pixels, tile, form)
        assert found.values.shape == (tile.num_patches, form.states_width)
        np.testing.assert_array_equal(found.values[:, : form.patch_width], expected["pixel_values"])
        assert found.first.tolist() == list(range(0, tile.num_patches, MERGE * MERGE))


GRIDS = [(2, 2), (6, 4), (24, 24), (8, 8), (2, 30), (16, 14)]


@pytest.mark.parametrize("grid", GRIDS)
def test_places_and_angles_are_those_of_the_model(grid: tuple[int, int], tmp_path: Path) -> None:
    form = form_of(tmp_path, QWEN3_5)
    pixels = np.zeros((3, grid[0] * PATCH, grid[1] * PATCH), np.float32)
    size = (grid[1] * PATCH, grid[0] * PATCH)
    found = patches_of(pixels, Tile(size, grid, (grid[0] * grid[1] // MERGE**2,), (0, 0, *size)), form)
    extra = found.values[:, form.patch_width :]
    frames = torch.tensor([[1, *grid]])

    # The same point of the table, whichever four places it is said to lie between.
    corners, weights = get_vision_interpolation_indices_and_weights(
        frames, SIDE, align_corners=True, spatial_merge_size=MERGE
    )
    table = np.random.default_rng(0).standard_normal((SIDE * SIDE, 5)).astype(np.float32)
    expected = (table[corners.numpy()] * weights.numpy()[..., None]).sum(1)
    four = table[found.places[:, None] + np.array([0, 1, SIDE, SIDE + 1])]
    np.testing.assert_allclose((four * extra[:, :4, None]).sum(1), expected, atol=1e-5)
    assert (found.places >= 0).all()

    config = Qwen3_5VisionConfig(hidden_size=48, num_heads=3)
    cos, sin = Qwen3_5VisionRotaryEmbedding(config)(torch.zeros(1), get_vision_position_ids(frames, MERGE))
    halves = [half.chunk(2, dim=-1)[0].numpy() for half in (cos, sin)]
    np.testing.assert_allclose(extra[:, 4:], np.concatenate(halves, axis=1), atol=1e-5)


def test_the_first_one_has_angles_alone(tmp_path: Path) -> None:
    form = form_of(tmp_path, QWEN2_VL)
    assert (form.extra, form.places_side, form.frames) == (16, 0, 2)
    found = patches_of(np.zeros((3, 16, 32), np.float32), Tile((32, 16), (2, 4), (2,), (0, 0, 32, 16)), form)
    assert not found.places.any()


@pytest.mark.parametrize("grid", GRIDS)
def test_positions_are_those_of_the_model(grid: tuple[int, int], tmp_path: Path) -> None:
    """Of a text with two images, one of them at its beginning."""
    form = form_of(tmp_path, QWEN3_5)
    tile = Tile((grid[1] * PATCH, grid[0] * PATCH), grid, (grid[0] * grid[1] // MERGE**2,), None)
    positions, advance = places_on_axes(tile, form)
    rows, found = len(positions), []
    at = 0
    for text in (0, 5, 3):
        found += [(at + step,) * 3 for step in range(text)]
        at += text
        if len(found) < 2 * rows + 5:
            found += [tuple(at + axis for axis in row) for row in positions.tolist()]
            at += advance
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    model.get_vision_position_ids = lambda *given, **named: Qwen3_5Model.get_vision_position_ids(
        model,
        *given,
        **named,
    )
    kinds = torch.tensor([[1] * rows + [0] * 5 + [1] * rows + [0] * 3])
    expected, _ = Qwen3_5Model.get_rope_index(
        model,
        torch.zeros_like(kinds),
        kinds,
        image_grid_thw=torch.tensor([[1, *grid]] * 2),
    )
    assert found == [tuple(row) for row in expected[:, 0].T.tolist()]


def test_a_text_has_a_placeholder_for_each_row(tmp_path: Path) -> None:
    kind = kind_of(form_of(tmp_path, QWEN3_5))
    assert isinstance(kind, Qwen)
    tiling = kind.tiling(100, 60)
    assert kind.text(tiling) == "<|image_pad|>" * tiling.num_rows


def test_what_is_refused(tmp_path: Path) -> None:
    kind = kind_of(form_of(tmp_path / "m", QWEN3_5))
    with pytest.raises(ImageFormError, match="one side is more than 200 times as long as the other"):
        kind.tiling(4020, 20)
    cases: dict[str, dict[str, Any]] = {
        "another patch_size than the model's 8": {"patch_size": 16},
        "images of 4096 to 1024 pixels hold no patch": {"size": {"shortest_edge": 4096, "longest_edge": 1024}},
    }
    for number, (says, fields) in enumerate(cases.items()):
        told = {**QWEN3_5["preprocessor_config.json"], **fields}
        with pytest.raises(ImageFormError, match=says):
            form_of(tmp_path / str(number), {**QWEN3_5, "preprocessor_config.json": told})


def test_the_largest_picture_is_bounded(tmp_path: Path) -> None:
    """Published files allow images of 16 million pixels."""
    told = {**QWEN3_5["preprocessor_config.json"], "size": {"shortest_edge": 65536, "longest_edge": 1 << 24}}
    form = form_of(tmp_path, {**QWEN3_5, "preprocessor_config.json": told})
    assert form.most_patches == 1 << 14
    (tile,) = kind_of(form).tiling(5000, 4000).tiles
    assert (1 << 14) * 0.95 < tile.num_patches <= 1 << 14
