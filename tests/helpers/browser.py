"""A real Chromium without a window, and what a page in it asked for and complained of."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
PATIENCE_MS = 60_000
"""A busy machine is slow; what comes, comes within a second."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser, with a profile that is new and empty. Fails where there is none: make installs one."""
    if CHROMIUM is None:
        pytest.fail("chromium is not installed")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A tab. asked: addresses that it requested. complaints: of its console, and errors of its scripts."""

    tab: Any
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tab.set_default_timeout(PATIENCE_MS)
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("console", self._told)

    def _told(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # that is an answer of 4xx
            self.complaints.append(message.text)
