"""Every test marked anyio runs on both backends, on a clock that jumps instead of waiting."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

import pytest
import trio
from trio.testing import MockClock


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: when nothing is ready, moves the loop's clock to the next timer."""

    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


_EAGER = ["asyncio-eager"] if hasattr(asyncio, "eager_task_factory") else []


@pytest.fixture(params=["asyncio", *_EAGER, *(f"trio-{seed}" for seed in range(3))])
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
