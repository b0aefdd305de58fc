"""The weight gate and the sync behind it.

The gate closes in the step that counts the new version, so no group can be stamped with a
version that no engine serves; it opens once every engine has confirmed that version.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sc_core.calls import settle
from sc_core.config import AsyncRlConfig
from sc_core.errors import WeightSyncError
from sc_core.ports import WeightSync
from sc_core.state import DRAINED, RunState

logger = logging.getLogger(__name__)
R = TypeVar("R")


class WeightUpdates:
    def __init__(self, state: RunState, sync: WeightSync, config: AsyncRlConfig) -> None:
        self._state = state
        self._sync = sync
        self._deadline_s = config.deadlines.weight_sync_s
        self._drain = config.weight_sync_mode == "drain"

    async def update(self) -> None:
        """Give the current version to the engines, then open the gate.

        Engines are resumed whatever happens. A failure leaves the gate closed and must end
        the run, as a cancel does.

        Raises:
            WeightSyncError: an engine did not confirm the version; the message names it.
            CallTimeout: pause, transfer or resume outlived its deadline.
        """
        state, version = self._state, self._state.ledger.weight_version
        if self._drain:
            await state.requests.wait_until(lambda under_way: under_way == 0, DRAINED)
        try:
            await self._call("pause", self._sync.pause)
            confirmed = await self._call("transfer", lambda: self._sync.transfer(version))
        except BaseException:
            try:
                await self._call("resume", self._sync.resume)
            except Exception as exc:  # the error under way says more than this one
                logger.error("engines may still be paused: %s", exc)
            raise
        await self._call("resume", self._sync.resume)
        wrong = {engine: at for engine, at in confirmed.items() if at != version}
        if wrong or not confirmed:
            raise WeightSyncError(
                f"weight version {version} was not confirmed by every engine:"
                f" {wrong or 'no engine answered'}"
            )
        state.open_gate()

    async def _call(self, name: str, work: Callable[[], Awaitable[R]]) -> R:
        return await settle(f"weight_sync.{name}", self._deadline_s, work)
