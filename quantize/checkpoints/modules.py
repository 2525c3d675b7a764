"""A checkpoint's tensors by module. Checks that settings and tensors agree on which modules are quantized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from llmc.quantize.checkpoints.base import AGAIN, CARRIERS, Shape, StoredTensor
from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

PLAIN = ("F32", "F16", "BF16")
"""Safetensors dtypes of unquantized weights and of scales."""
HEAD = "lm_head"
"""Last part of the output projection's name; most methods leave that layer unquantized by default."""
EMBEDDING = "embed_tokens"
"""Last part of the embedding's name."""
_MOST_NUMBERS = 1 << 40
_MOST_CHARACTERS = 255  # longest module name
_KV_CACHE = frozenset({"k_scale", "v_scale", "k_zero_point", "v_zero_point", "q_scale", "output_scale",
                       "output_zero_point", "kv_scale"})  # fmt: skip


def last(prefix: str) -> str:
    return prefix.rpartition(".")[2]


class Tensors:
    """Looks up and checks the tensors of a checkpoint. Raises QuantizeError."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        for name in tensors:
            if not name.isprintable() or len(name) > _MOST_CHARACTERS:
                raise QuantizeError(f"the checkpoint has a tensor named {shown(name)}; {AGAIN}")
        self.all = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.all

    def prefixes(self, leaf: str, dtypes: tuple[str, ...] | None = None) -> list[str]:
        """Modules that have a tensor `PREFIX.leaf` with one of `dtypes`."""
        end = f".{leaf}"
        names = (name for name in self.all if name.endswith(end) and len(name) > len(end))
        return sorted(name.removesuffix(end) for name in names if not dtypes or self.all[name].dtype in dtypes)

    def get(
        self, prefix: str, leaf: str, dtypes: tuple[str, ...], shape: Shape | None = None, of: str = "weight"
    ) -> StoredTensor:
        """The tensor `PREFIX.leaf`, checked for dtype and, if given, shape. of: the leaf that requires it, for error
        texts."""
        name = f"{prefix}.{leaf}"
        tensor = self.all.get(name)
        if tensor is None:
            raise QuantizeError(f"{name} is missing beside {prefix}.{of}; {AGAIN}")
        if tensor.dtype not in dtypes or tensor.dtype not in CARRIERS:
            raise QuantizeError(f"{name} has dtype {shown(tensor.dtype)}, not {' or '.join(dtypes)}; {AGAIN}")
        if shape is not None and tensor.shape != shape:
            raise QuantizeError(f"{name} has shape {shown(list(tensor.shape))}, not {list(shape)}; {AGAIN}")
        return tensor

    def matrix(self, prefix: str, leaf: str, dtypes: tuple[str, ...]) -> StoredTensor:
        """As `get`, for a tensor of two non-empty dimensions."""
        tensor = self.get(prefix, leaf, dtypes)
        if len(tensor.shape) != 2 or 0 in tensor.shape or tensor.shape[0] * tensor.shape[1] > _MOST_NUMBERS:
            raise QuantizeError(f"{prefix}.{leaf} has shape {shown(list(tensor.shape))}, not that of a matrix; {AGAIN}")
        return tensor

    def scalar(self, prefix: str, leaf: str, dtypes: tuple[str, ...], of: str = "weight") -> StoredTensor:
        """As `get`, for a tensor with one element."""
        tensor = self.get(prefix, leaf, dtypes, of=of)
        if tensor.shape not in ((), (1,), (1, 1)):
            raise QuantizeError(
                f"{prefix}.{leaf} has shape {shown(list(tensor.shape))}, not that of one number; {AGAIN}"
            )
        return tensor

    def of_kv_cache(self) -> frozenset[str]:
        """Names of tensors that scale keys, values or attention outputs; llmc leaves those unrounded."""
        return frozenset(name for name in self.all if last(name) in _KV_CACHE)


def check_agreement(
    tensors: Tensors,
    found: Collection[str],
    leaf: str,
    wanted: Callable[[str], bool | None],
    linears: Iterable[str] | None,
    origin: str,
) -> None:
    """Raises QuantizeError unless settings and tensors agree on which modules are quantized.

    found: prefixes of modules stored quantized, recognized by their tensor `leaf`. wanted: whether the settings
    quantize a module; None if they do not say. linears: the model's linear layers. If None, every matrix that shares
    the last part of its name with a quantized one is checked.
    """
    if not found:
        raise QuantizeError(
            f"{origin} says that weights are quantized, but the checkpoint has no tensor PREFIX.{leaf}; take the "
            f"settings out of config.json if its weights are plain ones"
        )
    for prefix in found:
        if wanted(prefix) is False:
            raise QuantizeError(
                f"{origin} leaves {shown(prefix)} as it is, but the checkpoint has {prefix}.{leaf}; correct "
                "config.json or download the checkpoint again"
            )
    if linears is None:
        alike = {last(prefix) for prefix in found}
        linears = [prefix for prefix in tensors.prefixes("weight", PLAIN) if last(prefix) in alike]
    for prefix in linears:
        plain = tensors.all.get(f"{prefix}.weight")
        if prefix not in found and plain is not None and len(plain.shape) == 2 and wanted(prefix):
            raise QuantizeError(
                f"{origin} says that {shown(prefix)} is quantized, but the checkpoint has {prefix}.weight of dtype "
                f"{shown(plain.dtype)} and no {prefix}.{leaf}; correct config.json or download the checkpoint again"
            )


def check_no_plain(tensors: Tensors, found: Iterable[str], leaf: str) -> None:
    """Raises QuantizeError if a module has both a plain and a quantized weight."""
    for prefix in found:
        if f"{prefix}.weight" in tensors:
            raise QuantizeError(
                f"the checkpoint has both {prefix}.weight and {prefix}.{leaf}; delete the one that is not meant"
            )
