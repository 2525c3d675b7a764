"""The input and the result of a reader of quantized checkpoints."""

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
    """section: the quantization settings. linears: prefixes of the model's linear layers; None if unknown."""

    section: Section
    tensors: Tensors
    linears: tuple[str, ...] | None

    def left(self, *names: str) -> Parts:
        """The modules that settings lists of these names exclude from quantization."""
        return Parts(path for name in names for path in self.section.texts(name))


@dataclass(frozen=True)
class StoredCheckpoint:
    """The quantized matrices of a checkpoint.

    method: quant_method of the settings. matrices: quantized linear layers, by prefix. experts: stacks of matrices in
    one tensor, by its name without `_blocks`. unused: tensors that only scale keys, values or outputs. kv_scales: those
    of them usable for a quantized KV cache.
    """

    method: str
    matrices: Mapping[str, StoredMatrix]
    experts: Mapping[str, tuple[StoredMatrix, ...]] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    kv_scales: KvScales | None = None

    @cached_property
    def parts(self) -> frozenset[str]:
        """Names of the tensors that form the matrices."""
        of_experts: Iterable[StoredMatrix] = (matrix for stack in self.experts.values() for matrix in stack)
        return frozenset(name for matrix in (*self.matrices.values(), *of_experts) for name in matrix.tensors.values())

    def empty_biases(self, tensors: Mapping[str, StoredTensor], known: Container[str]) -> frozenset[str]:
        """Zero biases of quantized layers, which early tools stored although the model has none.

        known: names of the model's tensors. Raises QuantizeError on a bias that is not zero.
        """
        names = [name for prefix in self.matrices if (name := f"{prefix}.bias") in tensors and name not in known]
        for name in names:
            tensor = tensors[name]
            if tensor.dtype not in PLAIN or widened(tensor.dtype, tensor.load()).any():
                raise QuantizeError(
                    f"{name} is a bias that is not zero of a layer that has none in this architecture; correct "
                    f"model_type in config.json or {AGAIN}"
                )
        return frozenset(names)

    def shapes(self, tensors: Mapping[str, Any]) -> dict[str, Shape]:
        """Tensor shapes as in an unquantized checkpoint: `PREFIX.weight` stands for the tensors that form a matrix."""
        hidden = self.parts | self.unused
        shapes: dict[str, Shape] = {name: tensor.shape for name, tensor in tensors.items() if name not in hidden}
        shapes.update({f"{prefix}.weight": matrix.shape for prefix, matrix in self.matrices.items()})
        shapes.update({name: (len(stack), *stack[0].shape) for name, stack in self.experts.items()})
        return shapes
