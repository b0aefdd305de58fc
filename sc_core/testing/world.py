"""`MemoryWorld`: what a `MemoryRun` leaves behind, for the crash explorer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from sc_core.audit import AuditReport, audit
from sc_core.bundle import BundleStore
from sc_core.controller import ControllerStatistics, RunResult
from sc_core.errors import RestoreError
from sc_core.events import Event
from sc_core.manifest import bundle_name, parse_name
from sc_core.testing.crash import Crash, Watcher
from sc_core.testing.run import MemoryRun
from sc_core.testing.schedule import Stepped
from sc_core.verify import VerifiedBundle, candidates, verify

Tree = tuple[tuple[str, bytes], ...]
Intact = VerifiedBundle | RestoreError


class MemoryWorld:
    """A `World` of the disk and the event log of a `MemoryRun`.

    `make` builds the run of a new process, always the same: what its ports do may depend on
    prompts and attempts, not on what an earlier process knew. While the explorer watches, each
    effect of blocking work takes `effect_s` virtual seconds, beside which everything else goes
    on; otherwise none.

    After a life it checks that

    * the run came to its last step, and the conservation law holds, in the event log over all
      lives, against the bundles, and in memory;
    * every step trained its prompts, each once, and the same ones in the same order to the same
      weights as the run that never crashed, if `bit_equal`;
    * no place, barrier section or row is left over;
    * it went on from the newest bundle, which is as it was, byte for byte;
    * every bundle that a kill found published, and after a power cut every one that had been
      reported as published, was there and intact.
    """

    def __init__(
        self,
        make: Callable[[], MemoryRun],
        *,
        bit_equal: bool = False,
        effect_s: float = 0.05,
    ) -> None:
        self.watch: Watcher | None = None
        self.restored = False
        self.bit_equal = bit_equal
        self.run = make()
        self.result: RunResult | None = None
        self._at_the_end: ControllerStatistics | None = None
        self._make = make
        self._effect_s = effect_s
        self._life = 1
        self._promised: dict[int, int] = {}  #: step, and the seq of the cut reported as published
        self._expected: frozenset[int] = frozenset()  #: steps of bundles that must be there
        self._problems: list[str] = []
        self._origin: VerifiedBundle | None = None
        self._origin_tree: Tree = ()
        self._torn: Path | None = None  #: what is being written
        self._appended_from = 0  #: events before the append under way
        self._trained: list[tuple[int, int]] = []  #: step and ordinal, over the effective history
        self._known: dict[tuple[str, Tree], Intact] = {}  #: verified once: contents decide
        self.run.log.incarnation = "life 1"

    # World ----------------------------------------------------------------------------

    async def live(self) -> None:
        run = self.run
        if self.watch is not None:
            self._listen(self.watch)
        bundles = BundleStore(run.directory, disk=run.disk, now=lambda: 0.0)
        bundles.open()
        try:
            self._look_around()
            run.controller = await run.open(bundles)
            self.result = await run.controller.run()
            self._at_the_end = run.controller.statistics()  # here, where its clock goes
        finally:
            bundles.close()

    def after_crash(self, crash: Crash) -> MemoryWorld:
        rng = random.Random(crash.seed)
        log, disk = self.run.log, self.run.disk
        left = MemoryWorld(self._make, bit_equal=self.bit_equal, effect_s=self._effect_s)
        left._known = self._known
        left._life = self._life + 1
        appending = crash.amid and self._appended_from < len(log.events)
        name = f"life {left._life}"
        visible = frozenset(self._candidates())
        if crash.fate == "kill":
            torn = self._torn if crash.amid else None
            left.run.disk = disk.after_kill(torn=torn, seed=crash.seed)
            keep = rng.randint(self._appended_from, len(log.events)) if appending else None
            left.run.log = log.after_crash(name, keep=keep)
            left._expected = visible
        else:
            left.run.disk = disk.after_crash(crash.seed)
            keep = rng.randint(log.synced, len(log.events))
            left.run.log = log.after_crash(name, lose_unsynced=True, keep=keep)
        left._promised = {s: seq for s, seq in self._promised.items() if s in visible}
        if self._promised:
            newest = max(self._promised)
            left._promised[newest] = self._promised[newest]
        left.run.start_life()
        return left

    def state(self) -> Hashable:
        events, synced = self.run.log.events, self.run.log.synced
        last = (events[-1].incarnation, events[-1].seq) if events else None
        promised = tuple(sorted(self._promised.items()))
        return self.run.disk.state(), last, synced, promised, self._expected

    def check(self, whole: MemoryWorld) -> Sequence[str]:
        """Described above; what is wrong, as sentences."""
        problems = list(self._problems)
        intact = self._intact(problems)
        cuts = [(bundle.path.name, bundle.cut) for bundle in intact.values()]
        report = audit(self.run.log.events, cuts)
        if not report.ok:
            problems.append(str(report))
        problems += self._check_history(report, whole)
        problems += self._check_memory()
        problems += self._check_bundles(intact)
        return problems

    # before a life --------------------------------------------------------------------

    def _listen(self, watch: Watcher) -> None:
        stepped = Stepped(self._effect_s)
        disk, log = self.run.disk, self.run.log
        self.run.runner = stepped
        self._appended_from = len(log.events)

        def before(effect: str, path: Path) -> None:
            stepped.pause()
            watch("before", f"{effect} {path.name}")

        def done(effect: str, path: Path) -> None:
            self._torn = path if effect == "write" else None
            watch("amid", f"{effect} {path.name}")
            self._torn = None

        def before_log(effect: str) -> None:
            if effect == "sync":
                stepped.pause()
            watch("before", f"{effect} of the event log")
            self._appended_from = len(log.events)

        def done_log(effect: str) -> None:
            self._notice(log.events[self._appended_from :])
            watch("amid", f"{effect} of the event log")
            self._appended_from = len(log.events)

        disk.hook, disk.done, log.hook, log.done = before, done, before_log, done_log

    def _notice(self, appended: Sequence[Event]) -> None:
        for event in appended:
            if event.event == "weight_sync":
                self.restored = True
            if event.event == "checkpoint" and event.step is not None:
                bundle = self._verify(self.run.directory / bundle_name(event.step))
                if isinstance(bundle, VerifiedBundle):
                    self._promised[bundle.step] = bundle.cut.event_seq

    def _look_around(self) -> None:
        """What the reboot found, before anything uses it."""
        intact = self._intact(self._problems)
        for step in sorted(self._expected - intact.keys()):
            self._problems.append(f"step_{step} was there when the process was killed, and is gone")
        for step, seq in self._promised.items():
            bundle = intact.get(step)
            if bundle is None or bundle.cut.event_seq < seq:
                self._problems.append(f"step_{step} was reported as published, and is gone")
        if intact:
            self._origin = intact[max(intact)]
            self._origin_tree = self._tree(self._origin.path)

    def _intact(self, problems: list[str]) -> dict[int, VerifiedBundle]:
        """The bundles by step; of those that are damaged, `problems` hears."""
        intact: dict[int, VerifiedBundle] = {}
        for step, path in self._candidates().items():
            found = self._verify(path)
            if isinstance(found, RestoreError):
                problems.append(f"{path.name} is damaged: {found}")
            else:
                intact[step] = found
        return intact

    def _verify(self, path: Path) -> Intact:
        key = path.name, self._tree(path)
        if key not in self._known:
            try:
                self._known[key] = verify(path, self.run.disk)
            except RestoreError as exc:
                self._known[key] = exc
        return self._known[key]

    def _candidates(self) -> dict[int, Path]:
        """Bundles by step, a damaged one or one moved aside too."""
        found: dict[int, Path] = {}
        for path in candidates(self.run.directory, self.run.disk):
            _, step = parse_name(path.name) or ("", -1)
            found[step] = path
        return found

    def _tree(self, path: Path, inside: str = "") -> Tree:
        disk = self.run.disk
        found: list[tuple[str, bytes]] = []
        for name, kind in disk.entries(path).items():
            if kind == "dir":
                found += self._tree(path / name, f"{inside}{name}/")
            else:
                found.append((f"{inside}{name}", disk.read(path / name, 1 << 40)))
        return tuple(found)

    # after a life ---------------------------------------------------------------------

    def _history(self, report: AuditReport) -> list[tuple[int, int]]:
        """Step and ordinal of all that was trained and not undone, in order."""
        until = {life.incarnation: life.last_seq for life in report.history}
        return [
            (event.step or 0, event.ordinal or 0)
            for event in self.run.log.events
            if event.event == "trained" and event.seq <= until.get(event.incarnation, -1)
        ]

    def _check_history(self, report: AuditReport, whole: MemoryWorld) -> list[str]:
        grpo = self.run.config.grpo
        problems = []
        if self.result is None or self.result.step != grpo.max_num_steps:
            problems.append(f"the run ended as {self.result}")
        trained = self._trained = self._history(report)
        steps = [step for step, _ in trained]
        each, short = grpo.num_prompts_per_step, self._short_steps(report)
        made = range(1, grpo.max_num_steps + 1)
        if steps != [step for step in made for _ in range(each - short[step - 1])]:
            problems.append(f"steps are trained out of order or not whole: {steps}")
        if len({ordinal for _, ordinal in trained}) != len(trained):
            problems.append(f"a prompt was trained twice: {trained}")
        if self.bit_equal and self is not whole:
            if trained != whole._trained:
                problems.append(f"not what the uninterrupted run trained: {trained}")
            if self.run.trainer.weights != whole.run.trainer.weights:
                problems.append("the weights are not those of the uninterrupted run")
        return problems

    def _short_steps(self, report: AuditReport) -> Counter[int | None]:
        """Groups that steps go without, by the weight version they start from."""
        last = {life.incarnation: life.last_seq for life in report.history}
        return Counter(
            event.step
            for event in self.run.log.events
            if event.event == "dropped" and event.seq <= last.get(event.incarnation, -1)
        )

    def _check_memory(self) -> list[str]:
        controller = self.run.controller
        now = self._at_the_end
        if controller is None or now is None:
            return ["no controller was built, or it did not end"]
        problems = []
        try:
            controller.audit()
        except Exception as exc:
            problems.append(f"in memory: {exc}")
        records = controller.ledger_records()
        if now.barrier.holders or now.barrier.waiters:
            problems.append(f"the barrier is not free: {now.barrier}")
        if now.places_held != sum(record.admitted for record in records):
            problems.append(f"{now.places_held} places are held for {records}")
        if odd := sorted((self.run.store.rows.keys() ^ controller.rows()) - controller.suspects()):
            problems.append(f"rows are left over or missing: {odd}")
        return problems

    def _check_bundles(self, intact: dict[int, VerifiedBundle]) -> list[str]:
        last = self.run.config.grpo.max_num_steps
        problems = [] if last in intact else [f"step_{last} was not published"]
        life = [each for each in self.run.log.events if each.incarnation == f"life {self._life}"]
        digest = life[0].digest if life else "?"
        origin = self._origin
        if digest != (origin and origin.digest):
            problems.append(f"it went on from {digest}, not from the newest, {origin}")
        if origin is not None and not any(
            event.event == "checkpoint" and event.step == origin.step for event in life
        ):
            try:
                same = self._tree(origin.path) == self._origin_tree
            except OSError:
                same = False
            if not same:
                problems.append(f"{origin.path.name} was resumed from, and is not what it was")
        return problems
