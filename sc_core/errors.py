"""Every error sc_core raises on its own account: what is wrong, where, and what to do.

Each keeps its constructor's arguments in `args`, so it survives pickling between processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _some(names: Sequence[str], at_most: int = 3) -> str:
    shown = ", ".join(names[:at_most])
    return f"{shown}, …" if len(names) > at_most else shown


def checkpoints(count: int) -> str:
    """So many of them, in words."""
    return "1 checkpoint" if count == 1 else f"{count} checkpoints"


class ScError(Exception):
    """Root of every error sc_core raises."""


# configuration and use -----------------------------------------------------------------


class CannotShow(ScError):
    """A run has nothing to show, or something is missing that shows it."""


class ConfigError(ScError, ValueError):
    """The configuration asks for something unknown or impossible."""


class RunInUse(ScError, RuntimeError):
    """Another process writes to this run directory."""

    def __init__(self, path: str, holder: str = "") -> None:
        super().__init__(path, holder)
        self.path, self.holder = path, holder

    def __str__(self) -> str:
        by = f" by {self.holder}" if self.holder else ""
        return f"{self.path} is in use{by}; wait for that run to end or choose another directory"


# barrier -------------------------------------------------------------------------------


class BarrierMisuse(ScError, RuntimeError):
    """A section was entered where it could only deadlock; the barrier is as it was before."""


class BarrierTimeout(ScError, TimeoutError):
    """A section was not granted before its deadline; the message names who holds the barrier."""


# places --------------------------------------------------------------------------------


class PlaceAlreadyHeld(ScError, ValueError):
    """Somebody asked for a second place under one name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} already holds a place; a name holds one at most"


class PlaceNotHeld(ScError, KeyError):
    """A place was given back or handed on in a name that holds none."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} holds no place: it was released twice, or never taken"


# calls through ports -------------------------------------------------------------------


class CallTimeout(ScError, TimeoutError):
    """A port call outlived its deadline. Whether it took effect is unknown."""

    def __init__(self, call: str, deadline_s: float) -> None:
        super().__init__(call, deadline_s)
        self.call, self.deadline_s = call, deadline_s

    def __str__(self) -> str:
        return f"{self.call} did not return within {self.deadline_s:g} s"


class CallCancelled(ScError, RuntimeError):
    """A port call ended as if cancelled, and nothing in this run had cancelled it."""


class CallFailed(ScError, RuntimeError):
    """A port call raised an error that is none of sc_core's own, which is the `__cause__`."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(call, reason)
        self.call, self.reason = call, reason

    def __str__(self) -> str:
        return f"{self.call} failed: {self.reason}"


class WrongAnswer(ScError, TypeError):
    """A port call returned something that its Protocol does not allow."""


class DataPlaneError(ScError, RuntimeError):
    """The data plane refused a call or answered it wrongly."""


class MissingRows(DataPlaneError):
    """The data plane holds fewer rows than were asked for."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(tuple(missing))
        self.missing = tuple(missing)

    def __str__(self) -> str:
        return f"{len(self.missing)} rows are not in the data plane: {_some(self.missing)}"


class RowsNotCleared(DataPlaneError):
    """The rows of a failed commit could not be cleared: their ids must not be used again."""

    def __init__(self, sample_ids: Sequence[str], reason: str) -> None:
        super().__init__(tuple(sample_ids), reason)
        self.sample_ids, self.reason = tuple(sample_ids), reason

    def __str__(self) -> str:
        return (
            f"{len(self.sample_ids)} suspect rows could not be cleared "
            f"({_some(self.sample_ids)}): {self.reason}"
        )


class EstimatorError(ScError, ValueError):
    """An advantage estimator returned what can't be trained on."""


class WeightSyncError(ScError, RuntimeError):
    """Engines did not confirm the weight version they were given."""


class EnginesFailed(WeightSyncError):
    """Some engines did not do what they were asked, while the others did."""

    def __init__(self, call: str, failures: Mapping[str, str]) -> None:
        super().__init__(call, dict(failures))
        self.call, self.failures = call, dict(failures)

    def __str__(self) -> str:
        each = (f"{engine}: {self.failures[engine]}" for engine in sorted(self.failures))
        return f"{self.call} failed on {'; '.join(each)}"


