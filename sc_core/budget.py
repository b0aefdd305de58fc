"""Ends a run while there is time to save: `checkpointing.checkpoint_must_save_by`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import anyio

from sc_core.state import RunState

MUST_SAVE_BY: Literal["must_save_by"] = "must_save_by"  #: the reason of the stop


async def stop_in_time(state: RunState, deadline: float, reserve_s: Callable[[], float]) -> None:
    """Request a stop `reserve_s()` seconds before `deadline`, a time of the loop's clock.

    The reserve may grow meanwhile: it is looked at whenever the run moves.
    """
    while True:
        reserve = reserve_s()
        with anyio.CancelScope(deadline=deadline - reserve):
            await state.wait_until(_grown(reserve_s, reserve), "a longer reserve, or its time")
            continue
        state.request_stop(MUST_SAVE_BY)
        return


def _grown(reserve_s: Callable[[], float], reserve: float) -> Callable[[RunState], bool]:
    return lambda _: reserve_s() > reserve
