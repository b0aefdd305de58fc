"""One long run, and one browser, for all that look at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import chromium
from playwright.sync_api import Browser
from recorded import RecordedRun, gone_back, long_run, recorded, settings


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Its files are not to be changed."""
    return long_run(tmp_path_factory.mktemp("long & <b>wide<b>"))


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run that went back to an older bundle than its last; not to be changed either."""
    return recorded(tmp_path_factory.mktemp("older"), gone_back, config=settings(30))


@pytest.fixture(scope="module")
def browser(run: RecordedRun, older: RecordedRun) -> Iterator[Browser]:
    """After the runs, which need the event loop."""
    with chromium() as one:
        yield one
