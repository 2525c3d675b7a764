"""Input and output of a chat: a terminal with live Markdown, or plain text."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmc.cli.render.terminal_text import exact, printable
from llmc.regular_file import read_text
from llmc.replaced_file import replaced
from llmc.runtime.chat.session import ChatError, Piece
from llmc.shown import shown

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_QUOTES = '"""'
_CONTINUES_BLOCK = re.compile(r"[ \t]|[-*+] |\d{1,9}[.)] |\||>")
_HISTORY_HEAD = "# history of llmc chat"
_MOST_HISTORY, _MOST_HISTORY_BYTES = 1000, 1 << 26
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


ONLY_REASONING = "the answer ended within its reasoning; --max-tokens and /max-tokens set how long it may be"


class Screen(Protocol):
    """interactive: errors are shown and the chat continues; otherwise they end it."""

    interactive: bool

    def lines(self) -> Iterator[str]:
        """Input lines, each a message or command, until the input ends."""

    def show(self, pieces: Iterable[Piece], shown: list[str]) -> None:
        """Shows an answer as it arrives; appends its text, without reasoning, to `shown`."""

    def note(self, text: str) -> None:
        """Shows a message of the program, not of the model."""


class PlainScreen:
    """Lines from stdin, answers to stdout as they arrive, notes to stderr. Reasoning goes to stdout if no answer
    follows."""

    interactive = False

    def __init__(self) -> None:
        self._safe = sys.stdout.isatty()

    def lines(self) -> Iterator[str]:
        if sys.stdin is None:
            return
        try:
            yield from _join_quoted(_utf8(line.rstrip("\r\n")) for line in sys.stdin)
        except UnicodeDecodeError as error:
            raise ChatError(f"stdin is not UTF-8 at byte {error.start}: convert it first") from error

    def show(self, pieces: Iterable[Piece], shown: list[str]) -> None:
        reasoning = []
        for piece in pieces:
            if piece.reasoning:
                reasoning.append(piece.text)
                continue
            shown.append(piece.text)
            # A program that reads the answer gets it unchanged.
            exact(sys.stdout).write(printable(piece.text) if self._safe else piece.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if reasoning and not shown:
            self.note(f"{''.join(reasoning)}\n{ONLY_REASONING}")

    def note(self, text: str) -> None:
        print(printable(text), file=sys.stderr)


class TerminalScreen:
    """A terminal: lines are edited with readline; answers are Markdown that grows in place.

    history: file that keeps the lines between chats; None: this chat only.
    """

    interactive = True

    def __init__(self, *, markdown: bool, history: Path | None, completions: Sequence[str]) -> None:
        from llmc.cli.render.console import Console

        self._console: Console = Console(highlight=False)
        self._markdown = markdown
        self._history = history
        self._completions = completions

    def lines(self) -> Iterator[str]:
        self._start_editing()
        try:
            yield from _join_quoted(self._typed())
        finally:
            self._keep_history()

    def show(self, pieces: Iterable[Piece], shown: list[str]) -> None:
        answer, thought = _AnswerView(self._console, markdown=self._markdown), False
        try:
            for piece in pieces:
                if piece.reasoning:
                    thought = True
                else:
                    shown.append(piece.text)
                answer.add(Piece(printable(piece.text), piece.reasoning))
        finally:
            answer.finish()
        if thought and not shown:
            self.note(ONLY_REASONING)

    def note(self, text: str) -> None:
        self._console.print(printable(text), style="dim", markup=False, soft_wrap=True)

    def _typed(self) -> Iterator[str]:
        while True:
            try:
                yield _utf8(input("> "))
            except ChatError as error:
                self.note(str(error))
            except KeyboardInterrupt:
                with suppress(KeyboardInterrupt):  # a key that repeats
                    print()
                    self.note("Ctrl-D or /quit leaves")
            except EOFError:
                print()
                return

    def _start_editing(self) -> None:
        try:
            import readline
        except ImportError:  # without readline, lines can still be read
            return
        readline.set_auto_history(True)
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        if self._history is not None and os.path.lexists(self._history):
            for line in _read_history(self._history):
                readline.add_history(line)

    def _complete(self, text: str, state: int) -> str | None:
        fitting = [name for name in self._completions if text.startswith("/") and name.startswith(text)]
        return fitting[state] if state < len(fitting) else None

    def _keep_history(self) -> None:
        if self._history is None:
            return
        try:
            import readline
        except ImportError:
            return
        count = readline.get_current_history_length()
        typed = (readline.get_history_item(i) for i in range(max(1, count - _MOST_HISTORY + 1), count + 1))
        text = "\n".join((_HISTORY_HEAD, *filter(None, typed))) + "\n"
        try:
            with replaced(self._history) as new:
                # Never readable by others.
                descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text.encode(errors="replace"))
        except OSError as error:
            self.note(f"the history {self._history} is not kept: {error.strerror}")


