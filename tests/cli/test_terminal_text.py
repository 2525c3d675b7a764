"""Whatever a name, a prompt, a file or a model holds, no command sends a control character of it to the terminal."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from llmc.cli.main import main
from llmc.cli.render.help_layout import SUMMARIES
from llmc.cli.render.live_text import LiveText
from llmc.cli.render.terminal_text import (
    EscapedStream,
    escaped,
    escaped_streams,
    exact,
    json_text,
    printable,
    usable_streams,
)
from llmc.runtime.outputs import TokenDelta

from support.paths import ROOT

# A window's title, a screen cleared by ESC and by C1, a bell, a line that hides the one before, text from the right.
EVIL = "a\x1b]0;title\x07b\x1b[2Jc\x9b2Jd\re\x7f\u202ef\u2066g\u2028h\x08"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def check_harmless(capfd: pytest.CaptureFixture[str]) -> str:
    """What was written to stdout and stderr, which must hold no control character."""
    shown = "".join(capfd.readouterr())
    assert not CONTROLS.search(shown), ascii(shown)
    return shown


def test_what_is_escaped_can_be_seen_and_is_the_same_json() -> None:
    assert escaped("é\ta\nb") == "é\ta\nb"
    assert escaped("\x1b[31m\x9b\u202e\udc80") == r"\u001b[31m\u009b\u202e\udc80"
    text = json.dumps({EVIL: [EVIL]}, ensure_ascii=False)
    assert json.loads(escaped(text)) == {EVIL: [EVIL]}
    assert not CONTROLS.search(escaped(text))
    assert printable(EVIL) == "a]0;titleb[2Jc2Jdefgh"


def test_streams_are_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with escaped_streams(), escaped_streams():
        assert isinstance(sys.stdout, EscapedStream)
        print(EVIL, "é", sep="\t")
        print("raw\x01", file=exact(sys.stdout))
    assert (sys.stdout, sys.stderr) == before
    assert capfd.readouterr().out == escaped(EVIL) + "\té\nraw\x01\n"


@pytest.mark.parametrize("command", [name for name in SUMMARIES if name])
def test_each_command_with_a_hostile_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / EVIL).mkdir()
    (tmp_path / EVIL / "config.json").write_text(json.dumps({"model_type": EVIL, "architectures": [EVIL]}))
    (tmp_path / EVIL / "manifest.json").write_text(json.dumps({"format": EVIL}))
    for arguments in ([EVIL], [EVIL, EVIL], [f"{EVIL}-is-not-there"], [f"--{EVIL}"], ["--output", EVIL, EVIL, EVIL]):
        if command.startswith("cache") and "trim" in command:
            continue
        main([*command.split(), *arguments])
        check_harmless(capfd)


def test_an_artifact_with_a_hostile_name(
    english_artifact: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    artifact = tmp_path / EVIL
    shutil.copytree(english_artifact, artifact)
    prompts = tmp_path / f"{EVIL}.jsonl"
    prompts.write_text(json.dumps({"prompt": EVIL}) + "\n")
    for arguments in (
        ["inspect", str(artifact)],
        ["inspect", str(artifact), "--format", "json"],
        ["inspect", str(artifact), "--verify"],
        ["buckets", "show", str(artifact)],
        ["run", str(artifact), "--prompts", str(prompts), "--max-tokens", "2", "--json", "--stats"],
        ["run", str(artifact), "--prompt", EVIL, "--max-tokens", "2", "--json", "--stats"],
    ):
        assert main(arguments) == 0, arguments
        check_harmless(capfd)
    assert main(["run", str(artifact), "--prompt", "Hi", "--max-tokens", EVIL]) == 2
    check_harmless(capfd)
    (artifact / "manifest.json").write_text(json.dumps({"version": EVIL, "model": {"model_type": EVIL}}))
    for arguments in (["inspect", str(artifact)], ["chat", str(artifact)], ["buckets", "show", str(artifact)]):
        main(arguments)
        check_harmless(capfd)


class _Out(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_vocabulary_with_control_characters(terminal: bool) -> None:
    """Programs that read the texts get them as they are."""
    out = _Out(terminal)
    live = LiveText([EVIL], 1, EscapedStream(out))  # type: ignore[arg-type]
    live.take(TokenDelta(0, 0, EVIL, (1,)))
    live.take(TokenDelta(0, 0, "\n\tend", (2,), finish_reason="stop"))
    shown = printable(EVIL) if terminal else EVIL
    assert out.getvalue() == shown * 2 + "\n\tend\n"


def test_tables_and_bars_of_a_terminal_keep_only_their_own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Progress, TextColumn
    from rich.table import Table
    from rich.text import Text

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=200, highlight=False)
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_column("plain")
    table.add_row(EVIL, Text(EVIL, style="red"))
    print_table(table, console)
    console.print(EVIL, style="bold")
    console.print(Text(EVIL))
    with Progress(TextColumn("{task.description}"), console=console) as bars:
        bars.add_task(EVIL, total=1)
        bars.refresh()
    shown = out.getvalue()
    own = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown)
    assert not CONTROLS.search(own), ascii(own)
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown
    rows = [line for line in own.splitlines() if "plain" in line or line.startswith("│")]
    assert len({len(line) for line in rows}) == 1, "columns stay in line"


def test_every_console_is_ours() -> None:
    for path in sorted((ROOT / "cli").glob("*.py")):
        if path.name == "console.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for block in ast.walk(tree):
            if not isinstance(block, ast.FunctionDef):
                continue
            for node in ast.walk(block):
                if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
                    assert "Console" not in [name.name for name in node.names], f"{path.name}: {block.name}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], [], ["targets"]])
def test_a_full_disk_is_one_sentence(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [str(Path(sys.executable).with_name("llmc")), *arguments]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.splitlines() == ["llmc: error: No space left on device"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_only_messages_are_dropped_where_they_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as closing:
        for name in ("stdout", "stderr"):
            stream = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 (closed below, which fails)
            closing.callback(_close, stream)
            monkeypatch.setattr(sys, name, stream)
        with escaped_streams():
            print("a message", file=sys.stderr, flush=True)
            with pytest.raises(OSError, match="No space left on device"):
                print("a result", flush=True)


def _close(stream: TextIO) -> None:
    with contextlib.suppress(OSError):
        stream.close()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of another locale, and of the locale C
@pytest.mark.parametrize("entered", [False, True])  # a process escapes its streams before all else
def test_streams_that_are_closed_or_lack_characters_can_be_written_to(
    errors: str, entered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, "ascii", errors))
    monkeypatch.setattr(sys, "stderr", None)
    with escaped_streams() if entered else contextlib.nullcontext(), usable_streams(), escaped_streams():
        print("\u00fcber", flush=True)
        print(json_text("\u00fc\U0001f600"), flush=True)
        print("an error", file=sys.stderr)
    assert bytes_.getvalue() == b'\\xfcber\n"\\u00fc\\ud83d\\ude00"\n', "without stderr its lines do not go to stdout"
    assert sys.stderr is None