class WorkerDied(ScError, RuntimeError):
    """The process behind a port is gone, and what it held with it."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker, self.reason = worker, reason

    def __str__(self) -> str:
        return f"{self.worker} died: {self.reason}"


class RolloutError(ScError, RuntimeError):
    """A sibling could not be generated, through no fault of the prompt. It may be tried again."""


class DataFailure(RolloutError):
    """A sibling could not be generated because of the prompt itself: a retry may not help."""


class PromptDropped(ScError, RuntimeError):
    """A prompt used up its attempts; `on_dropped_prompt` is `fail`, or too many in a row did."""

    def __init__(self, group_id: str, reason: str) -> None:
        super().__init__(group_id, reason)
        self.group_id, self.reason = group_id, reason

    def __str__(self) -> str:
        return f"group {self.group_id} used up its attempts: {self.reason}"


class TooManyDropped(PromptDropped):
    """A prompt used up its attempts, and no more may be dropped than were."""

    def __init__(self, group_id: str, reason: str, dropped: str, limit: str) -> None:
        super().__init__(group_id, reason)
        self.args = (group_id, reason, dropped, limit)
        self.dropped, self.limit = dropped, limit

    def __str__(self) -> str:
        return (
            f"group {self.group_id} used up its attempts, after {self.dropped};"
            f" async_rl.rollout_failure.{self.limit}: {self.reason}"
        )


class TooManyFiltered(ScError, RuntimeError):
    """The filter rejected more groups in a row than it may: it keeps nothing."""

    def __init__(self, group_id: str, in_a_row: int) -> None:
        super().__init__(group_id, in_a_row)
        self.group_id, self.in_a_row = group_id, in_a_row

    def __str__(self) -> str:
        return (
            f"group_filter.keep rejects group {self.group_id}, after {self.in_a_row} groups with"
            " none committed since: it keeps nothing. Look at the rewards, or raise"
            f" async_rl.max_consecutive_filtered_groups, which is {self.in_a_row}"
        )


class EndOfPrompts(ScError):
    """A prompt source has nothing more to give, in this epoch or any other."""


class StallError(ScError, TimeoutError):
    """Nothing that counts as progress happened for too long; the message is a report."""

    @property
    def cause(self) -> str:
        """The first line of the report: what did not happen, for how long, and why."""
        return str(self).partition("\n")[0]


class StopTimeout(StallError):
    """A stop was asked for, and the run had not ended in time; the message is a report."""


class Conservation(ScError, AssertionError):
    """An ordinal is in no state, or in two; or the index and the ledger disagree."""


# save and restore ----------------------------------------------------------------------


class SaveError(ScError, RuntimeError):
    """A bundle could not be written or published; the ones before it are untouched."""


class RestoreError(ScError, ValueError):
    """What is on disk or in the store cannot become a running controller."""


class BundleDamaged(RestoreError):
    """A file of the bundle is missing, altered or unreadable. An older bundle may serve."""

    def __init__(self, bundle: str, file: str, reason: str) -> None:
        super().__init__(bundle, file, reason)
        self.bundle, self.file, self.reason = bundle, file, reason

    def __str__(self) -> str:
        return f"{self.bundle}: {self.file}: {self.reason}"


class BundleInconsistent(RestoreError):
    """Every file is intact, yet two of them contradict each other: nothing may be guessed."""


class NoValidBundle(RestoreError):
    """Checkpoints exist and none can be used."""

    def __init__(self, directory: str, reasons: Sequence[str]) -> None:
        super().__init__(directory, tuple(reasons))
        self.directory, self.reasons = directory, tuple(reasons)

    def __str__(self) -> str:
        return (
            f"{self.directory} holds {checkpoints(len(self.reasons))} and none is valid: "
            f"{'; '.join(self.reasons)}. Move them away to start afresh"
        )


class InventoryMismatch(RestoreError):
    """The store's rows are not the rows of the cut."""

    def __init__(self, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        super().__init__(tuple(missing), tuple(unexpected))
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)

    def __str__(self) -> str:
        return (
            f"the store and the cut disagree: {len(self.missing)} rows missing"
            f" ({_some(self.missing)}), {len(self.unexpected)} unexpected"
            f" ({_some(self.unexpected)})"
        )


class ConfigChanged(RestoreError):
    """The run was started with a setting that its bundles cannot follow."""


class RestoreOrderError(ScError, RuntimeError):
    """A step of the restore was taken before the one it depends on."""


# between tasks and processes -----------------------------------------------------------


def root_cause(error: BaseException) -> BaseException:
    """The first real error inside nested exception groups; cancellations come last."""
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda inner: not _holds_exception(inner))
    return error


def _holds_exception(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_holds_exception(inner) for inner in error.exceptions)
    return isinstance(error, Exception)