def _read_history(path: Path) -> list[str]:
    """The lines of an earlier chat. Raises ChatError, also for a file that no chat has written: it would be lost."""
    try:
        lines = read_text(path, _MOST_HISTORY_BYTES).splitlines()
    except OSError as error:
        raise ChatError(f"cannot read the history {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        lines = ["no history"]
    if lines and lines[0] != _HISTORY_HEAD:
        raise ChatError(f"{path} exists and is no history of llmc chat: name a new file as --history")
    return lines[1:]


def _utf8(line: str) -> str:
    """The line, if it is text. Raises ChatError."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ChatError(f"the input is not UTF-8 behind {shown(line[: error.start])}: convert it first") from error
    return line


def _join_quoted(lines: Iterator[str]) -> Iterator[str]:
    """Lines as messages: text between two lines of three quotes is one message. An unterminated one is dropped."""
    for line in lines:
        if line.strip() != _QUOTES:
            yield line
            continue
        message: list[str] = []
        for inner in lines:
            if inner.strip() == _QUOTES:
                yield "\n".join(message)
                break
            message.append(inner)


class _AnswerView:
    """An answer growing on a terminal. Complete blocks are printed for good; the last one is redrawn."""

    def __init__(self, console: Console, *, markdown: bool) -> None:
        from rich.live import Live

        self._console = console
        self._markdown = markdown
        self._pending = ""
        self._reasoning = False
        self._live: Live | None = None

    def add(self, piece: Piece) -> None:
        if piece.reasoning:
            self._console.print(piece.text, style="dim italic", end="", markup=False, soft_wrap=True)
            self._reasoning = True
            return
        self._end_reasoning()
        if not self._markdown:
            self._console.print(piece.text, end="", markup=False, soft_wrap=True)
            return
        self._pending += piece.text
        split = complete_blocks(self._pending)
        if split:
            self._stop_live()
            self._print_blocks(self._pending[:split])
            self._pending = self._pending[split:]
        self._draw()

    def finish(self) -> None:
        """Prints the rest; also after an interruption."""
        self._end_reasoning()
        self._stop_live()
        if self._markdown:
            self._print_blocks(self._pending)
            self._pending = ""
        else:
            self._console.print()

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._console.print("\n")
            self._reasoning = False

    def _draw(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=12)
            self._live.start()
        self._live.update(_Tail(self._pending))

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_blocks(self, text: str) -> None:
        if text.strip():
            self._console.print(_Tail(text, whole=True))
            self._console.print()


class _Tail:
    """Markdown; unless `whole`, only as many last lines are drawn as the terminal can redraw in place."""

    def __init__(self, text: str, *, whole: bool = False) -> None:
        self._text = text
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from markdown_it import MarkdownIt
        from rich.markdown import Markdown
        from rich.segment import Segment

        markdown = Markdown(self._text)
        # Rich drops HTML, but in an answer it is text.
        markdown.parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(self._text)
        lines = console.render_lines(markdown, options, pad=False)
        while lines and not any(segment.text.strip() for segment in lines[-1]):
            lines.pop()
        if not self._whole:
            lines = lines[-max(1, console.size.height - 2) :]
        for line in lines:
            yield from line
            yield Segment.line()


def complete_blocks(text: str) -> int:
    """Length of the longest prefix of Markdown `text` whose rendering no longer depends on what follows.

    The prefix ends after a blank line outside a code fence whose next line starts a new block.
    """
    split = position = 0
    fence = ""
    blank = False
    lines = text.splitlines(keepends=True)
    for index, line in enumerate(lines):
        whole_line = line.endswith("\n") or index < len(lines) - 1
        found = _FENCE.match(line)
        starts_block = blank and not fence and line.strip() and not _CONTINUES_BLOCK.match(line)
        # "1" may become "1. item" and "-" a list; two more characters tell.
        if starts_block and (whole_line or len(line) > 10 or line[0].isalpha()):
            split = position
        if found and not fence:
            fence = found[1]
        elif found and found[1][0] == fence[0] and len(found[1]) >= len(fence) and not line[found.end() :].strip():
            # The last character of a growing line may not be the end of the fence.
            fence = "" if whole_line else fence
        blank = not line.strip()
        position += len(line)
    return split
