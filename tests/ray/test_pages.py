"""Pages of the documentation that start real runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_page import PAGES, Reader, needs_ray


@pytest.mark.parametrize("page", [p for p in PAGES if needs_ray(p)], ids=lambda p: p.name)
def test_the_page_is_true(page: Path, tmp_path: Path) -> None:
    Reader(page, tmp_path).read()
