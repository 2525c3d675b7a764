"""The pickle in a file of `torch.save`, read without pickle: its instructions are looked at, never run.

Only what a dictionary of tensors needs has a meaning: numbers, texts, tuples, dictionaries, and a few names that are
compared and never imported. Anything else is an error.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.models.brief import brief_name
from llmc.models.sources.tensor_file import MOST_ELEMENTS

_MAX_DIMENSIONS, _MAX_NAME = 8, 80
_NAMED = "state_dict"
"""The key under which some scripts store a model's tensors."""

_DICT = "collections OrderedDict"
_TENSOR, _PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
STORAGES = {
    "torch FloatStorage": ("F32", 4),
    "torch HalfStorage": ("F16", 2),
    "torch BFloat16Storage": ("BF16", 2),
    "torch DoubleStorage": ("F64", 8),
    "torch LongStorage": ("I64", 8),
    "torch IntStorage": ("I32", 4),
    "torch ShortStorage": ("I16", 2),
    "torch CharStorage": ("I8", 1),
    "torch ByteStorage": ("U8", 1),
    "torch BoolStorage": ("BOOL", 1),
}
"""safetensors' dtype and bytes of a number, by the storage's name in a pickle."""


class StateDictError(ValueError):
    """The pickle is damaged; the message is part of a sentence."""


class MoreThanTensors(ValueError):
    """The pickle has values that no dictionary of tensors has; the message is the instruction that makes them."""


class ForeignName(ValueError):
    """The pickle names what no dictionary of tensors needs; the message is that name, printable."""


@dataclass(frozen=True)
class Storage:
    """Numbers in a record of the file. key: the record's name. count: of numbers, each of item_bytes."""

    key: str
    dtype: str
    item_bytes: int
    count: int


@dataclass(frozen=True)
class TensorView:
    """A tensor in a storage, all of it inside. offset, strides: in numbers; a stride may be zero or of any order."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The number behind the last one."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class _Name:
    """One of the known names, as an operand."""

    text: str


def read_state_dict(pickle: bytes) -> Mapping[str, TensorView]:
    """The tensors by name. Raises StateDictError, MoreThanTensors and ForeignName."""
    try:
        found = _Reader().read(pickle)
    except (StateDictError, MoreThanTensors, ForeignName):
        raise
    except (IndexError, KeyError):
        raise StateDictError("an instruction lacks its operand") from None
    except ValueError as error:  # an unknown or a cut instruction
        raise StateDictError(" ".join(str(error).split())[:_MAX_NAME]) from None
    inner = found.get(_NAMED) if isinstance(found, dict) else None
    tensors = inner if isinstance(inner, dict) else found
    if not isinstance(tensors, dict) or not tensors:
        raise StateDictError("it has no dictionary of tensors")
    for name, value in tensors.items():
        if not isinstance(value, TensorView):
            raise StateDictError(f"{brief_name(name)} is not a tensor")
    return tensors


class _Reader:
    """A stack of values, and values by number for later use."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, pickle: bytes) -> Any:
        for instruction, operand, _ in pickletools.genops(pickle):
            if instruction.name == "STOP":
                return self._stack.pop()
            self._take(instruction.name, operand)
        raise StateDictError("it has no end")

    def _take(self, name: str, operand: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(operand)
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE":
                stack.append(tuple(self._behind(self._marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._behind(len(stack) - int(name[-1]))))
            case "SETITEM":
                self._set(self._behind(len(stack) - 2))
            case "SETITEMS":
                self._set(self._behind(self._marks.pop()))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[operand] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[operand])
            case "GLOBAL":
                stack.append(_known(operand))
            case "STACK_GLOBAL":
                module, own = self._behind(len(stack) - 2)
                stack.append(_known(f"{module} {own}" if type(module) is type(own) is str else "?"))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                operands = stack.pop()
                stack.append(_made(stack.pop(), operands))
            case "BUILD":
                stack.pop()  # versions of modules, beside the tensors
                self._table()
            case _:
                raise MoreThanTensors(name)

    def _behind(self, at: int) -> list[Any]:
        """Takes the values from position `at` of the stack."""
        if not 0 <= at <= len(self._stack):
            raise IndexError
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def _table(self) -> dict[str, Any]:
        found = self._stack[-1]
        if not isinstance(found, dict):
            raise StateDictError("values are set where no dictionary is")
        return found

    def _set(self, pairs: list[Any]) -> None:
        table = self._table()
        if len(pairs) % 2:
            raise StateDictError("a key has no value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is not str:
                raise StateDictError("a key is not a text")
            table[key] = value


def _known(text: str) -> _Name:
    if text not in (_DICT, _TENSOR, _PARAMETER) and text not in STORAGES:
        raise ForeignName(brief_name(text.replace(" ", ".")))
    return _Name(text)


def _storage(identity: Any) -> Storage:
    """identity: ("storage", type, key, device, count)."""
    if isinstance(identity, tuple) and len(identity) == 5:
        kind, of, key, _, count = identity
        if (
            kind == "storage"
            and isinstance(of, _Name)
            and of.text in STORAGES
            and type(key) is str
            and _is_count(count)
        ):
            return Storage(key, *STORAGES[of.text], count)
    raise StateDictError("a storage is malformed")


def _made(called: Any, operands: Any) -> Any:
    """What a call of one of the known names gives."""
    match called, operands:
        case _Name(text=name), () if name == _DICT:
            return {}
        case _Name(text=name), (TensorView() as tensor, _, _) if name == _PARAMETER:
            return tensor
        case _Name(text=name), (Storage() as storage, offset, shape, strides, _, _, *_) if name == _TENSOR:
            return _view(storage, offset, shape, strides)
    raise StateDictError("a call is malformed")


def _view(storage: Storage, offset: Any, shape: Any, strides: Any) -> TensorView:
    if (
        not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or not len(shape) == len(strides) <= _MAX_DIMENSIONS
        or not all(map(_is_count, (offset, *shape, *strides)))
    ):
        raise StateDictError("a tensor is malformed")
    if math.prod(size or 1 for size in shape) >= MOST_ELEMENTS:  # beside a 0, too
        raise StateDictError("a tensor is malformed")
    view = TensorView(storage, offset, shape, strides if 0 not in shape else (0,) * len(shape))
    # Fewer numbers than elements: a small file could claim a tensor of any size.
    if max(view.end, math.prod(shape)) > storage.count:
        raise StateDictError(f"a tensor of shape {list(shape)} is not inside its {storage.count} numbers")
    return view


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
