"""What a run looked like: `report.html` to read, `trace.json` to look into, from its files alone.

A report needs the extra `report`; nothing else here needs more than sc_core.
"""

from sc_core.seeing.lives import CannotShow as CannotShow
from sc_core.seeing.report import write_report as write_report
from sc_core.seeing.trace import write_trace as write_trace

__all__ = ["CannotShow", "write_report", "write_trace"]
