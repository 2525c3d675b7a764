"""The completion script of zsh: a function a command, each one call of _arguments."""

from __future__ import annotations

from collections.abc import Iterable
from shlex import quote

from .words import CommandWords, Option, Value

_ACTIONS = {
    Value.NONE: " ",
    Value.FILE: "_files",
    Value.FOLDER: "_files -/",
    Value.ARTIFACT: "_files -/",
    Value.MODEL: "_files",
}


def script(commands: Iterable[CommandWords]) -> str:
    """The script: a file `_llmc` of a folder in $fpath, or sourced."""
    every = {command.path: command for command in commands}
    parts = ["#compdef llmc\n# zsh completion of llmc, printed by: llmc completion zsh\n"]
    parts += [_function(command, every) for command in every.values()]
    # Sourced, it registers itself; loaded from $fpath, it is the function.
    parts.append('if [[ ${funcstack[1]} == _llmc ]]; then _llmc "$@"; else compdef _llmc llmc; fi\n')
    return "\n".join(parts)


def _name(path: tuple[str, ...]) -> str:
    return "_".join(("_llmc", *path))


def _function(command: CommandWords, every: dict[tuple[str, ...], CommandWords]) -> str:
    specs = [spec for option in command.options for spec in _option(option)]
    if command.children:
        listed = " ".join(quote(f"{name}:{every[*command.path, name].help}") for name in command.children)
        cases = "".join(f"      {name}) {_name((*command.path, name))} ;;\n" for name in command.children)
        arguments = _call([*specs, "1: :->command", "*:: :->rest"])
        return (
            f"{_name(command.path)}() {{\n  local curcontext=$curcontext state line\n  {arguments}\n"
            f"  case $state in\n    command) local -a listed=({listed}); _describe command listed ;;\n"
            f"    rest) case $line[1] in\n{cases}    esac ;;\n  esac\n}}\n"
        )
    for position, (value, choices) in enumerate(command.arguments, 1):
        many = command.repeats and position == len(command.arguments)
        specs.append(f"{'*' if many else position}:value:{_action(value, choices)}")
    return f"{_name(command.path)}() {{\n  {_call(specs)}\n}}\n"


def _call(specs: list[str]) -> str:
    return " \\\n    ".join(["_arguments -C -S", *map(quote, specs)])


def _option(option: Option) -> list[str]:
    text = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    star = "*" if option.multiple else ""
    value = "" if option.value is None else f":value:{_action(option.value, option.choices)}"
    # A long name takes its value behind a space or an equals sign.
    return [f"{star}{name}{'=' if value and name.startswith('--') else ''}[{text}]{value}" for name in option.names]


def _action(value: Value, choices: Iterable[str]) -> str:
    if value is not Value.CHOICES:
        return _ACTIONS[value]
    # Colons separate the parts of a specification.
    listed = " ".join(choices).replace(":", "\\:")
    return f"({listed})"
