"""`llmc chat`: a conversation with a model in the terminal."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.num_states import STATES_HELP
from llmc.cli.options.sampling import SamplingOptions
from llmc.output_path import check_outputs
from llmc.regular_file import read_text
from llmc.units import parse_size

if TYPE_CHECKING:
    from llmc.cli.render.chat_screen import Screen
    from llmc.runtime.chat.backends import Backend
    from llmc.runtime.chat.commands import Commands
    from llmc.runtime.chat.session import Session

DEFAULT_URL = "http://127.0.0.1:8000"

_HELP = """Talk to a model in the terminal: a server's URL, an artifact, or a model (downloaded, compiled, cached).

Answers are shown as Markdown while they arrive. Ctrl-C stops an answer, Ctrl-D leaves the chat, and /help lists its
commands. If stdin is not a terminal, each line is a message, and answers are plain text on stdout. Sampling defaults
are the model's own.

\b
Examples:
  llmc chat
  llmc chat http://server:8000 --system "Answer in one sentence."
  llmc chat qwen.llmc --temperature 0.7 --seed 1 --stats
  llmc chat Qwen/Qwen3-0.6B
  llmc chat base.llmc --raw
  llmc chat base.llmc --chat-template chatml.jinja
  echo "Name three rivers." | llmc chat qwen.llmc
"""


@dataclass(frozen=True)
class ChatConfig:
    """Settings of one `llmc chat`. target: URL or path. sampling: the settings that were given."""

    target: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    system: str | None = None
    load: Path | None = None
    history: Path | None = None
    raw: bool = False
    chat_template: Path | None = None
    plain: bool = False
    stats: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def is_url(self) -> bool:
        return "://" in self.target


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("chat", help=_HELP)(chat_command)


@takes_option_groups
def chat_command(
    target: str = typer.Argument(
        DEFAULT_URL,
        metavar="URL|ARTIFACT|MODEL",
        help="Server, artifact, model directory, .gguf file, or ORG/NAME of the hub.",
    ),
    system: str | None = typer.Option(None, metavar="TEXT", help="System message."),
    load: Path | None = typer.Option(None, metavar="FILE", help="Continue a conversation that /save wrote."),
    drawing: SamplingOptions = SamplingOptions(),
    max_tokens: int | None = typer.Option(
        None, min=1, metavar="N", help="Longest answer in tokens; default: the rest of the context."
    ),
    seed: int | None = typer.Option(None, min=0, help="Seed; the same conversation and seed give the same answer."),
    stop: list[str] = typer.Option([], metavar="TEXT", help="End an answer before this string; repeatable."),
    raw: bool = typer.Option(False, "--raw", help="Continue plain text, without a chat template."),
    chat_template: Path | None = typer.Option(
        None, metavar="FILE", help="Jinja file instead of the model's own chat template; not for a URL."
    ),
    plain: bool = typer.Option(False, "--plain", help="Show answers as plain text, not as Markdown."),
    stats: bool = typer.Option(False, "--stats", help="After each answer: time to the first token, tokens/s."),
    history: Path | None = typer.Option(None, metavar="FILE", help="Keep the input lines for the next chat."),
    model: str | None = typer.Option(None, metavar="NAME", help="Model to request; default: the server's first."),
    api_key: str | None = typer.Option(None, envvar="LLMC_API_KEY", metavar="KEY", help="Key for the server."),
    timeout: float = typer.Option(600.0, min=0.001, metavar="S", help="Seconds to wait for the server's next data."),
    threads: int = typer.Option(0, min=0, metavar="N", help="Threads of an artifact; 0: every CPU."),
    kv_bytes: int = typer.Option(
        0, parser=parse_size, metavar="SIZE", help="KV pool of an artifact, such as 2GiB; 0: for one conversation."
    ),
    num_states: int = typer.Option(0, min=0, metavar="N", help=STATES_HELP),
) -> None:
    from llmc.runtime.chat.session import ChatError, check_sampling

    if raw and system is not None:
        raise typer.BadParameter("--system and --raw exclude each other: a raw text has no system message")
    if raw and chat_template is not None:
        raise typer.BadParameter("--chat-template and --raw exclude each other: a raw text has no template")
    given = {
        **asdict(drawing),
        "max_tokens": max_tokens,
        "seed": seed,
        "stop": tuple(stop) or None,
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    try:
        check_sampling(sampling)
    except ChatError as error:
        raise typer.BadParameter(str(error)) from error
    config = ChatConfig(
        target=target,
        model=model,
        api_key=api_key,
        timeout_s=timeout,
        system=system,
        load=load,
        history=history,
        raw=raw,
        chat_template=chat_template,
        plain=plain,
        stats=stats,
        sampling=sampling,
        engine={"num_threads": threads, "kv_bytes": kv_bytes, "num_states": num_states},
    )
    if model is not None and not config.is_url:
        raise typer.BadParameter(f"--model belongs to a server's URL, not to {target}")
    if chat_template is not None and config.is_url:
        raise typer.BadParameter(f"{target} has its own template: start llmc serve there with --chat-template FILE")
    check_outputs({"--history": history})
    run_chat(config)


def run_chat(config: ChatConfig) -> None:
    """Opens the target of `config` and chats until the input ends. Raises ChatError and the runtime's errors."""
    from llmc.runtime.chat.commands import Commands
    from llmc.runtime.chat.session import Session

    session = Session(config.system, dict(config.sampling), config.raw)
    if config.load is not None:
        session.load(config.load)
        session.system = session.system if config.system is None else config.system
        session.sampling |= config.sampling
    commands = Commands(session)
    backend = open_backend(config)
    try:
        backend.check(config.raw)
        screen = open_screen(config, commands)
        if screen.interactive:
            screen.note(f"{backend.name}: /help lists the commands, Ctrl-D leaves")
        converse(session, commands, backend, screen, stats=config.stats)
    finally:
        backend.close()


