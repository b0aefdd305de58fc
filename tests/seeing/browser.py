"""Headless Chromium, and what a page in it did."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)
LOCAL = ("file:", "data:", "blob:")
_PATIENCE_S = 60.0


@contextmanager
def chromium() -> Iterator[Browser]:
    """One for many pages. While it is there, its thread can run no other event loop."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("chromium is not installed, and these tests need it: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and what it asked for and complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)  #: beyond those it may ask for
    complaints: list[str] = field(default_factory=list)

    def until(self, script: str) -> None:
        """Wait until it is true. Asked from outside, so the page's own policy has no say."""
        give_up = time.monotonic() + _PATIENCE_S
        while not self.page.evaluate(script):
            assert time.monotonic() < give_up, f"never came true: {script}"
            self.page.wait_for_timeout(20)


@contextmanager
def open_page(
    browser: Browser, *, may_ask: tuple[str, ...] = LOCAL, **context: Any
) -> Iterator[Watched]:
    """An empty page in a context of its own, for which `context` are playwright's settings.

    Requests but for `may_ask` are noted, and not let out.
    """
    of = browser.new_context(**context)
    page = of.new_page()
    seen = Watched(page)

    def route(route: Route) -> None:
        if route.request.url.startswith(may_ask):
            route.continue_()
        else:
            seen.requests.append(route.request.url)
            route.abort()

    page.route("**/*", route)
    page.on(
        "console",
        lambda said: seen.complaints.append(said.text) if said.type == "error" else None,
    )
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    try:
        yield seen
    finally:
        of.close()
