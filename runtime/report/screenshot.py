"""A picture of an HTML page, by an installed Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from llmc.replaced_file import write_replaced
from llmc.runtime.report.page import ReportError

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_FLAGS = (
    "--headless", "--disable-gpu", "--no-sandbox", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
_MEASURE = (
    "<script>document.body.dataset.height = Math.ceil(document.documentElement.getBoundingClientRect().height)</script>"
)
_HEIGHT = re.compile(r'data-height="(\d{1,6})"')
_PATIENCE_S = 120  # only a hang takes this long


def browser() -> str | None:
    """Path of the browser, or None."""
    return next((path for name in _PROGRAMS if (path := shutil.which(name))), None)


def screenshot(page: str, png: Path, width: int = 1280, scale: int = 2, height: int | None = None) -> None:
    """Writes a picture of the whole page, or of its first `height` points, at `scale` pixels per point.

    Raises ReportError if there is no browser, or it makes no picture.
    """
    program = browser()
    if program is None:
        raise ReportError(
            f"a picture needs Chromium, none of {', '.join(_PROGRAMS)} is installed: write --html instead"
        )
    with tempfile.TemporaryDirectory(prefix="llmc-report-") as folder:
        file, picture = Path(folder) / "report.html", Path(folder) / "report.png"
        file.write_text(page.replace("</body>", f"{_MEASURE}</body>"), encoding="utf-8")
        command = [program, *_FLAGS, f"--user-data-dir={folder}/profile"]
        if height is None:
            found = _HEIGHT.search(_run([*command, f"--window-size={width},800", "--dump-dom", file.as_uri()]))
            height = int(found[1]) if found else 4000
        size = [f"--force-device-scale-factor={scale}", f"--window-size={width},{height}"]
        _run([*command, *size, f"--screenshot={picture}", file.as_uri()])
        if not picture.is_file():
            raise ReportError(f"{program} drew no picture of the report: write --html instead")
        try:
            write_replaced(png, picture.read_bytes())
        except OSError as error:
            raise ReportError(f"cannot write picture {png}: {error.strerror or error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReportError(f"{command[0]} could not draw the report ({error}): write --html instead") from error
    return done.stdout
