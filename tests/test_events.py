from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from sc_core.errors import RestoreError
from sc_core.events import JsonlEventLog, JsonlMetrics, read_events
from sc_core.ports import EventSink, MetricsSink
from sc_core.testing.events import MemoryEventLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def written(path: Path, *, incarnation: str = "a", ordinals: int = 3) -> list[bytes]:
    """A log of `run_started` and some `admitted`; returns its lines."""
    log: EventSink
    log = opened = JsonlEventLog(path, incarnation=incarnation, now=lambda: 12.5)
    log.append("run_started", step=0, weight_version=0)
    log.append_many("admitted", [{"ordinal": ordinal} for ordinal in range(ordinals)])
    opened.close()
    return path.read_bytes().splitlines(keepends=True)


def test_an_event_is_one_line_with_only_what_it_has(path: Path) -> None:
    lines = written(path)
    assert json.loads(lines[1]) == {
        "seq": 2,
        "t": 12.5,
        "incarnation": "a",
        "event": "admitted",
        "ordinal": 0,
    }
    assert [event.ordinal for event in read_events(path)] == [None, 0, 1, 2]


def test_appending_returns_the_last_number(path: Path) -> None:
    log = JsonlEventLog(path)
    assert log.append("run_started") == 1
    assert log.append_many("trained", [{"ordinal": 0}, {"ordinal": 1}]) == 3 == log.seq
    assert log.append_many("trained", []) == 3
    log.close()


