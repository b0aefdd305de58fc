"""What a terminal shows, and what anything that is none gets."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from sc_ray.progress import PlainConsole, console_on
from sc_ray.watching.live import LiveConsole, _Terminal

HIDES, SHOWS = "\x1b[?25l", "\x1b[?25h"
"""What would leave a terminal without a cursor, and give it back."""


def status(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "max_steps": 40,
        "bundles": ["step_10"] if step >= 10 else [],
        "places_held": 12,
        "places_capacity": 32,
        "in_flight": 8,
        "committed": 3,
        "engines": ["generation-0", "generation-1"],
        "audit": "ok",
        "last_metrics": {
            "step": step,
            "train/reward": step / 40,
            "train/staleness_versions_mean": 0.5,
            "train/staleness_versions_max": 2,
            "timing/train/total_step_time": 1.5,
            "timing/rollout_checkpoint/barrier_wait_seconds": 0.003,
        },
        **more,
    }


def shown(*statuses: dict[str, Any], width: int = 100, **terminal: Any) -> list[str]:
    """The lines of the panel after these, without colours."""
    now = [0.0]
    screen = _Terminal(
        file=io.StringIO(), width=width, height=40, force_terminal=True, record=True, **terminal
    )
    live = LiveConsole(io.StringIO(), console=screen, clock=lambda: now[0])
    for one in statuses:
        live.show(one)
        now[0] += 61.0
    screen.export_text()  # forgets what was shown on the way
    live.show(statuses[-1])
    lines = screen.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    return [line for line in lines if line.strip()]


def test_the_panel_tells_where_the_run_is() -> None:
    lines = shown(*(status(step) for step in range(1, 13)))
    text = "\n".join(lines)
    assert lines[0].startswith("╭") and lines[-1].startswith("╰")
    assert "step 12/40" in lines[1] and "1.50 s/step  0:00:42 left" in lines[1]
    assert "reward 0.300  ▁▂▂▃▄▄▅▅▆▇▇█" in lines[2]
    for told in (
        "staleness 0.50 (max 2)",
        "places 12/32",
        "in flight 8",
        "ready 3",
        "engines 2/2",
        "barrier wait 3 ms",
        "checkpoint step_10, 0:03:03 ago",
    ):
        assert told in text


def test_it_tells_what_is_out_of_the_ordinary_and_nothing_else() -> None:
    assert not {"warning", "stopping", "conservation"} & set(" ".join(shown(status(1))).split())
    text = " ".join(
        shown(
            status(
                3,
                engines=["generation-0"],
                engines_out={"generation-1": "it died"},
                warnings=2,
                last_warnings=["one", "W&B failed\nand more"],
                stop_reason="SIGTERM",
                gate_closed_for="weight sync",
                barrier={"checkpointing": True, "waiting": 4},
                audit="a group is lost",
                quiet_s=3700.0,
                last_evaluation={"val/reward": 0.25},
                evaluating=5,
            )
        )
    )
    for told in (
        "engines 1/2",
        "2 warnings, the last: W&B failed ",
        "stopping: SIGTERM",
        "no request leaves: weight sync",
        "a checkpoint holds the barrier; 4 wait",
        "conservation: a group is lost",
        "no step, evaluation, sync or save for 1:01:40",
        "val 0.250",
        "evaluating 5",
    ):
        assert told in text


def test_how_old_a_checkpoint_from_before_is_nobody_knows() -> None:
    text = "\n".join(shown(status(12), status(13)))
    assert "checkpoint step_10" in text and " ago" not in text


def test_before_the_first_step_there_is_a_panel_too() -> None:
    assert "step 0/40" in shown({"step": 0, "max_steps": 40})[1]
    assert shown({})[1:-1] == shown({})[1:-1] != []


@pytest.mark.parametrize("width", [20, 34, 50, 60, 99, 200])
def test_it_fits_terminals_of_any_width(width: int) -> None:
    lines = shown(status(1), status(2), width=width)
    assert max(map(len, lines)) <= width - 3
    assert "step 2/40" in lines[1]


def test_a_terminal_without_unicode_gets_ascii() -> None:
    class Old(io.StringIO):
        encoding = "ascii"

    screen = _Terminal(file=Old(), width=100, height=40, force_terminal=True)
    live = LiveConsole(io.StringIO(), console=screen)
    for step in (1, 2):
        live.show(status(step))
    assert isinstance(screen.file, Old)
    text = screen.file.getvalue()
    assert "reward 0.050" in text and text.isascii()


def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> str:
        screen = _Terminal(
            file=io.StringIO(), width=100, height=40, force_terminal=True, color_system="truecolor"
        )
        LiveConsole(io.StringIO(), console=screen).show(status(3))
        assert isinstance(screen.file, io.StringIO)
        return screen.file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in written()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in written()


def test_lines_that_stay_are_written_above_the_panel_and_the_cursor_is_never_hidden() -> None:
    screen = _Terminal(file=io.StringIO(), width=60, height=40, force_terminal=True)
    live = LiveConsole(io.StringIO(), console=screen)
    live.say("first [bold]")
    live.show(status(1))
    live.say("saved " + "x" * 100)
    live.show(status(2))
    live.rest()
    live.say("done")
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert HIDES not in text
    assert emulated(text, 60) == ["first [bold]", "saved " + "x" * 54, "x" * 46, "done"]


def emulated(text: str, columns: int) -> list[str]:
    """The lines that a terminal shows in the end; it knows what rich uses."""
    lines, row, column = [""], 0, 0
    at = 0
    while at < len(text):
        letter = text[at]
        if letter == "\x1b":
            end = at + 2
            while not text[end].isalpha():
                end += 1
            number, command = text[at + 2 : end], text[end]
            if command == "A":
                row -= int(number or 1)
            elif command == "K":
                lines[row] = ""
            at = end + 1
            continue
        at += 1
        if letter == "\r":
            column = 0
        elif letter == "\n":
            row, column = row + 1, 0
        else:
            if column == columns:
                row, column = row + 1, 0
            while len(lines) <= row:
                lines.append("")
            lines[row] = f"{lines[row][:column]:<{column}}{letter}{lines[row][column + 1 :]}"
            column += 1
        while len(lines) <= row:
            lines.append("")
    return [line.rstrip() for line in lines if line.strip()]


class Broken(io.StringIO):
    """A terminal that was closed."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error
        self.writes = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes += 1
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error")])
def test_a_terminal_that_is_gone_ends_no_run(error: OSError) -> None:
    stream = Broken(error)
    live = LiveConsole(stream)
    for step in (1, 2):
        live.show(status(step))
        live.say("saved")
    live.rest()
    live.leave()
    PlainConsole(stream if isinstance(error, BrokenPipeError) else io.StringIO()).say("done")
    assert 1 <= stream.writes <= 3


