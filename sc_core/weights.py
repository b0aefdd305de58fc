"""The weight gate and the sync behind it.

The gate closes in the step that counts the new version, so no group can be stamped with a
version that no engine serves; it opens once every engine has confirmed that version.
"""

from __future__ import annotations

import anyio

from sc_core.calls import settle
from sc_core.config import AsyncRlConfig
from sc_core.errors import WeightSyncError
from sc_core.ports import WeightSync
from sc_core.state import RunState


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
            await state.wait_until(lambda s: s.requests == 0)
        try:
            await settle("weight_sync.pause", self._deadline_s, self._sync.pause)
            confirmed = await settle(
                "weight_sync.transfer", self._deadline_s, lambda: self._sync.transfer(version)
            )
        finally:
            with anyio.CancelScope(shield=True):
                await settle("weight_sync.resume", self._deadline_s, self._sync.resume)
        wrong = {engine: at for engine, at in confirmed.items() if at != version}
        if wrong or not confirmed:
            raise WeightSyncError(
                f"weight version {version} was not confirmed by every engine:"
                f" {wrong or 'no engine answered'}"
            )
        state.open_gate()
