"""`report.html`: one page about a run, which needs nothing but itself to be read."""

from __future__ import annotations

import time
from pathlib import Path

from sc_core.errors import CannotShow
from sc_core.seeing.figures import figures
from sc_core.seeing.history import read_history
from sc_core.seeing.page import page


def document(run: str | Path) -> str:
    """The HTML of a run's report, with plotly in it; raises as `write_report` does."""
    history = read_history(run)
    return page(history, figures(history), _plotly_js(), made=time.time())


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise CannotShow(
            "a report has its curves from plotly, which is not installed:"
            " pip install 'single-controller[report]'"
        ) from None
    return str(get_plotlyjs())
