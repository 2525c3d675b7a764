"""What a reader is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from llmc.quantize.checkpoints.base import AGAIN, Shape, StoredMatrix, StoredTensor
from llmc.quantize.checkpoints.floats import widened
from llmc.quantize.checkpoints.kv_cache import KvScales
from llmc.quantize.checkpoints.modules import PLAIN, Tensors
from llmc.quantize.checkpoints.patterns import Parts
from llmc.quantize.checkpoints.section import Section
from llmc.quantize.formats.base import QuantizeError


@dataclass(frozen=True)
class Settings:
    """section: the quantization settings. linears: prefixes of the model's linear layers, None if nobody knows."""

    section: Section
    tensors: Tensors
    linears: tuple[str, ...] | None

    def left(self, *names: str) -> Parts:
        """The modules that lists of these names leave as they are."""
        return Parts(path for name in names for path in self.section.texts(name))


@dataclass(frozen=True)
class StoredCheckpoint:
    """What is quantized in a checkpoint.

    method: the settings' quant_method. matrices: the quantized linear layers by their prefix. experts: stacks of
    matrices in one tensor, by its name without `_blocks`. unused: tensors that only scale keys, values or outputs.
    kv_scales: those of them that a quantized KV cache may have.
    """

    method: str
    matrices: Mapping[str, StoredMatrix]
    experts: Mapping[str, tuple[StoredMatrix, ...]] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    kv_scales: KvScales | None = None

    @cached_property
    def parts(self) -> frozenset[str]:
        """Names of the tensors that the matrices are made of."""
        of_experts: Iterable[StoredMatrix] = (matrix for stack in self.experts.values() for matrix in stack)
        return frozenset(name for matrix in (*self.matrices.values(), *of_experts) for name in matrix.tensors.values())

    def empty_biases(self, tensors: Mapping[str, StoredTensor], known: Container[str]) -> frozenset[str]:
        """Biases of quantized layers that the model does not have, which early tools stored all the same, as zeros.

        known: names of the tensors that the model has. Raises QuantizeError on one that is not zero.
        """
        names = [name for prefix in self.matrices if (name := f"{prefix}.bias") in tensors and name not in known]
        for name in names:
            tensor = tensors[name]
            if tensor.dtype not in PLAIN or widened(tensor.dtype, tensor.load()).any():
                raise QuantizeError(
                    f"{name} is a bias that is not zero of a layer that has none in this architecture; mend model_type "
                    f"in config.json or {AGAIN}"
                )
        return frozenset(names)

    def shapes(self, tensors: Mapping[str, Any]) -> dict[str, Shape]:
        """Shapes by name as of a checkpoint that is not quantized: `PREFIX.weight` for what a matrix is made of."""
        hidden = self.parts | self.unused
        shapes: dict[str, Shape] = {name: tensor.shape for name, tensor in tensors.items() if name not in hidden}
        shapes.update({f"{prefix}.weight": matrix.shape for prefix, matrix in self.matrices.items()})
        shapes.update({name: (len(stack), *stack[0].shape) for name, stack in self.experts.items()})
        return shapes
