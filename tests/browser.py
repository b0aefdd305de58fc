"""Headless Chromium, and what a page in it did."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Page, Route, sync_playwright

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


@dataclass
class Watched:
    """A page, and what it asked for and complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)  #: URLs beyond those it may ask for
    complaints: list[str] = field(default_factory=list)


@contextmanager
def open_page(*, may_ask: tuple[str, ...] = LOCAL, **context: Any) -> Iterator[Watched]:
    """A page of a fresh browser; requests but for `may_ask` are noted, and not let out.

    `context` goes to playwright's `new_context`.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("chromium is not installed, and these tests need it: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS))
        page = browser.new_context(**context).new_page()
        seen = Watched(page)

        def route(route: Route) -> None:
            url = route.request.url
            if url.startswith(may_ask):
                route.continue_()
            else:
                seen.requests.append(url)
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
            browser.close()
