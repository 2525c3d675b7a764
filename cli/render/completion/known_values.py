"""Values of options that are texts to the parser but have a fixed set, from the registries that check them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


def known_values(command: tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
    """What may be given to the option or argument with these names, of this command; empty if that is not fixed."""
    for name in names:
        values = _OF_COMMANDS.get((*command, name)) or _OF_ALL.get(name)
        if values is not None:
            try:
                return tuple(values())
            except ModuleNotFoundError:
                return ()  # a registry of the compiler, which is not installed
    return ()


# Registries are imported when a script is printed, not with the application.
def _targets() -> Iterable[str]:
    from llmc.compiler.targets.registry import NATIVE, all_targets

    return NATIVE, *(target.name for target in all_targets())


def _cpu_targets() -> Iterable[str]:
    from llmc.compiler.targets.registry import NATIVE
    from llmc.cpu_levels import TARGET_LEVELS

    return NATIVE, *TARGET_LEVELS


def _dtypes() -> Iterable[str]:
    from llmc.cli.options.compile import DTYPES

    return DTYPES


def _kv_dtypes() -> Iterable[str]:
    from llmc.kv_dtypes import KV_DTYPES

    return "auto", *KV_DTYPES


def _tasks() -> Iterable[str]:
    from llmc.task_names import TASKS

    return TASKS


def _poolings() -> Iterable[str]:
    from llmc.task_names import POOLINGS

    return POOLINGS


def _rank_prompts() -> Iterable[str]:
    from llmc.task_names import RANK_PROMPTS

    return RANK_PROMPTS


def _schemes() -> Iterable[str]:
    from llmc.quantize import SCHEMES

    return SCHEMES


def _compared_schemes() -> Iterable[str]:
    from llmc.cli.quantize import NONE

    return NONE, *_schemes()


def _written_schemes() -> Iterable[str]:
    from llmc.compiler.calibration.request import DEFAULT_METHODS

    return DEFAULT_METHODS


def _methods() -> Iterable[str]:
    from llmc.compiler.calibration.request import METHODS

    return METHODS


def _layouts() -> Iterable[str]:
    from llmc.quantize.export.registry import LAYOUTS

    return LAYOUTS


def _group_sizes() -> Iterable[str]:
    from llmc.quantize.formats.base import GROUP_SIZES

    return map(str, GROUP_SIZES)


def _tool_parsers() -> Iterable[str]:
    from llmc.runtime.server.tools.registry import TOOL_PARSERS

    return "auto", "none", *TOOL_PARSERS


def _reasoning_parsers() -> Iterable[str]:
    from llmc.runtime.server.reasoning import STYLES

    return "auto", "none", *STYLES


def _server_log_levels() -> Iterable[str]:
    from llmc.cli.options.serving import LOG_LEVELS

    return LOG_LEVELS


def _router_log_levels() -> Iterable[str]:
    from llmc.cli.route import LOG_LEVELS

    return LOG_LEVELS


_OF_ALL: Mapping[str, Callable[[], Iterable[str]]] = {
    "--dtype": _dtypes,
    "--group-size": _group_sizes,
    "--kv-dtype": _kv_dtypes,
    "--pooling": _poolings,
    "--quant": _schemes,
    "--rank-prompt": _rank_prompts,
    "--reasoning-parser": _reasoning_parsers,
    "--target": _targets,
    "--task": _tasks,
    "--tool-call-parser": _tool_parsers,
}
_OF_COMMANDS: Mapping[tuple[str, ...], Callable[[], Iterable[str]]] = {
    ("bundle", "apply", "--target"): _cpu_targets,
    ("quantize", "--format"): _layouts,
    ("quantize", "--method"): _methods,
    ("quantize", "--scheme"): _written_schemes,
    ("quantize", "--schemes"): _compared_schemes,
    ("route", "--log-level"): _router_log_levels,
    ("serve", "--log-level"): _server_log_levels,
    ("targets", "name"): _targets,
}
