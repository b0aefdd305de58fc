"""One long run, and one browser, for all that look at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import chromium
from playwright.sync_api import Browser
from recorded import RecordedRun, long_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Its files are not to be changed."""
    return long_run(tmp_path_factory.mktemp("long & <b>wide<b>"))


@pytest.fixture(scope="module")
def browser(run: RecordedRun) -> Iterator[Browser]:
    """After the run, which needs the event loop."""
    with chromium() as one:
        yield one
