"""The crash explorer: kills a run at every instant, reboots what is left, and looks whether it
still ends as it should.

A crash takes all memory and leaves what is durable, so the way there need not be walked again
for each one. The run lives once, to its end. Before every step of its event loop (there every
task waits at an await), and before and amid every durable effect, the explorer takes what a
crash at this instant would leave: once for a kill of the process, once for a power cut. Then it
lives on from each of these worlds, and checks it. Instants between which nothing durable
happened leave the same world; it is lived once, and counted for each of them.

    explored = explore(lambda: MemoryWorld(make_run))
    assert not explored.violations, explored.violations

`make_run` builds a `MemoryRun`, maybe with ports of your own. For what it can't hold, write a
`World`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sc_core.testing.schedule import run_alone

Fate = Literal["kill", "power cut"]
Effect = Literal["before", "amid"]
FATES: tuple[Fate, ...] = ("kill", "power cut")
MOST_VIOLATIONS = 100  #: kept by one exploration; all are counted


@dataclass(frozen=True)
class Crash:
    """How a process ends.

    A kill leaves everything written, and a power cut what was made durable, and of the rest what
    `seed` says. Amid an effect, it has happened, and if it writes it may have happened in part.
    """

    fate: Fate
    seed: int
    amid: bool = False


class Watcher(Protocol):
    def __call__(self, where: Effect, effect: str) -> None:
        """Called before each durable effect, and again once it has happened."""


class World(Protocol):
    """What a crash leaves behind, and how a process lives on it."""

    watch: Watcher | None
    """Set by the explorer before `live`, whose effects it then hears of; None: nobody listens."""

    @property
    def restored(self) -> bool:
        """Whether the process that lives here has restored and begun to work."""

    def live(self) -> Coroutine[Any, Any, None]:
        """One process, from its start to the end of the run. Raises what it fails with.

        It must be alone on its event loop, start no thread that the loop does not wait for, and
        depend on nothing but this world: the same world has the same life.
        """

    def after_crash(self, crash: Crash) -> World:
        """The world that a reboot finds if this one crashed now. This one is left as it is."""

    def state(self) -> Hashable:
        """Equal for worlds with the same life and the same checks."""

    def check(self, whole: Any) -> Sequence[str]:
        """What is wrong with this world after its life; `whole` is one that never crashed."""


@dataclass(frozen=True)
class Point:
    """A crash: its number in the life that it ended, and where that was."""

    number: int
    where: str  #: `await`, or the effect
    crash: Crash

    def __str__(self) -> str:
        return f"{self.crash.fate} {'amid' if self.crash.amid else 'before'} {self.where}"


@dataclass(frozen=True)
class Violation:
    points: tuple[Point, ...]  #: the crashes that led to it, each in the life after the one before
    problem: str

    @property
    def path(self) -> str:
        """What `replay` takes."""
        return ".".join(str(point.number) for point in self.points)

    def __str__(self) -> str:
        how = ", then ".join(map(str, self.points)) or "no crash"
        return f"{self.path or '-'}: after {how}: {self.problem}"


@dataclass(frozen=True)
class Exploration:
    """What was explored. Two of them add up."""

    awaits: int = 0  #: crash points before a step of the event loop, nested ones included
    effects: int = 0  #: crash points before and amid durable effects, nested ones included
    nested: int = 0  #: of all these, those in a life after a crash
    lives: int = 0  #: distinct worlds that they left, each lived and checked
    violations: tuple[Violation, ...] = ()
    violation_count: int = 0

    @property
    def points(self) -> int:
        return self.awaits + self.effects

    def __add__(self, other: Exploration) -> Exploration:
        return Exploration(
            self.awaits + other.awaits,
            self.effects + other.effects,
            self.nested + other.nested,
            self.lives + other.lives,
            self.violations + other.violations,
            self.violation_count + other.violation_count,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        numbers = {name: value for name, value in vars(self).items() if name != "violations"}
        return numbers | {"points": self.points, "violations": [str(v) for v in self.violations]}

    def __str__(self) -> str:
        return (
            f"explored {self.points:,} crash points ({self.awaits:,} awaits, {self.effects:,} disk"
            f" effects; {self.nested:,} nested), {self.lives:,} different worlds left by them:"
            f" {self.violation_count} violations"
        )


@dataclass
class _Life:
    """One life, and the worlds that the crashes wanted in it would leave."""

    world: World
    points: tuple[Point, ...] = ()  #: the crashes that led here
    wanted: range | None = range(0)  #: numbers of crash points; None: all
    restore_too: bool = False  #: and all until it has restored
    watched: bool = True
    nest_every: int = 0  #: of the worlds left, each such is wanted twice
    instants: int = 0
    taken: list[Point] = field(default_factory=list)
    left: dict[Hashable, list[tuple[Point, World]]] = field(default_factory=dict)

    def run(self, whole: World | None = None) -> list[str]:
        """Live; returns what is wrong. Without `whole`, this is the life that never crashed."""
        world = self.world
        if self.watched:
            world.watch = lambda where, effect: self._instant(effect, where == "amid")
        before_step = (lambda: self._instant("await", False)) if self.watched else None
        try:
            problems = run_alone(world.live(), before_step)
        except Exception as exc:
            return [f"the run failed: {type(exc).__name__}: {exc}"]
        finally:
            world.watch = None
        return [*problems, *world.check(world if whole is None else whole)]

    def _instant(self, where: str, amid: bool) -> None:
        first = self.instants * len(FATES)
        self.instants += 1
        restoring = self.restore_too and not self.world.restored
        for number, fate in enumerate(FATES, first):
            if restoring or self.wanted is None or number in self.wanted:
                point = Point(number, where, Crash(fate, number, amid))
                self.taken.append(point)
                world = self.world.after_crash(point.crash)
                state = world.state()
                if state not in self.left:
                    self.left[state] = [(point, world)]
                    if self.nest_every and len(self.left) % self.nest_every == 0:
                        self.left[state].append((point, self.world.after_crash(point.crash)))


def count_points(world: World) -> int:
    """How many crash points the run of `world`, which is used up, has.

    Raises:
        AssertionError: even without a crash something is wrong.
    """
    life = _Life(world)
    problems = life.run()
    assert not problems, f"without any crash: {problems[0]}"
    return life.instants * len(FATES)


def explore(
    make: Callable[[], World],
    *,
    points: range | None = None,
    nest_every: int = 0,
    nest_stride: int = 197,
    depth: int = 3,
) -> Exploration:
    """Kill a run at each of its `points`, and check what becomes of it.

    Args:
        make: builds the world before the first start, the same each time.
        points: numbers of the crash points to explore; None: all. A step that is odd takes
            both fates, and instants of all kinds, in turn.
        nest_every: of the worlds that a life leaves, each such is lived in once more and killed
            again, at every point until it has restored and at every `nest_stride`-th. 0: none is.
        depth: how many crashes in a row there are at most.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)  # thousands of short lives: a sixth less time
    try:
        return _explore(make(), points, nest_every, nest_stride, depth)
    finally:
        gc.set_threshold(*thresholds)


