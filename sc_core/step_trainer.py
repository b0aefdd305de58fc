"""A trainer in this process whose step is one function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio.lowlevel
import msgspec

from sc_core.calls import in_thread
from sc_core.disk import LOCAL
from sc_core.errors import BundleDamaged, SaveError
from sc_core.ports import Columns, Runner
from sc_core.records import Batch, SampleId

STATE = "state.msgpack"
MOST_BYTES = 2**32  #: of what is saved

Fetch = Callable[[Sequence[SampleId], Sequence[str]], Awaitable[Mapping[str, Sequence[Any]]]]


class StepTrainer(ABC):
    """A `Trainer` to derive from: give it `columns` and `learn`.

    The rows of a step are collected as they come, and `learn` is called once, with all of them;
    until then there is nothing that abandoning the step would have to undo. `state` is all that
    the trainer knows; it goes into every bundle, and comes back on a resume.

    Args:
        fetch: reads columns, as `DataPlane.get_samples` does.
        state: to begin with; what msgpack can hold.
        runner: what runs work on disk, and a heavy `learn`.
    """

    columns: ClassVar[Sequence[str]] = ()  #: that `learn` gets
    heavy: ClassVar[bool] = False
    """Whether `learn` goes through the runner. The event loop and its rollouts then go on
    meanwhile, and must not read what `learn` is changing; without, everything waits for it."""

    def __init__(self, fetch: Fetch, state: Any, *, runner: Runner = in_thread) -> None:
        self.state = state  #: weights, optimizer, whatever `learn` goes on from
        self._fetch = fetch
        self._runner = runner
        self._rows: dict[str, list[Any]] = {}  #: of the open step

    @abstractmethod
    def learn(self, columns: Columns) -> Mapping[str, float] | None:
        """Change `state` by the rows of one step, in ordinal order; returns metrics, if any.

        There may be no rows: all of them were masked.
        """

    async def prepare(self, batch: Batch) -> None:
        """Nothing: rows are used as they were generated."""
        await anyio.lowlevel.checkpoint()

    async def begin_step(self, step: int) -> None:
        """No rows are collected yet."""
        await anyio.lowlevel.checkpoint()
        self._rows = {name: [] for name in self.columns}

    async def train_microbatches(self, batch: Batch) -> None:
        """Collect the rows of `batch` that are not masked."""
        fetched = await self._fetch(batch.trained_ids, self.columns)
        for name in self.columns:
            self._rows[name] += fetched[name]

    async def finish_step(self) -> Mapping[str, float]:
        """Have `learn` learn from them; an error of its own may leave `state` half changed."""
        rows, self._rows = self._rows, {}
        if self.heavy:
            return await self._runner(self.learn, rows) or {}
        await anyio.lowlevel.checkpoint()
        return self.learn(rows) or {}

    async def abandon_step(self) -> None:
        """Forget the rows of the open step."""
        await anyio.lowlevel.checkpoint()
        self._rows = {}

    async def save(self, directory: Path) -> None:
        """Write `state` as `state.msgpack`.

        Raises:
            SaveError: msgpack can't hold it, or no start would read so much again.
        """
        try:
            encoded = msgspec.msgpack.encode(self.state)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise SaveError(f"the trainer's state can't be saved as msgpack: {exc}") from exc
        if len(encoded) > MOST_BYTES:
            raise SaveError(
                f"the trainer's state takes {len(encoded)} bytes, more than the {MOST_BYTES} that a"
                " start reads"
            )
        await self._runner(LOCAL.write, directory / STATE, encoded)

    async def finalize_save(self) -> None:
        """Nothing: `save` has written it all."""
        await anyio.lowlevel.checkpoint()

    async def load(self, directory: Path) -> None:
        """Take `state` from there, with the types that msgpack knows: tuples come as lists.

        Raises:
            BundleDamaged: it can't be read.
        """
        try:
            encoded = await self._runner(LOCAL.read, directory / STATE, MOST_BYTES)
            self.state = msgspec.msgpack.decode(encoded, strict=False)
        except (OSError, msgspec.DecodeError, RecursionError) as exc:
            raise BundleDamaged(directory.parent.name, f"policy/{STATE}", str(exc)) from exc
