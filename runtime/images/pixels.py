"""Resizes and normalizes a picture: the same numbers as transformers' processors that use Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llmc.images.form import ImageForm
from llmc.images.tiling import Tiling
from llmc.runtime.images.picture import readable

if TYPE_CHECKING:
    from PIL.Image import Image

_VALUES = 256


def tiles_of(picture: Image, tiling: Tiling, form: ImageForm) -> list[npt.NDArray[np.float32]]:
    """Normalized pixels of each tile: float32 [channels, height, width]. Raises ImageError, as for want of memory."""
    from PIL.Image import Resampling

    resample = Resampling(form.resample)
    table = _normalized(form)
    tiles = []
    with readable():
        for size in tiling.resizes:
            picture = picture.resize(size, resample)
        for tile in tiling.tiles:
            cut = picture.resize(tile.size, resample) if tile.box is None else picture.crop(tile.box)
            pixels = np.asarray(cut)
            tiles.append(np.stack([table[channel][pixels[:, :, channel]] for channel in range(form.channels)]))
    return tiles


def _normalized(form: ImageForm) -> npt.NDArray[np.float32]:
    """What each value of a pixel becomes: float32 [channels, 256].

    Rounded as transformers does it: scaled in double precision, then in single precision.
    """
    scaled = (np.arange(_VALUES, dtype=np.float64) * form.rescale).astype(np.float32)
    mean, std = np.array(form.mean, np.float32), np.array(form.std, np.float32)
    return (scaled[None, :] - mean[:, None]) / std[:, None]
