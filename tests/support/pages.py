"""Pages in a headless Chromium: what axe-core finds wrong, and what a page fetches or complains about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

VIEWS = {
    "desktop, light": (1280, 800, "light", "screen"),
    "desktop, dark": (1280, 800, "dark", "screen"),
    "phone, light": (390, 844, "light", "screen"),
    "phone, dark": (390, 844, "dark", "screen"),
    "paper": (794, 1123, "dark", "print"),
}
"""Width and height in CSS pixels, what the system prefers, and the medium."""


@contextmanager
def browser() -> Iterator[Browser]:
    """Skips where there is no Chromium, or no package to drive it."""
    program = chromium()
    if program is None:
        pytest.skip("no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api", reason="playwright belongs to the extra dev")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def open_page(opened: Browser, address: str) -> Iterator[Page]:
    """A page that must neither complain nor ask for anything but itself."""
    context = opened.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(address)
        yield page
        assert complaints == []
        assert asked == [address]
    finally:
        context.close()


def show_as(page: Page, view: str) -> None:
    """Shows the page as one of VIEWS."""
    width, height, scheme, medium = VIEWS[view]
    page.set_viewport_size({"width": width, "height": height})
    settings: dict[str, Any] = {"color_scheme": scheme, "media": medium}
    page.emulate_media(**settings)


def axe_violations(page: Page) -> list[str]:
    """What axe-core finds in the page as it is shown: a line a violation."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="it belongs to the extra dev")
    found: list[dict[str, Any]] = axe.Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}" for one in found]