SAYS_ONE_LINE = r"""
import sys
from sc_ray import __main__ as command
from sc_ray.progress import console_on

def train(options):
    console_on(sys.stdout).say("done: 20 \u00b7 \udcff")
    return command.DONE

command._train = train
sys.exit(command.main(["train"]))
"""


def ended(stdout: Any, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", SAYS_ONE_LINE],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        timeout=60,
    )


@pytest.mark.parametrize("terminal", ["a full disk", "a pipe that nobody reads"])
def test_a_line_that_nobody_gets_changes_no_exit_status(terminal: str) -> None:
    if terminal == "a full disk":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reads, stdout = os.pipe()
        os.close(reads)
    process = ended(stdout)
    os.close(stdout)
    assert (process.returncode, process.stderr) == (0, b"")


def test_a_line_that_the_terminal_has_no_letters_for_is_told_all_the_same() -> None:
    process = ended(subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (process.returncode, process.stderr) == (0, b"")
    assert process.stdout == b"done: 20 \\xb7 \\udcff\n"


def test_only_a_terminal_that_can_move_its_cursor_gets_a_panel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Broken(BrokenPipeError())
    for name, kind in (("xterm", LiveConsole), ("dumb", PlainConsole), ("unknown", PlainConsole)):
        monkeypatch.setenv("TERM", name)
        assert isinstance(console_on(terminal), kind)
    monkeypatch.delenv("TERM")
    assert isinstance(console_on(terminal), PlainConsole)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(console_on(io.StringIO()), PlainConsole)


def on_a_terminal(command: list[str], *, columns: int, cwd: Path | None = None) -> tuple[int, str]:
    """Run a command on a real pseudo-terminal; its status, and all that it wrote there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""}
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=environment
    ) as process:
        os.close(slave)
        written = b""
        while True:
            try:
                chunk = os.read(master, 1 << 16)
            except OSError:  # the last end of it was closed
                break
            if not chunk:
                break
            written += chunk
        status = process.wait(300)
    os.close(master)
    return status, written.decode()


def test_a_second_signal_leaves_the_terminal_on_a_line_of_its_own() -> None:
    program = f"""
import signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sc_ray.progress import console_on
from sc_ray.supervise import Signals
from test_live import status
console = console_on(sys.stdout)
with Signals() as signals:
    signals.on_leave = console.leave
    signals.steer(on_stop=console.say, on_save=lambda: None)
    console.show(status(3))
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
"""
    code, written = on_a_terminal([sys.executable, "-c", program], columns=80)
    assert code == 1
    assert HIDES not in written
    assert written.endswith("\n")
    lines = emulated(written, 80)
    assert lines[0] == "SIGINT"
    assert "step 3/40" in lines[2]
    assert lines[-1].startswith("╰")
