"""Debian's chromium under playwright, for the tests of the page; those are skipped where it is not there."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or ""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt-get install chromium")


@contextmanager
def open_browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Seen:
    """A page in a browser, what it asked for, and what went wrong in it."""

    def __init__(self, browser, address: str | Path, **options: object) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1360, "height": 1000}} | options))
        self.tab = self.context.new_page()
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("pageerror", lambda fault: self.faults.append(str(fault)))
        self.tab.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.tab.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)
        self.tab.goto(str(address) if "://" in str(address) else Path(address).as_uri())

    def ready(self):
        """Wait until what was last asked for is drawn, and a frame more."""
        self.tab.wait_for_selector("body[aria-busy=false] #tokens[aria-busy=false]", state="attached")
        self.tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert not self.faults, self.faults
        return self.tab

    def go(self, i: int, j: int) -> None:
        """Put the cursor on a pair."""
        self.tab.evaluate(f"moveCursor({i}, {j})")
        self.ready()

    def read(self, quantity: str, side: int = 0, part: str = "value") -> float:
        """A number as the page has it at the cursor, with all its digits."""
        cell = self.tab.locator(f"#reading td[data-read={quantity}]").nth(side)
        return float(cell.get_attribute(f"data-{part}") or "nan")

    def texts(self, selector: str) -> list[str]:
        return self.tab.locator(selector).all_text_contents()

    def close(self) -> None:
        self.context.close()
