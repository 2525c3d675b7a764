"""The encoder: a model that turns images into rows, which take the place of tokens of another model's prompts."""

from __future__ import annotations

from ctypes import byref, c_uint32, c_void_p

import numpy as np
import numpy.typing as npt

from llmc.runtime.binding import abi
from llmc.runtime.binding.artifact import Artifact
from llmc.runtime.binding.devices import Device, DeviceOption, device_for
from llmc.runtime.binding.handle import Handle, IntArray, call, int32, sized


class Encoder(Handle):
    """Encodes an image at a time. Any thread may call it; calls take turns."""

    _destroy = "llmc_encoder_destroy"

    def __init__(self, artifact: Artifact, *, device: Device | None = None, **options: DeviceOption | None) -> None:
        """device: None opens one of the artifact's kind, with the options among OPTION_NAMES.

        Raises LlmcError if the artifact encodes no images, or the device cannot run it.
        """
        super().__init__()
        self.patch_width = artifact.info.states_width
        """Floats of a patch."""
        self.row_width = artifact.info.vector_width
        """Floats of a row of the result."""
        pointer, most_patches, most_rows = c_void_p(), c_uint32(), c_uint32()
        with device_for(artifact, device, options) as opened:
            call("llmc_encoder_create", opened.pointer, artifact.pointer, byref(pointer))
        self._pointer = pointer
        call("llmc_encoder_get_limits", self.pointer, byref(most_patches), byref(most_rows))
        self.max_patches, self.max_rows = most_patches.value, most_rows.value

    def encode(self, patches: npt.NDArray[np.float32], places: IntArray, first: IntArray) -> npt.NDArray[np.float32]:
        """float32 [num_rows, row_width] of an image, which its patches alone determine.

        patches: float32 [num_patches, patch_width]. places: int32 [num_patches], the place of each patch in the image.
        first: int32 [num_rows], the first of the neighbouring patches that become this row.
        Raises LlmcError.
        """
        values = np.ascontiguousarray(patches, dtype=np.float32)
        at, rows = int32("places", places), int32("first", first)
        if values.ndim != 2 or values.shape[1] != self.patch_width:
            raise ValueError(f"patches have shape {values.shape}; pass [number of patches, {self.patch_width}]")
        if at.shape != (len(values),):
            raise ValueError(f"places has shape {at.shape}; pass one number for each of {len(values)} patches")
        native = sized(abi.Patches)
        native.num_patches, native.num_rows = len(values), rows.size
        native.patches = values.ctypes.data_as(abi.F32P)
        native.places, native.first = at.ctypes.data_as(abi.I32P), rows.ctypes.data_as(abi.I32P)
        made = np.empty((rows.size, self.row_width), np.float32)
        call("llmc_encoder_encode", self.pointer, byref(native), made.ctypes.data_as(abi.F32P))
        return made
