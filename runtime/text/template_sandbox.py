"""The environment of chat templates: that of transformers, with limits on time and on the size of texts.

A template comes with a model and is foreign code, run in Jinja's sandbox. The sandbox blocks files and Python, but
neither endless loops nor texts of gigabytes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache, wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from llmc.runtime.request_error import RequestError

# Far beyond any context, and little memory.
MAX_CHARS = 1 << 24
_MAX_POWER_BITS = 1 << 12
_WIDE = re.compile(r"%[^a-zA-Z%]*\d{6}")
_NESTED = re.compile(r"\{[^{}]*\{")
_TICK = "llmc_tick"
_running = threading.local()


class OutOfTime(RequestError):
    """A template that took longer than it may."""


@contextmanager
def limited(cpu_s: float) -> Iterator[None]:
    """Limits templates that this thread renders inside the block to cpu_s seconds of its CPU time; beyond it raises
    OutOfTime.

    With nested limits the earlier end holds.
    """
    outer = getattr(_running, "limit", None)
    ends = (time.thread_time() + cpu_s, cpu_s)
    _running.limit = ends if outer is None else min(outer, ends)
    try:
        yield
    finally:
        _running.limit = outer


def _tick() -> None:
    """Called in every loop iteration and every call of a template."""
    limit = getattr(_running, "limit", None)
    if limit is not None and time.thread_time() > limit[0]:
        raise OutOfTime(f"the chat template takes more than {limit[1]:g} s of CPU time for these messages")


def _check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise SecurityError(f"a text or list of {count} elements is too long: at most {MAX_CHARS}")


class _Compiler(CodeGenerator):
    """Makes `~` call the environment, as the sandbox's other operators do."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Checks the clock in every loop iteration and call, and sizes before texts are made."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.filters["join"] = _join(self.filters["join"])
        self.globals[_TICK] = _tick

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            ticking = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(ticking).set_lineno(loop.lineno))
        return tree

    @staticmethod
    def concat(parts: Any) -> str:  # Jinja's own is "".join
        """The whole text of a template's parts."""
        total, texts = 0, []
        for part in parts:
            total += len(part)
            _check_chars(total)
            texts.append(part)
        return "".join(texts)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Result of `~`."""
        return self.concat(map(str, parts))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the sandbox's, but for string methods it checks the size of the result."""
        _tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Like the sandbox's, for formats within bounds whose widths are not passed as arguments."""
        made = super().wrap_str_format(value)
        if made is not None:
            _check_format(value.__self__.replace("{", "%"))
            if _NESTED.search(value.__self__):
                raise SecurityError("a format within a format is too wide, maybe")
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """As in Python, within bounds."""
        _tick()
        sized = [one for one in (left, right) if isinstance(one, (str, list, tuple))]
        if operator == "+" and len(sized) == 2:
            _check_chars(len(left) + len(right))
        elif operator == "*" and sized:
            times = right if sized[0] is left else left
            _check_chars(len(sized[0]) * times if isinstance(times, int) else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_POWER_BITS:
                raise SecurityError("a power is too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check_chars(value)
    if name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        _check_chars(len(owner) + owner.count(args[0]) * max(0, len(args[1]) - len(args[0])))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_chars(sum(len(owner) + (len(item) if isinstance(item, str) else 0) for item in args[0]))


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise SecurityError("a format is too wide")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that first checks numbers, which are widths, and the time."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _tick()
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, int):
                _check_chars(value)
        texts = [arg for arg in args if isinstance(arg, str)]
        if function.__name__ == "do_format" and texts:
            _check_format(texts[0])
        if function.__name__ == "do_replace" and len(texts) > 2:
            _check_method(texts[0], "replace", tuple(texts[1:]), {})
        return function(*args, **kwargs)

    return bounded


def _join(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `join`, which may get one long text many times."""

    @wraps(function)
    def join(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        items = list(value)
        if attribute is None:
            _check_chars(sum(len(str(d)) + (len(item) if isinstance(item, str) else 0) for item in items))
        return function(eval_ctx, items, d, attribute)

    return join


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PublicNamespace(Namespace):
    """A namespace whose attribute names cannot reach Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:
        # self is positional-only, so that a template may store a value under that name.
        namespace, *rest = args
        fields = dict(*rest, **values)
        for name in fields:
            _check_name(name)
        Namespace.__init__(namespace, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} starts with an underscore")


class _Dict:
    """`dict` without the other attributes of Python's type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates are written for: that of transformers' apply_chat_template."""
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    made.filters["tojson"] = _bounded(_to_json)
    made.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PublicNamespace, dict=_Dict()
    )
    return made
