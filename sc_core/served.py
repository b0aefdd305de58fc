"""Who served what: no group has a sibling from weights that its engine had not confirmed.

An engine confirms a version in a weight sync, or by itself when it joins between two; what its
process had confirmed counts no more once it is put out or restarted, nor in a later incarnation.
A sibling may be finished, and its group committed, a moment before the log has the confirmation:
in a sync one engine goes on while others still load. So a claim of the newest version waits for
what the log says next of that engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from sc_core.events import Event

_KEPT = 64  #: spans of an engine, before those that no group can need any more are looked for


class EngineAudit(msgspec.Struct, kw_only=True):
    """What the effective history says of one engine."""

    groups: int = 0  #: committed ones with a sibling of it
    confirmed: int = 0  #: times that it confirmed a version
    joined: int = 0  #: of them between two syncs: it was new, restarted, or back
    unconfirmed: int = 0  #: groups that it served with a version that it had not confirmed


class _Span(msgspec.Struct):
    """The time in which an engine had a version confirmed, in sequence numbers of events."""

    version: int
    until: int | None = None  #: None: it still has


class _Claim(msgspec.Struct):
    event: Event
    version: int


class Served:
    """Looks at all events that name engines.

    Args:
        wrong: hears of each violation, with the event of the commit.
        oldest: the sequence number of the oldest dispatch of a group that is not committed.
    """

    def __init__(self, wrong: Callable[[Event, str], None], oldest: Callable[[], int]) -> None:
        self.engines: dict[str, EngineAudit] = {}
        self._wrong = wrong
        self._oldest = oldest
        self._spans: dict[str, list[_Span]] = {}
        self._claims: dict[str, list[_Claim]] = {}
        self._away: set[str] = set()  #: quarantined
        self._synced: tuple[str, ...] = ()  #: at the last sync of this incarnation
        self._version = self._syncing = 0  #: of the last sync; of the last step
        self._keeps_siblings = False
        self._earlier: dict[str, set[int]] = {}
        """Versions that engines confirmed in the lives before this one, for the siblings that a
        resume has kept."""

    def enter(self, event: Event) -> None:
        """Take an event of the run, not of a prompt."""
        if event.event in ("run_started", "resumed"):
            self._starts(event)
        elif event.event == "trained":
            self._syncing = event.weight_version or 0
        elif event.event == "weight_sync":
            self._sync(event)
        elif event.event == "engine" and event.engines:
            self._changes(event, event.engines[0])

    def commit(self, event: Event, *, dispatched: int, kept: bool) -> None:
        """A group whose attempt was dispatched at that sequence number.

        `kept`: its prompt was live in an earlier incarnation.
        """
        since = 0 if self._keeps_siblings else dispatched
        for engine, versions in (event.served or {}).items():
            self._of(engine).groups += 1
            for version in versions:
                start = event.weight_version
                if start is not None and version < start:
                    self._of(engine).unconfirmed += 1
                    self._wrong(
                        event,
                        f"{_who(event, engine, version)}, and its start version is {start}",
                    )
                elif not self._had(engine, version, since) and not (
                    kept and self._keeps_siblings and version in self._earlier.get(engine, ())
                ):
                    self._not_yet(event, engine, version)

    # the run --------------------------------------------------------------------------

    def _starts(self, event: Event) -> None:
        for engine, spans in self._spans.items():
            self._earlier.setdefault(engine, set()).update(span.version for span in spans)
        self._spans, self._claims = {}, {}
        self._synced, self._away = (), set()
        self._version = -1
        self._syncing = event.weight_version or 0
        settings: Mapping[str, object] = event.settings or {}
        self._keeps_siblings = settings.get("granularity") == "sibling"

    def _sync(self, event: Event) -> None:
        if event.engines is not None:
            self._synced = event.engines
        version = self._version = event.weight_version or 0
        for engine in self._synced:
            self._confirms(engine, version, event.seq)
        for engine in self._spans.keys() - set(self._synced):
            self._ends(engine, event.seq)
        for engine in self._claims.keys() - self._away:
            self._settle(engine)

    def _changes(self, event: Event, engine: str) -> None:
        state = (event.reason or "").partition(":")[0]
        if event.weight_version is not None:
            self._confirms(engine, event.weight_version, event.seq)
            self._of(engine).joined += state == "serving"
        if state == "quarantined":
            self._away.add(engine)
        else:
            self._away.discard(engine)
        if state != "serving":
            self._ends(engine, event.seq)
        if state == "serving":
            self._settle(engine)

    # an engine ------------------------------------------------------------------------

    def _of(self, engine: str) -> EngineAudit:
        return self.engines.setdefault(engine, EngineAudit())

    def _confirms(self, engine: str, version: int, seq: int) -> None:
        self._of(engine).confirmed += 1
        self._ends(engine, seq)
        spans = self._spans.setdefault(engine, [])
        if len(spans) >= _KEPT and len(spans) % _KEPT == 0:
            oldest = self._oldest()
            spans[:] = [span for span in spans if span.until is None or span.until > oldest]
        spans.append(_Span(version))
        waiting = self._claims.get(engine)
        if waiting:
            waiting[:] = [claim for claim in waiting if claim.version != version]

    def _ends(self, engine: str, seq: int) -> None:
        spans = self._spans.get(engine)
        if spans and spans[-1].until is None:
            spans[-1].until = seq

    def _had(self, engine: str, version: int, since: int) -> bool:
        return any(
            span.version == version and (span.until is None or span.until > since)
            for span in reversed(self._spans.get(engine, ()))
        )

    def _not_yet(self, event: Event, engine: str, version: int) -> None:
        """A claim that the log may still bear out, or a violation."""
        in_sync = version == self._syncing > self._version
        coming_back = engine in self._away and version == self._version
        if in_sync or coming_back:
            self._claims.setdefault(engine, []).append(_Claim(event, version))
        else:
            self._accuse(event, engine, version)

    def _settle(self, engine: str) -> None:
        for claim in self._claims.pop(engine, ()):
            self._accuse(claim.event, engine, claim.version)

    def _accuse(self, event: Event, engine: str, version: int) -> None:
        spans = self._spans.get(engine)
        has = "nothing in this incarnation"
        if spans:
            has = f"version {spans[-1].version} last"
            if spans[-1].until is not None:
                has += f", and lost it at seq {spans[-1].until}"
        self._of(engine).unconfirmed += 1
        self._wrong(event, f"{_who(event, engine, version)}, which it had not confirmed: {has}")


def _who(event: Event, engine: str, version: int) -> str:
    return f"group {event.group_id} was served by {engine} at version {version}"
