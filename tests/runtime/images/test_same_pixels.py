"""The host's numbers for images are those of transformers' processors that use Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from llmc.images.kinds.registry import kind_of
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.patches import angles_of, patches_of
from llmc.runtime.images.picture import Picture
from llmc.runtime.images.pixels import tiles_of

from support.image_forms import MISTRAL3, MODES, SMOLVLM, encoded, form_of, picture, sizes

LIMITS = ImageLimits()


def _given(files: Any) -> dict[str, Any]:
    return dict(files["preprocessor_config.json"])


@pytest.mark.parametrize("processor", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize("splits", [True, False])
def test_tiles_are_those_of_the_processor(processor: Any, splits: bool, tmp_path: Path) -> None:
    told = {**_given(SMOLVLM), "do_image_splitting": splits}
    form = form_of(tmp_path, {**SMOLVLM, "preprocessor_config.json": told})
    kind, reference = kind_of(form), processor(**told)
    for number, (width, height) in enumerate(sizes(30)):
        image = picture(width, height, MODES[number % len(MODES)], number)
        expected = reference(image, return_row_col_info=True, return_tensors="np")
        tiling = kind.tiling(width, height)
        tiles = tiles_of(Picture(image, LIMITS).pixels(), tiling, form)
        assert (tiling.rows, tiling.columns) == (expected["rows"][0][0], expected["cols"][0][0])
        np.testing.assert_array_equal(np.stack(tiles), expected["pixel_values"][0])
        assert expected["pixel_attention_mask"].all()


def test_a_whole_picture_is_that_of_the_processor(tmp_path: Path) -> None:
    form = form_of(tmp_path, MISTRAL3)
    kind = kind_of(form)
    reference = PixtralImageProcessorPil(size={"longest_edge": 336}, patch_size={"height": 28, "width": 28})
    for number, (width, height) in enumerate(sizes(30)):
        if min(width, height) * 336 < max(width, height):
            continue
        image = picture(width, height, MODES[number % len(MODES)], number)
        expected = reference(image, return_tensors="np")
        tiling = kind.tiling(width, height)
        (tile,) = tiles_of(Picture(image, LIMITS).pixels(), tiling, form)
        np.testing.assert_array_equal(tile, expected["pixel_values"][0])


def test_steps_that_the_files_turn_off_change_nothing(tmp_path: Path) -> None:
    told = {**_given(SMOLVLM), "do_normalize": False, "do_rescale": False}
    form = form_of(tmp_path, {**SMOLVLM, "preprocessor_config.json": told})
    image = picture(90, 50)
    expected = Idefics3ImageProcessorPil(**told)(image, return_tensors="np")["pixel_values"][0]
    found = tiles_of(image, kind_of(form).tiling(90, 50), form)
    np.testing.assert_array_equal(np.stack(found), expected)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_upright(orientation: int, name: str, tmp_path: Path) -> None:
    """As transformers loads them."""
    from transformers.image_utils import load_image

    image = picture(40, 20)
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, name, exif=exif)
    (tmp_path / "photo.jpg").write_bytes(data)
    found = Picture(data, LIMITS)
    expected = load_image(str(tmp_path / "photo.jpg"))
    assert found.size == expected.size == found.pixels().size
    np.testing.assert_array_equal(np.asarray(found.pixels()), np.asarray(expected))


def test_patches_are_a_convolution_and_a_pixel_shuffle(tmp_path: Path) -> None:
    """Multiplied by a weight they are the patches of a convolution; places and groups are those of the connector."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector

    form = form_of(tmp_path, SMOLVLM)
    tile = kind_of(form).tiling(64, 64).tiles[0]
    pixels = np.random.default_rng(0).standard_normal((3, 64, 64), np.float32)
    patches = patches_of(pixels, tile, form)
    weight = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    convolved = (
        torch.nn.functional.conv2d(torch.from_numpy(pixels)[None], weight, stride=8)[0].flatten(1).T.contiguous()
    )
    made = torch.from_numpy(patches.values) @ weight.flatten(1).T
    torch.testing.assert_close(made, convolved[torch.from_numpy(patches.places).long()])
    shuffled = Idefics3Connector.pixel_shuffle(None, convolved[None], form.merge)[0]
    groups = made.reshape(len(patches.first), -1)
    torch.testing.assert_close(groups, shuffled)
    assert patches.first.tolist() == list(range(0, 64, 4))


def test_groups_of_patches_are_those_of_the_merger(tmp_path: Path) -> None:
    form = form_of(tmp_path, MISTRAL3)
    tile = kind_of(form).tiling(100, 60).tiles[0]
    rows, columns = tile.grid
    pixels = np.random.default_rng(0).standard_normal((3, rows * 14, columns * 14), np.float32)
    patches = patches_of(pixels, tile, form)
    flat = torch.from_numpy(pixels).reshape(3, rows, 14, columns, 14).permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    told = torch.nn.functional.unfold(
        flat.view(rows, columns, -1).permute(2, 0, 1)[None], kernel_size=2, stride=2
    ).view(flat.shape[1] * 4, -1)
    ours = torch.from_numpy(patches.values[:, : form.patch_width]).reshape(tile.num_rows, 4, -1)
    # The merger has the pixels of a patch first, then its number in the group.
    torch.testing.assert_close(ours.permute(0, 2, 1).reshape(tile.num_rows, -1), told.T)
    assert not patches.places.any()


def test_angles_are_those_of_the_rotary_embedding() -> None:
    config = PixtralVisionConfig(hidden_size=64, num_attention_heads=4, patch_size=14, image_size=336)
    rotary = PixtralVisionRotaryEmbedding(config)
    lines, columns = np.divmod(np.arange(30 * 41, dtype=np.int32), np.int32(41))
    positions = torch.from_numpy(np.stack([lines, columns], axis=1))
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions)
    found = angles_of(lines, columns, 16, config.rope_parameters["rope_theta"])
    np.testing.assert_allclose(found[:, :8], cos[:, :8].numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[:, 8:], sin[:, :8].numpy(), rtol=0, atol=1e-6)
