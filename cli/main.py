"""The `llmc` command: registers the commands and turns every error into one sentence and an exit code."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

import llmc
from llmc.cli.render.flag_words import in_flags
from llmc.cli.render.help_layout import HEADINGS, SUMMARIES, lay_out
from llmc.cli.render.terminal_text import escape_streams, escaped_streams, usable_streams
from llmc.distribution import name_clash

__all__ = [
    "COMMANDS",
    "EXIT_FAILURE",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_USAGE",
    "HEADINGS",
    "SUMMARIES",
    "build_app",
    "describe",
    "main",
]

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
COMMANDS = tuple(name for name in SUMMARIES if " " not in name)

_HELP = """Compile large language models ahead of time and run them.

\b
Examples:
  llmc compile models/qwen2.5-0.5b -o qwen.llmc
  llmc run qwen.llmc --prompt "Once upon a time"
  llmc inspect qwen.llmc
"""


def build_app(command: str | None = None) -> typer.Typer:
    """The typer application with all installed commands, or with `command` alone, which imports less."""
    app = typer.Typer(
        name="llmc",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,  # `llmc completion` prints scripts that need no Python
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in [command] if command in COMMANDS else COMMANDS:
        name = f"{__package__}.{name}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue
        module.register(app)
    lay_out(app)
    return app


def _root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error; works after a command too."),
) -> None:
    if version:
        from llmc import __version__

        typer.echo(f"llmc {__version__}")
        raise typer.Exit()


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0, 1 for a failure, 2 for wrong usage, 130 when interrupted."""
    with usable_streams(), escaped_streams():
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    options = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in options
    if debug:
        args.remove("--debug")
    if clash := name_clash():
        # The package installed last wrote the package's __init__.py.
        if not hasattr(llmc, "artifact_path"):
            return _fail(clash, EXIT_FAILURE)
        print(f"llmc: warning: {clash}", file=sys.stderr)
    try:
        if args == ["--version"]:
            # The root group would first ask for a command.
            from llmc import __version__

            print(f"llmc {__version__}", flush=True)
            return EXIT_OK
        if not args:
            from llmc.cache_root import cache_root
            from llmc.cli.render.next_step import next_step

            print(next_step(Path.cwd(), cache_root()), flush=True)
            return EXIT_OK
        command = next((arg for arg in args if not arg.startswith("-")), None)
        result: Any = build_app(command)(args=args, prog_name="llmc", standalone_mode=False)
        if result == EXIT_INTERRUPTED and isinstance(result, int):
            # Some versions of typer catch Ctrl-C themselves.
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout has left; flushing at exit would fail again and print a traceback.
        sys.stdout = None
        return EXIT_FAILURE
    except Exception as error:
        if type(error).__name__ == "Abort":
            return _fail("interrupted", EXIT_INTERRUPTED)
        # Some versions of typer include their own click, so its exceptions are recognized by their attributes.
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):
            if type(error).__name__ == "NoArgsIsHelpError":
                print(error.format_message(), file=sys.stderr)
                return EXIT_USAGE
            context = getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context is not None else ""
            return _fail(f"{error.format_message().rstrip('.')}{_given(error, args)}{hint}", error.exit_code)
        if debug:
            raise
        return _fail(describe(error), EXIT_FAILURE)
    return result if isinstance(result, int) else EXIT_OK


def describe(error: BaseException) -> str:
    """One line for an error: the sentence of our own and the system's errors, else prefixed by the error's type."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory: use a smaller model, fewer sequences or a smaller KV pool"
    # A bare ImportError comes from the runtime, about its native library; a missing module would be a bug.
    ours = type(error).__module__.startswith("llmc") or type(error) is ImportError
    if ours and text:
        return in_flags(text) if type(error).__name__ == "LlmcError" else text
    return f"internal error, {type(error).__name__}: {text or 'no message'} (run again with --debug for the traceback)"


def _given(error: Any, args: list[str]) -> str:
    """ ", not VALUE" for a flag whose value the parser refused without quoting it."""
    names = getattr(getattr(error, "param", None), "opts", ())
    given = [value for name, value in pairwise(args) if name in names]
    given += [value for name, equals, value in (arg.partition("=") for arg in args) if equals and name in names]
    # The parser's own errors begin with the value.
    if not given or any(error.message.startswith((f"{value} ", f"{value!r} ")) for value in given):
        return ""
    return f", not {given[0]!r}"


def _fail(message: str, code: int) -> int:
    print(f"llmc: error: {message}", file=sys.stderr)
    return code


def entry() -> int:
    """`main`, for a process that does nothing else."""
    escape_streams()  # applies to tracebacks, too
    return main()


if __name__ == "__main__":
    sys.exit(entry())
