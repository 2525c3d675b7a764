"""Records docs/images/terminal.svg: a replica is killed in the middle of an answer, and its reader sees nothing of it.

    llmc compile examples/tiny-english -o out/tiny.llmc
    python -m docs.draw_terminal out/tiny.llmc

The commands run in a shell as they are shown, and what they print is what the picture has. Port 8000 must be free; curl
and jq must be installed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "images/terminal.svg"
TITLE = "llmc route goes on with the answer of a replica that was killed."
DESCRIPTION = (
    "A recorded terminal: two replicas serve one artifact. The same question is asked twice, and the second time the "
    "replica that answers is killed. Both answers have the same bytes."
)
SESSION = (
    "llmc route --spawn 2 tiny.llmc 2> router.log &",
    'story() { echo "The evening passed" | llmc chat --raw --temperature 0.8 --seed 3; }',
    "story > whole.txt",
    "story > killed.txt &",
    "kill -9 $(curl -s localhost:8000/v1/llmc/replicas | jq '.data[] | select(.active_requests > 0).pid')",
    "wait $!; grep lost router.log",
    "curl -s localhost:8000/metrics | grep ^llmc_router_failovers_total",
    'cmp whole.txt killed.txt && echo "Both have the same bytes: $(wc -c < whole.txt)."',
)
"""The commands, in order."""
_REPLICAS = "curl -s localhost:8000/v1/llmc/replicas"
WAITS = {
    0: f'until [ "$({_REPLICAS} | jq -c \'[.data[].state]\')" = \'["ready","ready"]\' ]; do sleep 0.1; done',
    3: f"until [ \"$({_REPLICAS} | jq '[.data[].active_requests] | add')\" = 1 ] || ! kill -0 $!; do :; done",
}
"""What a person would wait for behind a command, by its place."""
_END = "-- end of a command --"
_CHARACTER, _LINE, _MARGIN, _SIZE = 7.8, 19, 20, 13
_STYLE = """
rect { fill: #f6f8fa; stroke: #d0d7de }
text { fill: #24292f; font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }
.prompt { fill: #1a7f37 }
.said { fill: #57606a }
@media (prefers-color-scheme: dark) {
  rect { fill: #161b22; stroke: #30363d }
  text { fill: #e6edf3 }
  .prompt { fill: #3fb950 }
  .said { fill: #9aa4af }
}
"""


def record(artifact: Path, folder: Path) -> list[list[str]]:
    """What each command of SESSION prints, line by line. The artifact is tiny.llmc of `folder`, where they run."""
    (folder / "tiny.llmc").symlink_to(artifact.resolve(), target_is_directory=True)
    shell = subprocess.Popen(
        ["bash"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stdin, stdout = shell.stdin, shell.stdout
    assert stdin is not None
    assert stdout is not None

    def run(command: str) -> list[str]:
        stdin.write(f"{command}\necho {shlex.quote(_END)}\n")
        stdin.flush()
        lines: list[str] = []
        for line in stdout:
            if line.rstrip("\n") == _END:
                return lines
            lines.append(line.rstrip("\n"))
        raise SystemExit(f"the shell ended at: {command}")

    path = shlex.quote(str(Path(sys.executable).parent))
    run(f'export PATH={path}:"$PATH"')
    try:
        told = []
        for place, command in enumerate(SESSION):
            told.append(run(command))
            if place in WAITS:
                run(f"{{ {WAITS[place]}; }} > /dev/null 2>&1")
        return told
    finally:
        run("kill %1; wait")
        stdin.close()
        shell.wait()


def draw(commands: Sequence[str], told: Iterable[Sequence[str]]) -> str:
    """The SVG: each command behind a prompt, and what it printed."""
    rows = []
    for command, lines in zip(commands, told, strict=True):
        rows.append(("$ ", command))
        rows += [("", line) for line in lines]
    width = 2 * _MARGIN + _CHARACTER * max(len(prompt) + len(text) for prompt, text in rows)
    height = 2 * _MARGIN + _LINE * len(rows) - (_LINE - _SIZE)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        'aria-labelledby="title desc">',
        f'<title id="title">{escape(TITLE)}</title>',
        f'<desc id="desc">{escape(DESCRIPTION)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="6"/>',
    ]
    for place, (prompt, text) in enumerate(rows):
        y = _MARGIN + _SIZE + _LINE * place - 3
        # The same width in any font of equal letters.
        length = f'textLength="{_CHARACTER * (len(prompt) + len(text)):.1f}" lengthAdjust="spacingAndGlyphs"'
        if prompt:
            parts.append(
                f'<text x="{_MARGIN}" y="{y}" {length}><tspan class="prompt">{prompt}</tspan>{escape(text)}</text>'
            )
        elif text:
            parts.append(f'<text class="said" x="{_MARGIN}" y="{y}" {length}>{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="Of examples/tiny-english.")
    artifact: Path = parser.parse_args().artifact
    if not (artifact / "manifest.json").is_file():
        raise SystemExit(f"{artifact} is not an artifact: llmc compile examples/tiny-english -o {artifact}")
    with tempfile.TemporaryDirectory() as folder:
        told = record(artifact, Path(folder))
    if not told[-1] or not told[-2] or not told[-2][0].endswith(" 1.0"):
        raise SystemExit(f"the answer was over before its replica was killed, or differs: {told[-3:]}; run it again")
    PICTURE.write_text(draw(SESSION, told), encoding="utf-8")


if __name__ == "__main__":
    main()
