"""Forms of images, pictures and towers for tests: small, and without a compiled model."""

from __future__ import annotations

import io
import json
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from llmc.images.form import ImageForm
from llmc.images.read import read_image_form

SMOLVLM: Mapping[str, Any] = {
    "config.json": {
        "model_type": "smolvlm",
        "scale_factor": 2,
        "image_token_id": 7,
        "vision_config": {"patch_size": 8, "image_size": 64},
    },
    "preprocessor_config.json": {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}},
}
MISTRAL3: Mapping[str, Any] = {
    "config.json": {
        "model_type": "mistral3",
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_config": {"patch_size": 14, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
    },
    "preprocessor_config.json": {"size": {"longest_edge": 336}, "patch_size": {"height": 14, "width": 14}},
    "processor_config.json": {"patch_size": 14, "spatial_merge_size": 2},
}
QWEN3_5: Mapping[str, Any] = {
    "config.json": {
        "model_type": "qwen3_5",
        "image_token_id": 9,
        "vision_config": {
            "patch_size": 8, "hidden_size": 48, "num_heads": 3, "num_position_embeddings": 64, "spatial_merge_size": 2,
        },
    },
    "preprocessor_config.json": {
        "size": {"shortest_edge": 32 * 32, "longest_edge": 200 * 200}, "patch_size": 8, "merge_size": 2,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN2_VL: Mapping[str, Any] = {
    "config.json": {
        "model_type": "qwen2_vl",
        "image_token_id": 9,
        "vision_config": {"patch_size": 8, "embed_dim": 48, "hidden_size": 60, "num_heads": 3},
    },
    "preprocessor_config.json": {"min_pixels": 32 * 32, "max_pixels": 200 * 200, "patch_size": 8},
}
"""Files of checkpoints, by name."""
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK")


def write_checkpoint(path: Path, files: Mapping[str, Any]) -> Path:
    """The folder `path` with these JSON files."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


def form_of(path: Path, files: Mapping[str, Any]) -> ImageForm:
    """The form of a checkpoint with these files."""
    return read_image_form(write_checkpoint(path, files))


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Noise of that size, with some transparent pixels where the mode has them."""
    generator = np.random.default_rng(seed)
    noise = Image.fromarray(generator.integers(0, 256, (height, width, 4), np.uint8), "RGBA")
    if mode == "P":
        found = noise.convert("RGB").quantize(8)
        found.info["transparency"] = 3
        return found
    return noise if mode == "RGBA" else noise.convert("RGB").convert(mode) if mode != "LA" else noise.convert("LA")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def sizes(count: int, most: int = 1500, seed: int = 0) -> list[tuple[int, int]]:
    """Widths and heights, of all orders of magnitude."""
    chooser = random.Random(seed)

    def side() -> int:
        return min(most, int(2 ** chooser.uniform(0, 11)))

    return [(side(), side()) for _ in range(count)]


class SumEncoder:
    """In place of a tower's graphs: a row is made of its patches' sums, so that it tells which pixels it saw."""

    def __init__(self, form: ImageForm, width: int) -> None:
        self.form, self.width = form, width
        self.calls: list[int] = []

    def encode(
        self, patches: npt.NDArray[np.float32], places: npt.NDArray[np.int32], first: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        assert patches.shape == (len(places), self.form.states_width)
        self.calls.append(len(patches))
        sums = patches.sum(axis=1) + places
        rows = np.array([sums[at : at + self.form.patches_per_row].sum() for at in first], np.float32)
        return np.repeat(rows[:, None], self.width, axis=1)

    def close(self) -> None:
        """Nothing is held."""


class HeldEncoder(SumEncoder):
    """Encodes a tile once `go_on` is set. begun: it holds one. It must not be released before that has ended."""

    def __init__(self, form: ImageForm, width: int) -> None:
        super().__init__(form, width)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.released = False

    def encode(
        self, patches: npt.NDArray[np.float32], places: npt.NDArray[np.int32], first: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        self.begun.set()
        assert self.go_on.wait(60)
        assert not self.released
        return super().encode(patches, places, first)

    def close(self) -> None:
        self.released = True
