"""Notices a run that goes on without getting anywhere."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from sc_core.errors import StallError
from sc_core.state import RunState


async def watch(state: RunState, stall_timeout_s: float, report: Callable[[], str]) -> None:
    """Wait for ever while steps, syncs and saves keep coming; commits alone do not count.

    Raises:
        StallError: nothing of that kind for `stall_timeout_s`; carries `report()`.
    """
    while True:
        seen = state.progress
        with anyio.move_on_after(stall_timeout_s):
            await state.wait_until(_moved_past(seen))
            continue
        raise StallError(f"no progress for {stall_timeout_s:g} s: {report()}")


def _moved_past(seen: int) -> Callable[[RunState], bool]:
    return lambda state: state.progress != seen
