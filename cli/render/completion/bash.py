"""The completion script of bash: tables of words by command, and one function that reads them."""

from __future__ import annotations

from collections.abc import Iterable
from shlex import quote

from .words import CommandWords, Value

_FUNCTION = r"""
_llmc_add() {
  local path=$1
  if [[ $path == *[^[:alnum:]/~._+,:@=-]* ]]; then printf -v path %q "$path"; fi
  COMPREPLY+=("$path")
}

# Folders, with a slash behind them so that one can go on; an artifact is complete.
_llmc_folders() {
  local folder
  while IFS= read -r folder; do
    if [[ -e ${folder/#\~/$HOME}/graphs.bin ]]; then _llmc_add "$folder"; else _llmc_add "$folder/"; fi
  done < <(compgen -d -- "$1")
}

_llmc_files() {
  local file
  while IFS= read -r file; do
    if [[ ! -d ${file/#\~/$HOME} ]]; then _llmc_add "$file"; fi
  done < <(compgen -f -- "$1")
}

# A value's kind, as in the tables below, and the word so far.
_llmc_value() {
  case $1 in
    choices:*) COMPREPLY=($(compgen -W "${1#choices:}" -- "$2")) ;;
    file | model) _llmc_folders "$2"; _llmc_files "$2" ;;
    folder | artifact) _llmc_folders "$2" ;;
  esac
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace 2>/dev/null; fi
}

_llmc() {
  local path=llmc kind= given positions=0 i words=() last=-1
  COMPREPLY=()
  # bash takes words with colons apart.
  for ((i = 0; i <= COMP_CWORD; ++i)); do
    if ((i > 1)) && [[ ${COMP_WORDS[i]} == : || ${COMP_WORDS[i - 1]} == : ]]; then
      words[last]+=${COMP_WORDS[i]}
    else
      words[++last]=${COMP_WORDS[i]}
    fi
  done
  local word=${words[last]}
  for ((i = 1; i < last; ++i)); do
    given=${words[i]}
    if [[ $kind ]]; then
      # bash takes --option=value apart.
      if [[ $given != = ]]; then kind=; fi
    elif [[ $given == -* ]]; then
      kind=${_llmc_values["$path $given"]-}
    elif [[ " ${_llmc_children["$path"]-} " == *" $given "* ]]; then
      path+=" $given"
    else
      positions=$((positions + 1))
    fi
  done
  if [[ $kind ]]; then
    if [[ $word == = ]]; then word=; fi
    _llmc_value "$kind" "$word"
  elif [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "${_llmc_options["$path"]-}" -- "$word"))
  elif [[ ${_llmc_children["$path"]-} ]]; then
    COMPREPLY=($(compgen -W "${_llmc_children["$path"]}" -- "$word"))
  else
    _llmc_value "${_llmc_arguments["$path $positions"]-${_llmc_arguments["$path …"]-none}}" "$word"
  fi
  # It replaces only what is behind the last colon.
  if [[ $word == *:* && $COMP_WORDBREAKS == *:* ]]; then COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*:}"}"}"); fi
}

complete -F _llmc llmc
"""


def script(commands: Iterable[CommandWords]) -> str:
    """The script, for bash 4.4 and later."""
    children, options, values, arguments = [], [], [], []
    for command in commands:
        path = " ".join(("llmc", *command.path))
        if command.children:
            children.append((path, " ".join(command.children)))
        options.append((path, " ".join(name for option in command.options for name in option.names)))
        for option in command.options:
            if option.value is not None:
                values += [(f"{path} {name}", _spelled(option.value, option.choices)) for name in option.names]
        for position, (value, choices) in enumerate(command.arguments):
            arguments.append((f"{path} {position}", _spelled(value, choices)))
        if command.repeats:
            arguments.append((f"{path} …", _spelled(*command.arguments[-1])))
    tables = [
        _table("_llmc_children", children),
        _table("_llmc_options", options),
        _table("_llmc_values", values),
        _table("_llmc_arguments", arguments),
    ]
    return "# bash completion of llmc, printed by: llmc completion bash\n" + "\n".join(tables) + _FUNCTION


def _spelled(value: Value, choices: Iterable[str]) -> str:
    return f"choices:{' '.join(choices)}" if value is Value.CHOICES else value


def _table(name: str, rows: list[tuple[str, str]]) -> str:
    lines = "".join(f"  [{quote(f'{key}')}]={quote(value)}\n" for key, value in rows)
    return f"declare -gA {name}=(\n{lines})"
