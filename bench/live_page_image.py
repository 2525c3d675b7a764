"""Draws docs/images/live-page.png: the live page of a server under a load that this script makes.

    llmc serve ARTIFACT --port 8000 &
    python bench/live_page_image.py http://localhost:8000 docs/images/live-page.png

Needs Chromium and the extra dev.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

_PROMPTS = ("the cat sat on the mat ", "a dog ran over the hill ", "the sun is in the sky ")
_LOAD_S, _CLIENTS = 12, 6


def load(url: str, stop: threading.Event, number: int) -> None:
    """Sends requests of several lengths without a pause, until `stop`."""
    with httpx.Client(base_url=url, timeout=120) as client:
        turn = 0
        while not stop.is_set():
            turn += 1
            prompt = _PROMPTS[(number + turn) % len(_PROMPTS)] * (1 + (turn * 5 + number * 3) % 12)
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20 + 15 * (turn % 7)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("image", type=Path)
    arguments = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("no Chromium on this machine: install chromium")
    stop = threading.Event()
    clients = [threading.Thread(target=load, args=(arguments.url, stop, number)) for number in range(_CLIENTS)]
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
            page.goto(arguments.url)
            page.wait_for_selector('#status[data-state="ok"]')
            for client in clients:
                client.start()
            page.fill("#input", "Tell me a story.")
            page.press("#input", "Enter")
            page.wait_for_timeout(1000 * _LOAD_S)
            page.screenshot(path=arguments.image)
            browser.close()
    finally:
        stop.set()
        for client in clients:
            if client.is_alive():
                client.join()


if __name__ == "__main__":
    main()
