"""What a run looked like: `report.html` to read, `trace.json` to look into, from its files alone.

What makes them is imported when they are made: `import sc_core` needs none of it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sc_core.seeing.files import replaced

REPORT, TRACE = "report.html", "trace.json"
STEPS = 50  #: that a trace has, if nobody asks for more: with 100 groups of 16, some 20 MB


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write `report.html` of a run, or `out`, and return where. The run may be going on.

    The file is replaced as a whole. It has plotly, of the extra `report`, in it: some 5 MB.

    Raises:
        CannotShow: there is no event log, or nothing in it yet; or plotly is not installed.
        RestoreError: a complete line of the log is not an event.
        OSError: the file can't be written.
    """
    from sc_core.seeing.report import document

    path = Path(run) / REPORT if out is None else Path(out)
    html = document(run).encode("utf-8", "backslashreplace")
    with replaced(path) as file:
        file.write(html)
    return path


def write_trace(run: str | Path, out: str | Path | None = None, *, steps: int = STEPS) -> Path:
    """Write `trace.json` of a run, or `out`, and return where. The run may be going on.

    It has the last `steps` steps, or all of them if that is 0; memory grows with them. The file
    is replaced as a whole.

    Raises:
        CannotShow: there is no event log, or nothing in it yet.
        RestoreError: a complete line of the log is not an event.
        OSError: the file can't be written.
    """
    from sc_core.seeing.trace import trace_events

    path = Path(run) / TRACE if out is None else Path(out)
    encode = msgspec.json.Encoder().encode
    with replaced(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b"\n"
        for event in trace_events(run, steps=steps):
            file.write(separator + encode(event))
            separator = b",\n"
        file.write(b"\n]}\n")
    return path