def _explore(
    whole: World, points: range | None, nest_every: int, nest_stride: int, depth: int
) -> Exploration:
    first = _Life(whole, wanted=points, nest_every=nest_every)
    violations = [Violation((), problem) for problem in first.run()]
    found = Exploration()
    pending = [first]
    while pending:
        life = pending.pop()
        awaits = sum(point.where == "await" for point in life.taken)
        nested = len(life.taken) if life.points else 0
        found += Exploration(awaits, len(life.taken) - awaits, nested, len(life.left))
        while life.left:
            _, copies = life.left.popitem()
            for number, (point, left) in enumerate(copies):
                after = _Life(left, (*life.points, point), watched=number > 0)
                if number > 0:
                    after.wanted = range(0, sys.maxsize, nest_stride)
                    after.restore_too = True
                    after.nest_every = nest_every if len(after.points) + 1 < depth else 0
                    pending.append(after)
                violations += [Violation(after.points, what) for what in after.run(whole)]
    return found + Exploration(
        violations=tuple(violations[:MOST_VIOLATIONS]), violation_count=len(violations)
    )


def replay(make: Callable[[], World], path: str) -> list[str]:
    """Go through the crashes of one `Violation.path` again; returns what is wrong after them.

    The numbers of the last few points of a life, while its tasks are being cancelled, may vary:
    the order in which a cancel reaches several tasks is that of a set.

    Raises:
        ValueError: there is no such crash point.
    """
    whole = make()
    problems = _Life(whole).run()
    numbers = [int(number) for number in path.split(".")] if path else []
    for watched in (False, True):  # the explorer may have lived in it either way
        life = _Life(_lead_to(make(), numbers), watched=watched)
        problems += [one for one in life.run(whole) if one not in problems]
    return problems


def _lead_to(world: World, numbers: Sequence[int]) -> World:
    """The world that the crashes of these numbers leave, each in the life after the one before."""
    for number in numbers:
        life = _Life(world, wanted=range(number, number + 1))
        life.run()
        if not life.left:
            last = life.instants * len(FATES) - 1
            raise ValueError(f"no crash point {number} in a life that has 0 to {last}")
        (((_, world),),) = life.left.values()
    return world
