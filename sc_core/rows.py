"""Every write to the data plane, each inside a barrier section and awaited to its end.

Rows whose put or clear is known not to have finished are *suspect*: named, cleared again
before anything else is, written into the cut, and cleared by a restore.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import anyio

from sc_core.barrier import CheckpointBarrier
from sc_core.calls import settle
from sc_core.config import DeadlinesConfig
from sc_core.errors import BarrierMisuse, CallTimeout, DataPlaneError, RowsNotCleared
from sc_core.ports import Columns, DataPlane
from sc_core.records import SampleId
from sc_core.returned import check_columns

logger = logging.getLogger(__name__)


class Rows:
    """The data plane, as the pumps may use it."""

    def __init__(
        self,
        plane: DataPlane,
        barrier: CheckpointBarrier,
        deadlines: DeadlinesConfig,
        suspects: Iterable[SampleId] = (),
    ) -> None:
        self._plane = plane
        self._barrier = barrier
        self._deadline_s = deadlines.data_plane_s
        self.suspects: set[SampleId] = set(suspects)

    async def put(
        self,
        sample_ids: Sequence[SampleId],
        fields: Columns,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        then: Callable[[None], None],
    ) -> None:
        """Write new rows; `then` runs in the same step as their arrival, cancelled or not.

        When it fails, the rows are gone again, so the caller may retry under another id.

        Raises:
            DataPlaneError, CallTimeout: the put failed or did not return.
            RowsNotCleared: they could not be cleared after a failed put; the run must not
                reuse their ids.

        A put past its deadline may yet arrive: its rows stay suspect although they were cleared.
        """
        self._require_section("put")
        try:
            await self._write(
                "put_samples", lambda: self._plane.put_samples(sample_ids, fields, tags), then
            )
        except (DataPlaneError, CallTimeout) as exc:
            self.suspects.update(sample_ids)
            try:
                await self._clear_suspects()
            finally:
                if isinstance(exc, CallTimeout):
                    self.suspects.update(sample_ids)
            raise
        except anyio.get_cancelled_exc_class():  # by something outside this run: settle is shielded
            self.suspects.update(sample_ids)
            raise

    async def write_back(self, sample_ids: Sequence[SampleId], fields: Columns) -> None:
        """Write further columns of rows that exist; what was refused once is tried again.

        Raises:
            DataPlaneError, CallTimeout: some rows may have them.
        """
        self._require_section("write_back")

        async def write() -> None:
            await self._plane.put_samples(sample_ids, fields)

        try:
            await self._write("put_samples", write)
        except DataPlaneError as exc:
            logger.warning("%s; once more", exc)
            await self._write("put_samples", write)

    async def clear(self, sample_ids: Iterable[SampleId]) -> None:
        """Remove rows that the index has already forgotten, and all suspects with them.

        If the data plane refuses, they stay suspect, and the next clear tries them again.

        Raises:
            CallTimeout: whether they are gone is unknown; the run should end.
        """
        self._require_section("clear")
        self.suspects.update(sample_ids)
        if not self.suspects:
            return
        try:
            await self._clear_suspects()
        except RowsNotCleared as exc:
            if isinstance(exc.__cause__, CallTimeout):
                raise exc.__cause__ from None
            logger.warning("%s; they will be cleared with the next ones", exc)

    async def get(
        self, sample_ids: Sequence[SampleId], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Read columns of rows that the caller's groups own.

        Raises:
            DataPlaneError: it came back without one of them, or of fewer rows.
        """
        columns = await settle(
            "data_plane.get_samples",
            self._deadline_s,
            lambda: self._plane.get_samples(sample_ids, select_fields),
        )
        return check_columns(
            columns, "data_plane.get_samples", select_fields, len(sample_ids), DataPlaneError
        )

    async def _clear_suspects(self) -> None:
        doomed = sorted(self.suspects)
        failure: Exception | None = None
        for _ in range(2):  # a clear may be repeated; more than one repeat is for the operator
            try:
                await self._write(
                    "clear_samples",
                    lambda: self._plane.clear_samples(doomed),
                    lambda _: self.suspects.difference_update(doomed),
                )
            except (DataPlaneError, CallTimeout) as exc:
                failure = exc
            else:
                return
        raise RowsNotCleared(doomed, str(failure)) from failure

    async def _write(
        self,
        call: str,
        work: Callable[[], Awaitable[None]],
        then: Callable[[None], None] | None = None,
    ) -> None:
        async def one() -> None:
            try:
                await work()
            except DataPlaneError:
                raise
            except Exception as exc:
                raise DataPlaneError(f"data_plane.{call}: {type(exc).__name__}: {exc}") from exc

        await settle(f"data_plane.{call}", self._deadline_s, one, then=then)

    def _require_section(self, write: str) -> None:
        if not self._barrier.holds_section():
            raise BarrierMisuse(f"data-plane {write} outside a barrier section")
