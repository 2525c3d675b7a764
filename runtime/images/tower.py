"""The tower: an artifact that turns images into rows of the text model, with all that belongs to it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import STATES_USES
from llmc.images.form import ImageForm, ImageFormError
from llmc.images.kinds.registry import kind_of
from llmc.images.tiling import Tiling
from llmc.manifest import OWN_SUM, ManifestError, read_manifest
from llmc.runtime.images.image_error import ImageError, NoImages
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.patches import patches_of
from llmc.runtime.images.picture import Picture, require_pillow
from llmc.runtime.images.pixels import tiles_of
from llmc.runtime.images.rows_cache import RowsCache
from llmc.runtime.request_error import RequestError

CACHE_BYTES = 256 << 20
"""Of encoded rows."""
_TABLE = "images"
_SHARED_OPTIONS = (
    *("eager", "num_threads", "weight_memory"),
    *("device_number", "opencl_library", "cuda_library", "program_cache", "dependent_launches"),
)
"""Options of the engine's device that hold for the tower's, too."""


class TowerClosed(RequestError):
    """The tower encodes nothing any more, since whoever opened it closes it."""

    def __init__(self) -> None:
        super().__init__("what sees images is closed: open the model again")


class Encoder(Protocol):
    """What runs the tower's graphs; the binding's `Encoder` is one."""

    def encode(
        self, patches: npt.NDArray[np.float32], places: npt.NDArray[np.int32], first: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        """float32 [len(first), row_width]."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SeenPicture:
    """A picture, how it is cut, and the text that takes the place of its placeholder. identity: of its rows."""

    picture: Picture
    tiling: Tiling
    text: str
    identity: bytes


@dataclass
class TowerStats:
    """Since the tower was opened. images: encoded ones. reused: whose rows were still there. seconds: of encoding,
    unpacking and resizing included."""

    images: int = 0
    reused: int = 0
    seconds: float = 0.0


class Tower:
    """Encodes images, one at a time. Any thread may call any method; only `rows` and `close` take long.

    name: of the artifact, which tells its rows from those of others.
    """

    def __init__(
        self, form: ImageForm, encoder: Encoder, name: str, limits: ImageLimits | None = None, cache: int = CACHE_BYTES
    ) -> None:
        self.form, self.kind = form, kind_of(form)
        self.limits = limits or ImageLimits()
        self.stats = TowerStats()
        self._encoder = encoder
        self._name = f"{name} {form.as_json()}".encode()
        self._cache = RowsCache(cache)
        self._turn = threading.Lock()
        self._stopping = threading.Event()

    def look(self, given: Any) -> SeenPicture:
        """The picture, read as far as its size. given: bytes, or an image of Pillow. Raises ImageError."""
        picture = Picture(given, self.limits)
        try:
            tiling = self.kind.tiling(*picture.size)
        except ImageFormError as error:
            raise ImageError(f"an image of {picture.size[0]}x{picture.size[1]} pixels: {error}") from error
        identity = hashlib.sha256(self._name + picture.identity).digest()
        return SeenPicture(picture, tiling, self.kind.text(tiling), identity)

    def rows(self, seen: SeenPicture) -> npt.NDArray[np.float32]:
        """float32 [rows of all tiles in order, row_width], which must not be changed. Raises ImageError, TowerClosed
        once `stop` was called, and LlmcError if the device fails."""
        self._check_open()
        found = self._cache.get(seen.identity)
        if found is None:
            with self._turn:
                found = self._cache.get(seen.identity)  # another request may have had the same image
                if found is None:
                    return self._encoded(seen)
        self.stats.reused += 1
        return found

    def _encoded(self, seen: SeenPicture) -> npt.NDArray[np.float32]:
        begun = time.monotonic()
        tiles = tiles_of(seen.picture.pixels(), seen.tiling, self.form)
        parts = []
        for pixels, tile in zip(tiles, seen.tiling.tiles, strict=True):
            patches = patches_of(pixels, tile, self.form)
            self._check_open()
            parts.append(self._encoder.encode(patches.values, patches.places, patches.first))
        rows = np.concatenate(parts)
        rows.setflags(write=False)
        self._cache.put(seen.identity, rows)
        self.stats.images += 1
        self.stats.seconds += time.monotonic() - begun
        return rows

    def _check_open(self) -> None:
        if self._stopping.is_set():
            raise TowerClosed

    def stop(self) -> None:
        """Makes `rows` raise TowerClosed, also where it runs: after the tile that is encoded now. Waits for nothing."""
        self._stopping.set()

    def close(self) -> None:
        """Stops, waits for the tile that is encoded now, and releases the encoder; idempotent."""
        self.stop()
        # The encoder's memory must outlive each call of it.
        with self._turn:
            self._encoder.close()


def open_tower(
    path: Path, text: Any, text_path: Path, options: Mapping[str, Any], limits: ImageLimits | None = None
) -> Tower:
    """The tower of the artifact `path` for the model of the artifact `text_path`. text: its ArtifactInfo. options: of
    the device, as for the engine.

    Raises RequestError if the two do not fit, or Pillow is missing, and the binding's errors.
    """
    from llmc.runtime.binding import Artifact
    from llmc.runtime.binding.encoder import Encoder as NativeEncoder

    require_pillow()
    try:
        manifest = read_manifest(path)
        if _TABLE not in manifest:
            raise NoImages(f"{path} encodes no images: give the artifact that `llmc compile --images` made beside it")
        form = ImageForm.from_json(manifest[_TABLE], f"{path / 'manifest.json'}: {_TABLE}")
    except (ManifestError, ImageFormError) as error:
        raise NoImages(str(error)) from error
    with Artifact(path) as artifact:
        info = artifact.info
        check_fit(path, info.vector_width, info.states_width, form, text, text_path)
        encoder = NativeEncoder(artifact, **options)
    return Tower(form, encoder, str(manifest.get(OWN_SUM)), limits)


def tower_options(engine_options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the device for a tower beside an engine with these options: the same device, with as many threads.
    They sleep when it has nothing to do, and none of them holds a CPU that the engine's need. Memory of the engine's
    graphs, and weights of it on the host, are its own."""
    given = {name: value for name, value in engine_options.items() if name in _SHARED_OPTIONS}
    return {**given, "pin_threads": False, "idle_spin_us": 0}


def check_fit(path: Path, row_width: int, patch_width: int, form: ImageForm, text: Any, text_path: Path) -> None:
    """Raises NoImages unless a tower's rows fit a text model."""
    use = STATES_USES[text.states_use]
    if not use.startswith("placed"):
        raise NoImages(f"{text_path} was compiled without images: compile its model with --images")
    if (use == "placed_on_axes") != kind_of(form).ON_AXES:
        raise NoImages(f"{path} and {text_path} are of models of different kinds: give the images of the same model")
    if row_width != text.states_width or form.placeholder_id >= text.vocab_size:
        raise NoImages(
            f"{path} gives rows of {row_width} numbers and {text_path} takes {text.states_width}: give the images of "
            "the same model"
        )
    if patch_width != form.states_width:
        raise NoImages(f"{path} takes patches of {patch_width} numbers, not {form.states_width}: compile it again")
