"""Every test marked anyio runs on both backends, on a clock that jumps instead of waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import trio
from trio.testing import MockClock
from virtual_clock import VirtualClockLoop


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many cells the fault matrix had."""
    cells = sum(
        value
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, value in report.user_properties
        if name == "cells" and report.when == "call"
    )
    if cells:
        terminalreporter.write_line(f"fault matrix: {cells:,} cells")


_EAGER = ["asyncio-eager"] if hasattr(asyncio, "eager_task_factory") else []


@pytest.fixture(params=["asyncio", *_EAGER, *(f"trio-{seed}" for seed in range(2))])
def anyio_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """asyncio, with eager tasks where Python has them, and trio once per scheduler seed."""
    name, _, variant = request.param.partition("-")
    if name == "trio":
        monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        trio._core._run._r.seed(int(variant))
        return name, {"clock": MockClock(autojump_threshold=0)}

    def new_loop() -> VirtualClockLoop:
        loop = VirtualClockLoop()
        if variant == "eager":
            loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        return loop

    return name, {"loop_factory": new_loop}
