"""`report.html`: one page about a run, which needs nothing but itself to be read."""

from __future__ import annotations

import time
from pathlib import Path

from sc_core.seeing.figures import figures
from sc_core.seeing.files import replaced
from sc_core.seeing.history import read_history
from sc_core.seeing.lives import CannotShow
from sc_core.seeing.page import page

REPORT = "report.html"


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, and return where. The run may be going on.

    The file is replaced as a whole; it has plotly in it, some 5 MB.

    Raises:
        CannotShow: there is no event log, or nothing in it yet; or plotly is not installed.
        RestoreError: a complete line of the log is not an event.
        OSError: the file can't be written.
    """
    path = Path(run) / REPORT if out is None else Path(out)
    history = read_history(run)
    document = page(history, figures(history), _plotly_js(), made=time.time())
    with replaced(path) as file:
        file.write(document.encode("utf-8", "backslashreplace"))
    return path


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise CannotShow(
            "a report has its curves from plotly, which is not installed:"
            " pip install 'single-controller[report]'"
        ) from None
    return str(get_plotlyjs())