def open_backend(config: ChatConfig) -> Backend:
    """The server, or an engine in this process."""
    from llmc.runtime.chat.backends import EngineBackend, ServerBackend

    if config.is_url:
        return ServerBackend(config.target, model=config.model, api_key=config.api_key, timeout_s=config.timeout_s)
    from llmc.cli.serve import compile_aside
    from llmc.model_artifact import given_artifact
    from llmc.runtime.llm import LLM

    path = Path(config.target)
    artifact = given_artifact(path) or compile_aside(path)
    template = None if config.chat_template is None else _read_template(config.chat_template)
    return EngineBackend(LLM(artifact, max_num_seqs=1, chat_template=template, **config.engine))


def _read_template(path: Path) -> str:
    from llmc.runtime.chat.session import ChatError

    try:
        return read_text(path, 1 << 24)
    except OSError as error:
        raise ChatError(f"cannot read the chat template {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ChatError(f"cannot read the chat template {path}: {error}") from error


def open_screen(config: ChatConfig, commands: Commands) -> Screen:
    """A terminal if both input and output are one."""
    from llmc.cli.render.chat_screen import PlainScreen, TerminalScreen

    if sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return PlainScreen()
    return TerminalScreen(markdown=not config.plain, history=config.history, completions=commands.names)


def converse(session: Session, commands: Commands, backend: Backend, screen: Screen, *, stats: bool) -> None:
    """The loop: reads a line, then executes it. Raises ChatError if nobody can react to it."""
    from llmc.runtime.chat.session import ChatError

    for line in screen.lines():
        before, first = list(session.messages), session.first
        try:
            outcome = commands.take(line)
            if outcome.say:
                screen.note(outcome.say)
            if outcome.leave:
                return
            # An empty line is meaningful only in a raw text that has begun.
            if outcome.ask is None or not (outcome.ask or (session.raw and before)):
                continue
            answer(outcome.ask, session, commands, backend, screen)
            if stats:
                screen.note(commands.take("/stats").say.partition("\n")[0])
        except ChatError as error:
            if not screen.interactive:
                raise
            if len(session.messages) < len(before):
                # A retry removed the old answer and got no new one.
                session.messages, session.first = before, first
            screen.note(f"error: {error}")


def answer(question: str, session: Session, commands: Commands, backend: Backend, screen: Screen) -> None:
    """Sends the question and shows the answer. Text shown before an interruption or error stays in the conversation.
    Raises ChatError."""
    from llmc.runtime.chat.session import ChatError

    session.ask(question)
    shown: list[str] = []
    reply = None
    first = session.first
    try:
        reply = backend.reply(session)
        if reply.note:
            screen.note(reply.note)
        screen.show(reply, shown)
    except KeyboardInterrupt:
        if not screen.interactive:
            raise
        screen.note("stopped")
    except ChatError:
        if reply is None:
            session.first = first
        raise
    finally:
        if reply is not None:
            reply.close()
            commands.count(reply)
        session.answer("".join(shown))
