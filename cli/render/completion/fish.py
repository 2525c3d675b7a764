"""The completion script of fish: a line for each word, valid after the commands before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .words import CommandWords, Option, Value

_HEAD = r"""# fish completion of llmc, printed by: llmc completion fish

# The words before the cursor that are no options.
function __llmc_words
    for word in (commandline -opc)[2..-1]
        string match -q -- '-*' $word; or echo $word
    end
end

# Whether these commands were typed and nothing else, and whether they were typed first.
function __llmc_at
    set -l words (__llmc_words)
    test "$words" = "$argv"
end

function __llmc_after
    set -l words (__llmc_words)
    set -l wanted (count $argv)
    test (count $words) -ge $wanted; and test "$words[1..$wanted]" = "$argv"
end

complete -c llmc -f
"""


def script(commands: Iterable[CommandWords]) -> str:
    """The script: a file llmc.fish in ~/.config/fish/completions."""
    every = {command.path: command for command in commands}
    return _HEAD + "\n".join(line for command in every.values() for line in _lines(command, every)) + "\n"


def _lines(command: CommandWords, every: dict[tuple[str, ...], CommandWords]) -> Iterator[str]:
    # A group's children are offered until one of them is there.
    where = _quote(" ".join(("__llmc_at" if command.children else "__llmc_after", *command.path)))
    for name in command.children:
        yield f"complete -c llmc -n {where} -a {name} -d {_quote(every[*command.path, name].help)}"
    for option in command.options:
        yield f"complete -c llmc -n {where} {_option(option)}"
    for value, choices in command.arguments[:1]:
        if offered := _offered(value, choices):
            yield f"complete -c llmc -n {where} {offered}"


def _option(option: Option) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    value = "" if option.value is None else f" -r {_offered(option.value, option.choices)}".rstrip()
    return f"{names}{value} -d {_quote(option.help)}"


def _offered(value: Value, choices: Iterable[str]) -> str:
    match value:
        case Value.CHOICES:
            return f"-f -a {_quote(' '.join(choices))}"
        case Value.FILE | Value.MODEL:
            return "-F"
        case Value.FOLDER | Value.ARTIFACT:
            return "-f -a '(__fish_complete_directories)'"
        case Value.NONE:
            return ""


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