def test_the_events_of_one_instant_are_one_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    write = os.write

    def note(fd: int, data: Any) -> int:
        writes.append(bytes(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", note)
    written(path, ordinals=4)
    assert [data.count(b"\n") for data in writes] == [1, 4]


def test_a_line_is_in_the_file_once_append_returned(path: Path) -> None:
    log = JsonlEventLog(path)
    for ordinal in range(3):
        log.append("admitted", ordinal=ordinal)
        assert [event.ordinal for event in read_events(path)][-1] == ordinal
    log.close()


def test_numbers_go_on_over_incarnations(path: Path) -> None:
    written(path, incarnation="a")
    written(path, incarnation="b")
    events = list(read_events(path))
    assert [event.seq for event in events] == list(range(1, 9))
    assert [event.incarnation for event in events] == ["a"] * 4 + ["b"] * 4


def test_every_start_is_a_new_incarnation(path: Path) -> None:
    written(path, incarnation="a")
    with pytest.raises(RestoreError, match="incarnation a has events already"):
        JsonlEventLog(path, incarnation="a")
    first, second = JsonlEventLog(path), JsonlEventLog(path)
    assert first.incarnation != second.incarnation
    first.close()
    second.close()


@pytest.mark.parametrize("cut_at", range(1, 70))
def test_a_torn_last_line_is_left_out_and_cut_off(path: Path, cut_at: int) -> None:
    whole = written(path)
    path.write_bytes(b"".join(whole[:-1]) + whole[-1][:-1][:cut_at])
    assert [event.seq for event in read_events(path)] == [1, 2, 3]
    log = JsonlEventLog(path, now=lambda: 13.0)
    assert log.append("admitted", ordinal=2) == 4
    log.close()
    assert [event.ordinal for event in read_events(path)] == [None, 0, 1, 2]


def test_what_a_power_cut_makes_of_the_last_line_is_cut_off_too(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = written(path)
    path.write_bytes(b"".join(whole) + b'{"seq":5,"t":1\0\0\0\0\0\n')
    assert [event.seq for event in read_events(path)] == [1, 2, 3, 4]
    JsonlEventLog(path).close()
    assert path.read_bytes() == b"".join(whole)
    assert caplog.messages == [f"{path}: cut off a torn last line of 20 bytes"]


@pytest.mark.parametrize(
    "broken",
    [b"\n", b"\0\0\n", b'{"seq":3}\n', b'{"seq":3,"t":1.0\n', b'{"seq":"x\xff"}\n']
    + [b'{"settings":' + b'{"a":' * 100_000 + b"\n", b'{"seq":9223372036854775808}\n'],
)
def test_a_broken_line_in_the_middle_is_an_error_with_its_number(path: Path, broken: bytes) -> None:
    whole = written(path)
    before = b"".join([*whole[:2], broken, *whole[3:]])
    path.write_bytes(before)
    with pytest.raises(RestoreError, match=r"events\.jsonl: line 3 is not an event: "):
        list(read_events(path))
    with pytest.raises(RestoreError, match="line 3 is not an event"):
        JsonlEventLog(path)
    assert path.read_bytes() == before


def test_a_whole_last_line_that_is_no_event_is_not_thrown_away(path: Path) -> None:
    """A newer version may have written it; no tear makes a whole object."""
    whole = written(path)
    path.write_bytes(b"".join(whole) + b'{"seq":5,"t":1.0,"incarnation":"b","event":"danced"}\n')
    with pytest.raises(RestoreError, match=r"line 5 is not an event: Invalid enum value 'danced'"):
        JsonlEventLog(path)


def test_fields_that_a_newer_version_adds_are_ignored(path: Path) -> None:
    written(path)
    with path.open("ab") as file:
        file.write(b'{"seq":5,"t":1.0,"incarnation":"b","event":"stopped","mood":"fine"}\n')
    assert [event.event for event in read_events(path)][-1] == "stopped"


@pytest.mark.parametrize("written_bytes", [0, 10])
def test_a_failed_write_leaves_the_log_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, written_bytes: int
) -> None:
    log = JsonlEventLog(path)
    log.append("run_started")
    write = os.write
    pieces = iter([written_bytes] if written_bytes else [])

    def full(fd: int, data: Any) -> int:
        for piece in pieces:
            return write(fd, data[:piece])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: .*events\.jsonl"):
        log.append("admitted", ordinal=0)
    monkeypatch.setattr(os, "write", write)
    assert log.append("admitted", ordinal=0) == 2
    log.close()
    assert [event.seq for event in read_events(path)] == [1, 2]


def test_a_write_that_the_system_takes_in_pieces_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    written(path)
    assert [event.seq for event in read_events(path)] == [1, 2, 3, 4]


def test_sync_makes_content_and_name_durable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    log = JsonlEventLog(path)
    log.append("run_started")
    log.sync()
    log.sync()
    log.close()
    assert synced == [str(path), str(path.parent), str(path)]


def test_a_closed_log_takes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close
    monkeypatch.setattr(os, "close", lambda fd: closed.append(fd) or close(fd))  # type: ignore[func-returns-value]
    log = JsonlEventLog(str(path), incarnation="a")
    log.append("run_started")
    assert repr(log) == f"<JsonlEventLog {path} at 1, incarnation a>"
    log.close()
    log.close()
    assert len(closed) == 1
    with pytest.raises(OSError, match=r"events\.jsonl"):
        log.append("stopped")
    assert [event.event for event in read_events(path)] == ["run_started"]


def test_an_unknown_field_is_refused(path: Path) -> None:
    log = JsonlEventLog(path)
    with pytest.raises(TypeError, match="mood"):
        log.append("stopped", mood="fine")
    log.close()
    assert path.read_bytes() == b""


# in memory -----------------------------------------------------------------------------


def test_the_log_in_memory_numbers_as_the_one_on_disk(path: Path) -> None:
    memory, disk = MemoryEventLog("a"), JsonlEventLog(path, incarnation="a", now=lambda: 0.0)
    sinks: tuple[EventSink, ...] = (memory, disk)
    for log in sinks:
        log.append("run_started", step=0)
        assert log.append_many("admitted", [{"ordinal": 0}, {"ordinal": 1}]) == log.seq == 3
        log.sync()
    disk.close()
    assert memory.events == list(read_events(path))


def test_a_crash_in_memory_may_lose_what_was_not_synced() -> None:
    log = MemoryEventLog("a")
    log.append("run_started")
    log.sync()
    log.append("admitted", ordinal=0)
    killed = log.after_crash("b")
    power_cut = log.after_crash("c", lose_unsynced=True)
    assert (killed.append("resumed"), power_cut.append("resumed")) == (3, 2)
    log.append("admitted", ordinal=1)
    assert [event.incarnation for event in killed.events] == ["a", "a", "b"]
    assert [event.incarnation for event in power_cut.events] == ["a", "c"]


# metrics -------------------------------------------------------------------------------


def test_metrics_are_one_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    opened = JsonlMetrics(str(path))
    metrics: MetricsSink = opened
    metrics.write({"step": 1, "train/loss": math.nan, "train/grad_norm": math.inf, "name": "x"})
    assert json.loads(path.read_text()) == {
        "step": 1,
        "train/loss": None,
        "train/grad_norm": None,
        "name": "x",
    }
    opened.close()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        metrics.write({"step": 2})


def test_numbers_of_other_libraries_are_written_as_floats(tmp_path: Path) -> None:
    class Scalar:
        def __float__(self) -> float:
            return 0.5

    metrics = JsonlMetrics(tmp_path / "metrics.jsonl")
    metrics.write({"train/loss": Scalar()})
    with pytest.raises(TypeError):
        metrics.write({"train/loss": object()})
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"train/loss":0.5}\n'


def test_a_torn_last_line_of_metrics_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n{"st')
    metrics = JsonlMetrics(path)
    metrics.write({"step": 3})
    metrics.close()
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n{"step":3}\n'
