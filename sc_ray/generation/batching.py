"""An engine that computes in a thread, one batch after the other."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sc_core import (
    DataFailure,
    WeightSyncError,
)
from sc_ray.bridge import await_future
from sc_ray.generation import Completion, Request
from sc_ray.generation.torch_engine import TorchEngine
from sc_ray.parcels import Content, unpacked


class _Call(msgspec.Struct, frozen=True, eq=False):
    requests: Sequence[Request]
    completions: concurrent.futures.Future[list[Completion]]


class BatchingEngine:
    """An engine and the one thread that uses it; its methods belong to one event loop.

    Calls that come while the engine is busy run together when it is free. Cancelling a call takes
    its requests out of the queue; what runs already is finished and thrown away.
    """

    def __init__(self, engine: TorchEngine, *, max_batch_rows: int) -> None:
        self._engine = engine
        self._max_batch_rows = max_batch_rows
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "engine")
        # Both are used by the loop and by the thread: each operation on them is atomic.
        self._waiting: deque[_Call] = deque()
        self._paused = False

    @property
    def receiver(self) -> None:
        """There is none: weights come from files."""

    @property
    def room(self) -> int:
        return self._engine.room

    async def start(self) -> None:
        """Return at once: it is ready."""

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of one prompt's requests, in their order; waits while paused.

        Raises:
            DataFailure: the prompt is empty or too long.
        """
        call = _Call(requests, concurrent.futures.Future())
        self._waiting.append(call)
        self._thread.submit(self._run_waiting)
        try:
            return await await_future(call.completions)
        finally:
            call.completions.cancel()  # if it is still in the queue

    async def pause(self) -> None:
        """Return once nothing is generated, until `resume`."""
        self._paused = True
        await await_future(self._thread.submit(_nothing))  # after the batch that runs

    async def resume(self) -> None:
        self._paused = False
        self._thread.submit(self._run_waiting)

    async def load(self, path: Path, version: int) -> int:
        """Take weights from a file, between two batches; returns the version it then has.

        Raises:
            WeightSyncError: there is no such file; nothing was touched.
        """
        return await await_future(self._thread.submit(self._load, path, version))

    async def load_content(self, content: Content, version: int) -> int:
        """As `load`, from the content of such a file."""
        return await await_future(self._thread.submit(self._load_content, content, version))

    async def check(self) -> None:
        """Return at once: it lives as long as its process."""

    def close(self) -> None:
        """Forget what waits, and end the thread after what runs."""
        for call in tuple(self._waiting):
            call.completions.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # in the thread ---------------------------------------------------------------------

    def _load_content(self, content: Content, version: int) -> int:
        with unpacked(content) as path:
            return self._load(path, version)

    def _load(self, path: Path, version: int) -> int:
        if not path.is_file():
            raise WeightSyncError(f"there are no weights at {path}")
        self._engine.load(path, version)
        return self._engine.weight_version

    def _run_waiting(self) -> None:
        while not self._paused and (calls := self._take_batch()):
            self._run(calls)

    def _take_batch(self) -> list[_Call]:
        calls: list[_Call] = []
        rows = 0
        while self._waiting and rows < self._max_batch_rows:
            call = self._waiting.popleft()
            if call.completions.set_running_or_notify_cancel():
                calls.append(call)
                rows += len(call.requests)
        return calls

    def _run(self, calls: Sequence[_Call]) -> None:
        requests = [request for call in calls for request in call.requests]
        try:
            completions = iter(self._engine.generate_batch(requests))
        except DataFailure as exc:
            if len(calls) == 1:
                calls[0].completions.set_exception(exc)
            else:  # one prompt is at fault: the others must not suffer
                for call in calls:
                    self._run([call])
        except BaseException as exc:  # carried to the callers, not swallowed
            for call in calls:
                call.completions.set_exception(exc)
        else:
            for call in calls:
                call.completions.set_result([next(completions) for _ in call.requests])


def _nothing() -> None:
    pass
