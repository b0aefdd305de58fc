"""The likeliest reason why a run does not go on, in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sc_core.barrier import CheckpointBarrier
from sc_core.records import LedgerRecord
from sc_core.state import DRAINED, EVALUATED, GROUPS_READY, PUBLISHED, RunState
from sc_core.waits import Wait, seconds

WATCHING = frozenset({"watchdog", "stop in time", "end in time", "failure"})
"""Tasks that look on: no news in a report."""
_STANDING = WATCHING | {"rollout pump", "finaliser", "time budget"}
"""Tasks beside the train pump for all of the run; any other child of it works for it."""


def likely_cause(
    state: RunState,
    barrier: CheckpointBarrier,
    waits: Sequence[Wait],
    *,
    at_least: int,
    quiet_s: float,
    since: Mapping[str, int],
) -> str:
    """Follow who waits for whom, from the train pump on.

    `waits` start with its task; `at_least` is how many groups it trains on at once, and `since`
    has the ledger's counters over the last `quiet_s` seconds, without progress.
    """
    return _Case(state, barrier, waits, at_least, quiet_s, since).cause()


class _Case:
    def __init__(
        self,
        state: RunState,
        barrier: CheckpointBarrier,
        waits: Sequence[Wait],
        at_least: int,
        quiet_s: float,
        since: Mapping[str, int],
    ) -> None:
        self._state = state
        self._barrier = barrier
        self._waits = waits
        self._at_least = at_least
        self._quiet_s = quiet_s
        self._since = since

    def cause(self) -> str:
        if not self._waits:
            return (
                "no task of the run is in sight: it has not begun, it has ended, or this was asked"
                " outside the tasks of its event loop"
            )
        pump, gate = self._waits[0], self._state.gate_closed_for
        if pump.what == GROUPS_READY:
            return self._no_groups()
        if pump.what == PUBLISHED:
            under_way = next((w for w in self._waits if w.task == "finaliser"), pump)
            return f"the bundle before is not published yet: {_overdue(under_way)}"
        if pump.what == EVALUATED:
            return self._no_results()
        closed = "" if gate is None else f"the weight gate is closed for {gate}: "
        if pump.what == DRAINED:
            requests = self._state.requests.value
            oldest = self._oldest(self._attempts())
            return f"{closed}it waits for all rollouts, and {requests} are under way; {oldest}"
        if pump.kind == "barrier":
            return f"{closed}{pump.what}, is not free: {self._holder()}"
        if pump.kind != "call":  # it waits for a child of its own
            pump = max(self._own_children() or self._waits, key=_age)
        return f"{closed}{_overdue(pump)}"

    # the train pump waits for groups ----------------------------------------------------

    def _no_groups(self) -> str:
        state, ledger = self._state, self._state.ledger
        if state.gate_closed_for is not None:
            return f"the weight gate is closed for {state.gate_closed_for}"
        by_target, version = state.sampler.stamps_targets, ledger.weight_version
        lacking = [
            record
            for record in ledger.records()
            if record.state in ("waiting", "in_flight")
            and (not by_target or record.target_step == version)
        ]
        ready = ledger.index.ready_count
        if ready and not lacking if by_target else ready >= self._at_least:
            return self._none_selectable(by_target)
        of_step = ""
        if by_target:
            of_step = f" for target {version}"
            ready = sum(1 for _ in ledger.index.ready_of_target(version))
        return self._nothing_comes(
            lacking, f"groups ready{of_step}: {ready}, under way: {len(lacking)}; "
        )

    def _none_selectable(self, by_target: bool) -> str:
        state, ledger = self._state, self._state.ledger
        ready = ledger.index.ready_in_commit_order()
        if by_target:
            wants = f"wants target {ledger.weight_version}, ready targets are"
            counts = Counter(group.target_step for group in ready)
        else:
            wants = f"is at weight version {ledger.weight_version}, ready start versions are"
            counts = Counter(group.start_weight_version for group in ready)
        listed = ", ".join(f"{key}: {count}" for key, count in counts.items())
        text = (
            f"groups committed: {counts.total()}, and none is selectable: sampler"
            f" {state.sampler.name} {wants} {{{listed}}}"
        )
        overdue = [wait for wait in self._attempts() if _age(wait) >= self._quiet_s / 2]
        if overdue:
            return f"{text}; it may wait for {self._oldest(overdue)}"
        return f"{text}; {self._nothing_goes_out()}" if by_target else text

    def _nothing_comes(self, lacking: Sequence[LedgerRecord], so_far: str) -> str:
        """Fewer groups are ready than are needed: look at those who should make them."""
        state, ledger, since = self._state, self._state.ledger, self._since
        attempts = self._attempts({record.group_id for record in lacking})
        ended = "the source has ended; " if ledger.exhausted else ""
        if any(wait.kind in ("rollout", "call") and self._is_old(wait) for wait in attempts):
            return ended + so_far + self._oldest(attempts)
        if any(wait.kind == "barrier" for wait in attempts) and self._barrier.statistics().holders:
            return f"{ended}{so_far}they wait for the barrier: {self._holder()}"
        failed = since.get("infra_failures", 0) + since.get("data_failures", 0)
        reasons = [*state.last_drops, *state.last_failures]
        if (failed or since.get("dropped")) and not since.get("committed"):
            lost = f"{since.get('dropped', 0)} prompts dropped"
            return f"{ended}every attempt fails: {failed} to be repeated, {lost}; {reasons[-1]}"
        if since.get("dropped"):
            return (
                f"{ended}{since.get('committed', 0)} groups were committed and"
                f" {since['dropped']} dropped, so no step is full; {state.last_drops[-1]}"
            )
        if lacking and ledger.in_flight_count:
            return ended + so_far + self._oldest(attempts)
        return ended + self._nothing_goes_out()

    def _nothing_goes_out(self) -> str:
        state, ledger = self._state, self._state.ledger
        pull = next((wait for wait in self._waits if wait.task == "prompts"), None)
        if pull is not None and pull.kind == "call":
            return f"the source gives nothing: {_overdue(pull)}"
        back_off = next((wait for wait in self._waits if wait.kind == "back-off"), None)
        if back_off is not None:
            return f"group {back_off.group_id} waits {back_off.what}"
        if not state.places.free:
            held = f"all {state.places.capacity} places are held"
            return f"no place is free for another prompt: {held}"
        if ledger.exhausted and not ledger.waiting_count:
            return "no prompt is left"
        if state.sampler.admit(ledger) is None:
            return f"sampler {state.sampler.name} admits no prompt beside {ledger.live_count} live"
        return f"{ledger.waiting_count} prompts wait, and nothing that is known holds them back"

    # the train pump waits for an evaluation ---------------------------------------------

    def _no_results(self) -> str:
        attempts = self._attempts()
        held_out = [wait for wait in attempts if (wait.group_id or "").startswith("val")]
        if held_out:
            return f"an evaluation is under way: {self._oldest(held_out)}"
        others = f"groups in flight: {self._state.ledger.in_flight_count}"
        return f"an evaluation waits for a slot; {others}; {self._oldest(attempts)}"

    def _own_children(self) -> list[Wait]:
        """The tasks below the train pump that work for it, and theirs."""
        found, counts = [], False
        for wait in self._waits[1:]:
            if wait.depth == 1:
                counts = wait.task not in _STANDING
            if counts:
                found.append(wait)
        return found

    # who waits --------------------------------------------------------------------------

    def _attempts(self, groups: set[str] | None = None) -> list[Wait]:
        """Attempts and their siblings that are at work; of `groups` alone, if any of them is."""
        found = [wait for wait in self._waits if wait.depth and wait.group_id is not None]
        named = [wait for wait in found if groups is not None and wait.group_id in groups]
        return named or found

    def _oldest(self, waits: Sequence[Wait]) -> str:
        at_work = [wait for wait in waits if wait.kind in ("rollout", "call")]
        if not at_work:
            return "none of them is at work"
        oldest = max(at_work, key=_age)
        whose = "" if oldest.kind == "rollout" else f" of group {oldest.group_id}"
        return _overdue(oldest, whose)

    def _is_old(self, wait: Wait) -> bool:
        return _age(wait) >= self._quiet_s / 2

    def _holder(self) -> str:
        """Who holds the barrier for longest, and what it waits for meanwhile."""
        now = self._barrier.statistics()
        if not now.holders:
            return "nobody holds it"
        held = now.holders[0]
        calls = [w for w in self._waits if w.kind == "call" and w.what.startswith("data_plane.")]
        inside = [w for w in calls if w.group_id and held.label.endswith(w.group_id)] or calls
        text = f"held by {held}"
        return f"{text}, in {max(inside, key=_age)}" if inside else text


def _age(wait: Wait) -> float:
    return wait.age_s or 0.0


def _overdue(wait: Wait, whose: str = "") -> str:
    if wait.kind not in ("call", "rollout"):
        return f"{wait.task} waits for {wait.what}, in {wait.where}"
    bound = "" if wait.at_most_s is None else f" (deadline {seconds(wait.at_most_s)})"
    return f"{wait.what}{whose} has not returned for {seconds(_age(wait))}{bound}"
