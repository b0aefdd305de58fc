"""`report.html` and `trace.json`, at the end of each life of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sc_core import write_report, write_trace
from sc_ray.run_directory import EVENTS


def write_views(run: Path, say: Callable[[str], None]) -> None:
    """Write both, if there was a run at all. Whatever goes wrong is a line, and changes nothing."""
    if not (run / EVENTS).is_file():
        return
    for name, write in (("report.html", write_report), ("trace.json", write_trace)):
        try:
            write(run)
        except Exception as exc:  # how the run ended must not depend on its picture
            text = " ".join(str(exc).split()) or type(exc).__name__
            say(f"warning: {name} was not written: {text}")
