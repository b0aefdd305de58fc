"""The run on a terminal: a panel at its bottom, and lines that stay, above it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sc_ray.progress import engines_away, let_go

_BARS = "▁▂▃▄▅▆▇█"
_BARS_ASCII = "_.-=+*#%"
_REWARDS = 60  #: steps in the sparkline, at most
_PACE = 20  #: steps whose mean tells the time that is left
_SPARE_COLUMNS = 3  #: beside the panel, so that the terminal's `^C` wraps no line of it
_NARROW = 50  #: columns below which neither bar nor sparkline has room
_QUIET_S = 60.0
"""Longer without progress is worth a word."""

Cell = tuple[str, str, str]
"""What is told, its value, and the value's style."""


class LiveConsole:
    """`say` leaves a line; `show` changes the panel, which is there until `rest`.

    The cursor stays visible, so no death of this process leaves a terminal without one. Once the
    terminal is gone, nothing is written any more.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
        console: RichConsole | None = None,
    ) -> None:
        self._console = console or _Terminal(file=stream)
        self._clock = clock
        self._live: Live | None = None
        self._gone = False
        self._rewards: deque[float] = deque(maxlen=_REWARDS)
        self._step_s: deque[float] = deque(maxlen=_PACE)
        self._step: int | None = None
        self._bundle: str | None = None  #: the newest
        self._saved_at: float | None = None  #: None: before anything was shown
        self._shown = False

    def say(self, line: str) -> None:
        with self._written():
            self._console.print(Text(line), soft_wrap=True)

    def show(self, status: Mapping[str, Any]) -> None:
        """Bring the panel up to date with what `status` of the actor says, and `max_steps`."""
        self._note(status)
        with self._written():
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            self._live.update(_Fitted(self._panel(status)), refresh=True)

    def rest(self) -> None:
        """Take the panel away; the next `show` brings it back."""
        live, self._live = self._live, None
        if live is not None:
            with self._written():
                live.stop()

    def leave(self) -> None:
        """Go to a line of its own, at once, from a signal handler: the process is about to end."""
        if self._live is not None and not self._gone:
            try:
                os.write(self._console.file.fileno(), b"\n")
            except (OSError, ValueError):  # no terminal, or not any more
                self._gone = True

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # the terminal is gone; the run goes on
            self._gone = self._console.quiet = True
            let_go(self._console.file)

    def _note(self, status: Mapping[str, Any]) -> None:
        last = status.get("last_metrics") or {}
        if "timing/train/total_step_time" in last and last["step"] != self._step:
            self._step = last["step"]
            self._step_s.append(last["timing/train/total_step_time"])
            if isinstance(last.get("train/reward"), int | float):
                self._rewards.append(last["train/reward"])
        newest = next(iter(status.get("bundles") or ()), None)
        if newest != self._bundle:
            self._bundle = newest
            self._saved_at = self._clock() if self._shown else None
        self._shown = True

    def _panel(self, status: Mapping[str, Any]) -> Callable[[ConsoleOptions], RenderableType]:
        cells = [*_cells(status), *self._checkpoint()]
        notes = [Text(note, "yellow", overflow="fold") for note in _notes(status)]
        progress = self._progress(status)
        rewards = list(self._rewards)

        def panel(options: ConsoleOptions) -> RenderableType:
            width = max(10, options.max_width - _SPARE_COLUMNS - 4)
            lines = [*progress(width), *_packed(cells, width), *notes]
            if rewards:
                bars = _BARS_ASCII if options.ascii_only else _BARS
                lines.insert(len(progress(width)), _rewards(rewards, width, bars))
            shape = box.ASCII if options.ascii_only else box.ROUNDED
            return Panel(Group(*lines), box=shape, width=width + 4)

        return panel

    def _progress(self, status: Mapping[str, Any]) -> Callable[[int], list[RenderableType]]:
        step, most = status.get("step", 0), status.get("max_steps", 0)
        head, tail = Text(f"step {step}/{most}", "bold"), Text()
        if self._step_s:
            pace_s = sum(self._step_s) / len(self._step_s)
            tail = Text(f"{pace_s:.2f} s/step  {_clock(pace_s * (most - step))} left")

        def progress(width: int) -> list[RenderableType]:
            if width < _NARROW:
                return [head, tail] if tail else [head]
            room = width - head.cell_len - tail.cell_len - 4
            row = Table.grid(padding=(0, 2, 0, 0))
            row.add_row(head, ProgressBar(total=max(1, most), completed=step, width=room), tail)
            return [row]

        return progress

    def _checkpoint(self) -> Iterator[Cell]:
        if self._bundle is not None:
            at = self._saved_at
            age = "" if at is None else f", {_clock(self._clock() - at)} ago"
            yield "checkpoint", f"{self._bundle}{age}", ""


class _Terminal(RichConsole):
    def show_cursor(self, show: bool = True) -> bool:
        return False

    def on_broken_pipe(self) -> None:
        """Rich would end the process."""
        self.quiet = True


class _Fitted:
    """Made anew for the width that there is."""

    def __init__(self, panel: Callable[[ConsoleOptions], RenderableType]) -> None:
        self._panel = panel

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        yield self._panel(options)


def _cells(status: Mapping[str, Any]) -> Iterator[Cell]:
    last = status.get("last_metrics") or {}
    val = (status.get("last_evaluation") or {}).get("val/reward")
    if val is not None:
        yield "val", f"{val:.3f}", ""
    if "train/staleness_versions_mean" in last:
        mean, most = last["train/staleness_versions_mean"], last["train/staleness_versions_max"]
        yield "staleness", f"{mean:.2f} (max {most})", ""
    if "places_held" in status:
        yield "places", f"{status['places_held']}/{status['places_capacity']}", ""
        yield "in flight", str(status["in_flight"]), ""
        yield "ready", str(status["committed"]), ""
    if status.get("evaluating"):
        yield "evaluating", str(status["evaluating"]), ""
    serving, away = len(status.get("engines") or ()), len(engines_away(status))
    if serving or away:
        yield "engines", f"{serving}/{serving + away}", "bold red" if away else ""
    wait_s = last.get("timing/rollout_checkpoint/barrier_wait_seconds")
    if wait_s is not None:
        yield "barrier wait", f"{1000 * wait_s:.0f} ms", ""


def _notes(status: Mapping[str, Any]) -> Iterator[str]:
    """What is out of the ordinary now."""
    closed = status.get("gate_closed_for")
    if closed:
        yield f"no request leaves: {closed}"
    barrier = status.get("barrier") or {}
    if barrier.get("checkpointing"):
        yield f"a checkpoint holds the barrier; {barrier.get('waiting', 0)} wait"
    if status.get("stop_reason"):
        yield f"stopping: {status['stop_reason']}"
    quiet_s = status.get("quiet_s", 0.0)
    if quiet_s > _QUIET_S:
        yield f"no step, evaluation, sync or save for {_clock(quiet_s)}"
    if status.get("audit", "ok") != "ok":
        yield f"conservation: {status['audit']}"
    count, last = status.get("warnings", 0), status.get("last_warnings") or ()
    if count and last:
        yield f"{count} warning{'s' if count > 1 else ''}, the last: {last[-1].splitlines()[0]}"


def _rewards(values: Sequence[float], width: int, bars: str) -> Text:
    label = f"reward {values[-1]:.3f}"
    room = width - len(label) - 2
    spark = _spark(values[-room:], bars) if width >= _NARROW else ""
    return Text.assemble((label, "bold"), "  ", (spark, "green"))


def _packed(cells: Sequence[Cell], width: int) -> list[Text]:
    """Cells side by side, in as many lines as it takes."""
    lines: list[Text] = []
    for label, value, style in cells:
        cell = Text.assemble((f"{label} ", "dim"), (value, style))
        if lines and lines[-1].cell_len + 3 + cell.cell_len <= width:
            lines[-1].append("   ").append_text(cell)
        else:
            lines.append(cell)
    return lines


def _spark(values: Sequence[float], bars: str) -> str:
    least, most = min(values), max(values)
    steps = (len(bars) - 1) / (most - least) if most > least else 0.0
    return "".join(bars[round((value - least) * steps)] for value in values)


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
